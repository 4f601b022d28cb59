"""Functions larger than the budget, in parts: what the adapter does when an operator does not fit.

    registry.py     what handlers register with, and where an operator's handler is looked for
    runtime.py      what one session has: part sizes, mode, store; the `ooc_split::...` operators that the adapter calls
    conditions.py   what verdicts and costs depend on: processor, PyTorch, and our own code
    context.py      what a handler may ask: how large a part may be, large results, which division is exact; counts
    geometry.py     views, the memory that they touch, and how they are cut
    verification.py random arguments, bits compared, differences, also in a thread beside the program
    cutting.py      where operands are cut that may be cut anywhere, and what operators return, without memory
    pointwise.py    the operators that compute each element by itself, also over lists, or draw random numbers
    movement.py     those that only move data, and those that make tensors
    dividers.py     handlers made of a divider, or of axes alone
    axes.py         what is cut along: rows, channels, heads, and block sizes that fit; parts.py: divisions along axes;
                    blocks.py: how blocks are run
    tables.py       axes from tables, and the operators that need no more
    convolution.py reductions.py selection.py   those with dimensions along which a cut leaves sums whole
    fast.py         convolutions that fit, as measure.py found to be fastest among the algorithms in kernels.py
    mmcnn.py        in how many parts mmCNN has layers run

A handler is a function `f(context, *arguments, **keywords)` with the operator's own arguments, registered by
`@registry.handler("aten::name")` in one of `registry.MODULES`. It runs below autograd, in range mode: the
operators that it calls are functions of their own, and a view counts as the part of its variable that it reaches. A
handler works on plain tensors too, without a core.
"""
