"""What this benchmark needs of the machine, checked before anything is changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from benchmarks.disk import swap
from benchmarks.disk.cases import ARMS
from benchmarks.disk.groups import NoGroup, find_controller

GIB = 1 << 30


def missing(folder: Path, free_bytes: int, *, swaps: bool, root: Path = Path("/")) -> list[str]:
    """A sentence for each thing that is not there; `swaps` is whether any arm does."""
    found = []
    if os.geteuid() != 0:
        found.append("root is needed, for control groups and swap: run it with sudo")
    try:
        find_controller(root)
    except NoGroup as none:
        found.append(str(none))
    if not folder.is_dir():
        return [*found, f"{folder} is not a folder: name one on the disk to be measured with --disk"]
    if os.major(os.stat(folder).st_dev) == 0:
        found.append(f"{folder} is not on a disk of its own (tmpfs, overlay, network): name another with --disk")
    free = shutil.disk_usage(folder).free
    if free < free_bytes:
        found.append(
            f"{folder} has {free / GIB:.1f} GiB free and {free_bytes / GIB:.0f} GiB are needed: "
            "make room, or name another folder with --disk"
        )
    if swaps:
        if on := swap.others(root):
            found.append(f"other swap is on ({', '.join(on)}), and would be measured too: turn it off (swapoff -a)")
        for tool in ("mkswap", "swapon", "swapoff"):
            if shutil.which(tool) is None:
                found.append(f"`{tool}` is not installed (util-linux)")
    return found


def arms_without_library(names: Iterable[str]) -> dict[str, str]:
    """{arm: why it is left out} of those whose library is not installed."""
    return {
        name: f"the arm {name!r} is left out: {ARMS[name].needs} is not installed (the extra `benchmarks`)"
        for name in names
        if ARMS[name].needs and importlib.util.find_spec(ARMS[name].needs) is None
    }
