"""Out-of-core deep learning without code changes. The functions here are PyTorch's::

    import ooc
    ooc.enable(budget="2GiB")

`ooc.numpy` is a device for NumPy; `ooc.cupy`, `ooc.numba` and `ooc.cuda_core` allocate for those libraries;
`ooc.prometheus` shows the figures of all of them.
"""

from ooc.pytorch import *  # noqa: F403
from ooc.pytorch import __all__ as __all__
