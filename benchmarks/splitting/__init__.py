"""How long the splitting programmes take to solve. The kernels' costs are modelled: nothing here measures a kernel."""
