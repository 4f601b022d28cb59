"""Mechanism: chunks, virtual addresses, regions, copies. Knows no plans and no frameworks.

The native core is reached through :class:`ooc_alloc.Core`. It is imported only when one of the names below is asked
for, because `import torch` reads this file wherever the package is installed, even if nobody wants the allocator.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ooc_alloc.core import Core
    from ooc_alloc.iterations import Iteration, TraceArrays
    from ooc_alloc.library import (
        ABI_VERSION,
        READ,
        WRITE,
        DriverFailure,
        OocError,
        OutOfMemory,
        StrictViolation,
        device_memory,
        library_path,
        refused_settings,
    )

__all__ = [
    "ABI_VERSION",
    "READ",
    "WRITE",
    "Core",
    "DriverFailure",
    "Iteration",
    "OocError",
    "OutOfMemory",
    "StrictViolation",
    "TraceArrays",
    "device_memory",
    "library_path",
    "refused_settings",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ooc_alloc import core, iterations, library

    home = {"Core": core, "Iteration": iterations, "TraceArrays": iterations}.get(name, library)
    return getattr(home, name)
