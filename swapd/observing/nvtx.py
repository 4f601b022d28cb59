"""NVTX: functions and stalls as ranges that NVIDIA's Nsight Systems shows. This module finds a library of NVTX's calls.

NVTX itself is a header that looks for a tool. The libraries in `NAMES` export the same calls for programs without that
header, such as the core (`ooc_core_ranges_load`). This has only been run with a library that writes down its calls.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAMES = ("libnvtx3interop.so", "libnvToolsExt.so.1")  # of CUDA 13's package, and of the packages before it


def candidates() -> list[str]:
    """Libraries to try, best first: those of the installed NVIDIA packages, then what the loader finds by name."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [str(path) for name in NAMES for root in roots for path in sorted(root.glob(f"*/lib/{name}*"))]
    return [*found, *NAMES]
