"""What the kernel counts: bytes of a disk, of the swap, and of a process. Nothing here imports more than it must."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

_SECTOR_BYTES = 512  # in /sys/dev/block/*/stat, whatever the disk's own sectors are
_FROM_STATUS = {"VmHWM": "peak_rss_bytes", "VmRSS": "rss_bytes"}


def device_of(folder: Path) -> str:
    """"major:minor" of the disk that `folder` is on."""
    number = os.stat(folder).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def disk_bytes(device: str, root: Path = Path("/")) -> dict[str, int]:
    """Bytes that the disk has read and written since the start, for whomever."""
    words = (root / "sys/dev/block" / device / "stat").read_text(encoding="utf-8").split()
    return {"read_bytes": int(words[2]) * _SECTOR_BYTES, "written_bytes": int(words[6]) * _SECTOR_BYTES}


def swap_bytes(root: Path = Path("/")) -> dict[str, int]:
    """Bytes swapped in and out by the whole machine since the start."""
    found = {}
    for line in (root / "proc/vmstat").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name in ("pswpin", "pswpout"):
            found[name] = int(value) * resource.getpagesize()
    return {"swapped_in_bytes": found.get("pswpin", 0), "swapped_out_bytes": found.get("pswpout", 0)}


def process_bytes(process: str = "self", root: Path = Path("/")) -> dict[str, int]:
    """What a process caused to be read, swap included, and written, without swap; empty if nobody counts that."""
    try:
        text = (root / "proc" / process / "io").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = {name: int(value) for name, _, value in (line.partition(": ") for line in text.splitlines())}
    return {"process_read_bytes": found["read_bytes"], "process_written_bytes": found["write_bytes"]}


def memory_bytes(process: str = "self", root: Path = Path("/")) -> dict[str, int]:
    """The resident memory of a process: now, and the most that it ever was."""
    found = {}
    for line in (root / "proc" / process / "status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in _FROM_STATUS:
            found[_FROM_STATUS[name]] = int(value.split()[0]) * 1024
    return found


def forget_peak() -> None:
    """The peak of this process's resident memory begins again at what it is now, where the kernel can do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


SETTINGS = {
    "page_cluster": "proc/sys/vm/page-cluster",
    "swappiness": "proc/sys/vm/swappiness",
    "huge_pages": "sys/kernel/mm/transparent_hugepage/enabled",
    "zswap": "sys/module/zswap/parameters/enabled",
    "rotational": "sys/dev/block/{device}/queue/rotational",
    "read_ahead_kb": "sys/dev/block/{device}/queue/read_ahead_kb",
    "scheduler": "sys/dev/block/{device}/queue/scheduler",
    "proactive": "sys/kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes/0/action",  # `pageout` swaps what is idle
}


def settings(device: str, root: Path = Path("/")) -> dict[str, str]:
    """How the machine has the settings that swap and page cache depend on; those that it has."""
    paths = {name: root / path.format(device=device) for name, path in SETTINGS.items()}
    return {name: path.read_text(encoding="utf-8").strip() for name, path in paths.items() if path.is_file()}


def everything(device: str, root: Path = Path("/")) -> dict[str, int]:
    """All counters that only grow, of this process, the machine's swap, and a disk."""
    faults = {"major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt}
    return disk_bytes(device, root) | swap_bytes(root) | process_bytes("self", root) | faults


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in after.items()}
