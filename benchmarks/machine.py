"""What a figure was measured on: a benchmark without its machine is worth nothing."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's model name, or "unknown"."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def memory_bytes() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes: near 0 before a run, or others disturbed it."""
    return [round(value, 2) for value in os.getloadavg()]


def stolen_seconds() -> float:
    """Core seconds since the start that the host of this virtual machine gave to others; 0 if it does not say."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
        return int(words[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def waited_seconds() -> float:
    """Seconds for which this process's threads were ready to run and got no processor; 0 if the kernel does not say."""
    waited = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # the thread may be gone
            waited += int(path.read_text(encoding="utf-8").split()[1])
    return waited * 1e-9


def describe() -> dict[str, Any]:
    """The machine, its software, and the time and load of this moment."""
    import torch

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": load(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def words(machine: dict[str, Any]) -> str:
    """One line for people."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, PyTorch {machine['torch']}"
    )
