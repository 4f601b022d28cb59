"""Mechanism: chunks, virtual addresses, regions, copies. Knows no plans and no frameworks.

The native core is reached through :class:`ooc_alloc.Core`.
"""

from ooc_alloc._native import (
    READ,
    WRITE,
    Core,
    DriverFailure,
    Iteration,
    OocError,
    OutOfMemory,
    StrictViolation,
    TraceArrays,
    device_memory,
    library_path,
)

__all__ = [
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
]
