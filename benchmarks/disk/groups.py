"""A memory control group for one run: a limit that counts everything, and what the kernel counted.

Version 1 has its files under /sys/fs/cgroup/memory, version 2 under /sys/fs/cgroup. A run has a group of its own, so
that its counters begin at 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disk.undo import Undo, set_value

_MOST_TRIES = 50  # times that the group is asked to be gone; its last process may still be ending


class NoGroup(Exception):
    """This machine has no memory control group that can be used; the message says why."""


@dataclass(frozen=True)
class _Files:
    limit: str
    no_limit: str
    peak: str
    events: str  # holds a line "oom_kill N"


_FIRST = _Files("memory.limit_in_bytes", "-1", "memory.max_usage_in_bytes", "memory.oom_control")
_SECOND = _Files("memory.max", "max", "memory.peak", "memory.events")


class MemoryGroup:
    """A group below the topmost one; processes join with :meth:`joining`.

    Args:
        undo: gets the line that ends what is left in the group and removes it.
        root: where the machine's file system begins; tests have another one.

    Raises:
        NoGroup: there is no memory controller.
        OSError: the group cannot be made.
    """

    def __init__(self, undo: Undo, root: Path = Path("/")) -> None:
        self.version, parent = find_controller(root)
        self._files = _FIRST if self.version == 1 else _SECOND
        self._root, self._undo = root, undo
        if self.version == 2:
            _hand_down(undo, parent, "memory")
        self.path = parent / f"ooc-disk-bench-{os.getpid()}"
        # Killed processes leave the group a moment later.
        undo.before(
            f"g='{self.path}'; i=0; while [ -d $g ] && ! rmdir $g 2>&-; do kill -9 $(cat $g/cgroup.procs) 2>&-; "
            f"i=$((i+1)); [ $i -lt {_MOST_TRIES} ] || exit 1; sleep 0.1; done"
        )
        self.path.mkdir()

    def limit(self, limit_bytes: int | None) -> None:
        """None is no limit."""
        text = self._files.no_limit if limit_bytes is None else str(limit_bytes)
        (self.path / self._files.limit).write_text(text, encoding="utf-8")

    def swappiness(self, value: int) -> None:
        """How readily the kernel swaps rather than drops pages of files; 0 to 200. In version 2 the machine's."""
        if self.version == 1:
            (self.path / "memory.swappiness").write_text(str(value), encoding="utf-8")
        else:
            set_value(self._undo, self._root / "proc/sys/vm/swappiness", str(value))

    def joining(self, command: list[str]) -> list[str]:
        """`command` such that it runs in the group from its first instruction on."""
        return ["sh", "-c", f"echo $$ > '{self.path}/cgroup.procs' && exec \"$@\"", "sh", *command]

    def peak_bytes(self) -> int:
        """The most that was counted at once: memory of programs, page cache, and the kernel's own for them."""
        return int(self._read(self._files.peak))

    def killed(self) -> bool:
        """Whether the kernel ended a process as the limit left no other way."""
        return fields(self._read(self._files.events)).get("oom_kill", 0) > 0

    def stat(self) -> dict[str, int]:
        """`memory.stat`."""
        return fields(self._read("memory.stat"))

    def _read(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")


def find_controller(root: Path) -> tuple[int, Path]:
    """The version of the memory controller, and the folder of its topmost group. Raises NoGroup."""
    groups = root / "sys/fs/cgroup"
    if (groups / "memory/memory.limit_in_bytes").exists():
        return 1, groups / "memory"
    controllers = groups / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text(encoding="utf-8").split():
        return 2, groups
    raise NoGroup(
        "there is no memory control group: neither /sys/fs/cgroup/memory (version 1) nor `memory` in "
        "/sys/fs/cgroup/cgroup.controllers (version 2); in a container, run this outside of it"
    )


def _hand_down(undo: Undo, parent: Path, controller: str) -> None:
    """Groups of version 2 have the controllers that the group above hands down."""
    path = parent / "cgroup.subtree_control"
    if controller not in path.read_text(encoding="utf-8").split():
        undo.before(f"echo '-{controller}' > '{path}'")
        path.write_text(f"+{controller}", encoding="utf-8")


def hold_in_group(undo: Undo, group: MemoryGroup, device: str, bytes_per_second: int) -> None:
    """Version 2: the group's traffic with `device` ("major:minor"), swap and page cache included, is held each way."""
    _hand_down(undo, group.path.parent, "io")
    text = f"{device} rbps={bytes_per_second} wbps={bytes_per_second}"
    (group.path / "io.max").write_text(text, encoding="utf-8")


def fields(text: str) -> dict[str, int]:
    """{name: number} of lines "name number", as many files of the kernel have them."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].lstrip("-").isdigit()}
