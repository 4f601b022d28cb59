"""The kernel's swap, on a file that is made for one run and removed after it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.disk.groups import MemoryGroup
from benchmarks.disk.undo import Undo, set_value


class NoSwap(Exception):
    """The kernel does not swap to this file; the message has its own words."""


@dataclass(frozen=True)
class Tuning:
    """Settings of the kernel's swap; None is as the machine has it.

    `page_cluster`: 2 to the power of it are the pages read at once. `swappiness`: 0 to 200; above 100 programs' memory
    is swapped before pages of files are dropped. `turns`: what the disk says of itself; where it does not turn, the
    kernel reads around the addresses that a program uses rather than around the place in the swap file.
    """

    page_cluster: int | None = None
    swappiness: int | None = None
    turns: bool | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        said = {"page-cluster": self.page_cluster, "swappiness": self.swappiness, "rotational": self.turns}
        return ", ".join(f"{name} {int(value)}" for name, value in said.items() if value is not None) or "as it comes"


AS_IT_COMES = Tuning()
# What is tried for the tuned arm. A cluster of 0, as recommended for swap in compressed memory, takes several times as
# long on a disk. Along addresses, clusters of more than 5 are no different from 5.
CANDIDATES = (
    AS_IT_COMES,
    Tuning(page_cluster=5),
    Tuning(page_cluster=8),
    Tuning(page_cluster=8, swappiness=200),
    Tuning(page_cluster=3, turns=False),
    Tuning(page_cluster=5, swappiness=200, turns=False),
)


def others(root: Path = Path("/")) -> list[str]:
    """Swap that is on already."""
    lines = (root / "proc/swaps").read_text(encoding="utf-8").splitlines()[1:]
    return [line.split()[0] for line in lines if line.strip()]


def turn_on(
    undo: Undo, path: Path, size_bytes: int, device: str, tuning: Tuning, group: MemoryGroup, root: Path = Path("/")
) -> None:
    """Makes the swap file `path` on the disk `device` and swaps to it. Raises NoSwap."""
    if tuning.page_cluster is not None:
        set_value(undo, root / "proc/sys/vm/page-cluster", str(tuning.page_cluster))
    if tuning.turns is not None:
        block = (root / "sys/dev/block" / device).resolve()
        queue = block / "queue" if (block / "queue").exists() else block.parent / "queue"
        set_value(undo, queue / "rotational", str(int(tuning.turns)))
    if tuning.swappiness is not None:
        group.swappiness(tuning.swappiness)
    undo.before(f"rm -f '{path}'")
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    undo.before(f"! grep -q '^{path} ' /proc/swaps || swapoff '{path}'")
    for command in (("mkswap", str(path)), ("swapon", str(path))):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoSwap(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
