"""Host limits: how much memory this process may still take, from the kernel and from its control group.

Control groups come in two versions. Version 2 has one tree (``/sys/fs/cgroup``, ``memory.max``), version 1 a tree for
memory alone (``/sys/fs/cgroup/memory``, ``memory.limit_in_bytes``). Every group up to the root may set a limit. Inside
a container the path of the process's group often does not exist, because the group's folder is mounted as the root;
then the limits at the root are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNLIMITED_FROM = 1 << 60  # version 1 writes a huge number for "no limit"


@dataclass(frozen=True)
class CgroupMemory:
    """The tightest memory limit of a control group and its ancestors."""

    limit_bytes: int
    used_bytes: int  # without page cache that the kernel can drop
    path: str  # of the group that sets it, for messages

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """Returns the limit on this process that leaves the least room, or None if there is no limit.

    `root` is where ``proc`` and ``sys`` are found, for tests.
    """
    return min(_groups(root), key=lambda group: group.available_bytes, default=None)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: what the kernel calls available, or less if a control group says so."""
    fields = _fields(root / "proc/meminfo")
    available = fields.get("MemAvailable", fields.get("MemFree", 0))
    group = cgroup_memory(root)
    return available if group is None else min(available, group.available_bytes)


def peak_rss_bytes(root: Path = Path("/")) -> int:
    """The most memory that this process had resident at a time, in bytes.

    Unlike `getrusage`, whose figure begins as that of the process that started this one. It is 0 where the kernel does
    not say.
    """
    return _fields(root / "proc/self/status").get("VmHWM", 0)


def largest_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process could take if nobody else took any: the machine's memory, or its group's limit."""
    total = _fields(root / "proc/meminfo").get("MemTotal", UNLIMITED_FROM)
    return min([total, *(group.limit_bytes for group in _groups(root))])


def _groups(root: Path) -> list[CgroupMemory]:
    return [group for folder in _folders(root) if (group := _read_group(folder, root)) is not None]


def _folders(root: Path) -> list[Path]:
    """Folders of this process's memory groups, each with its ancestors up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder != mount and mount in folder.parents:
            folders.append(folder)
            folder = folder.parent
        folders.append(mount)
    return folders


def _read_group(folder: Path, root: Path) -> CgroupMemory | None:
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read_number(folder / limit_file)
        if limit is None or limit >= UNLIMITED_FROM:
            continue
        used = _read_number(folder / used_file) or 0
        try:
            droppable = _fields(folder / "memory.stat").get(cache_key, 0)
        except OSError:
            droppable = 0
        return CgroupMemory(limit, max(0, used - droppable), f"/{folder.relative_to(root)}")
    return None


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # version 2 writes "max" for no limit


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file with lines such as ``inactive_file 12`` or ``MemTotal: 12 kB``, in bytes."""
    fields = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, number, *unit = [*line.split(), "", ""]
        if number.isdigit():
            fields[name.rstrip(":")] = int(number) * (1024 if "kB" in unit else 1)
    return fields
