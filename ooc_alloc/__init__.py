"""Mechanism: chunks, virtual addresses, regions, copies. Knows no plans and no frameworks.

The native core is reached through :class:`ooc_alloc.Core`.
"""

from ooc_alloc._native import (
    ABI_VERSION,
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
