"""Disk profile: what was measured of a disk, kept in a file that a session with OOC_DISK reads.

    $XDG_CACHE_HOME/ooc_alloc/disk-<device number>.json        (by default under ~/.cache)

`swapd probe --disk` writes it. A number may mean another disk after a restart: a file of another mount point counts as
absent. So does a damaged one, which is set aside as in `profile.py`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from swapd.devices.disk import FileSystem, file_system_of
from swapd.devices.profile import MachineError, cache_directory, checked, fields_of, load_kept
from swapd.files import write_whole
from swapd.trace.trace import Machine
from swapd.units import MIB

FORMAT = "ooc-disk"
VERSION = 1
PIECE_BYTES = 2 * MIB  # that the core reads or writes at a time (`ooc_alloc/csrc/disk_queue.h`)
DEPTH_UNKNOWN = 4  # pieces under way in each direction on a disk that nobody has measured
_DEEPEST = 64  # more pieces under way than any probe tries: such a file is damaged, and a thread each would be too many
_NEARLY_BEST = 0.95  # more pieces under way than this needs would only wait


@dataclass(frozen=True)
class DiskSpeed:
    """Pieces of `piece_bytes`, `depth` of them under way in each direction. Speeds are bytes per second."""

    piece_bytes: int
    depth: int
    read_alone: float
    written_alone: float
    read_with_both: float  # while as many are written
    written_with_both: float  # while as many are read

    def of_equal_amounts(self) -> tuple[float, float]:
        """The speeds (read, written) where as much is read as written, as plans do, and both begin at once.

        Whichever direction ends first leaves the disk to the other, which many disks hold up much for it.
        """
        ways = [(self.read_with_both, self.read_alone), (self.written_with_both, self.written_alone)]
        fast, slow = max(ways)[0], min(ways)[0]
        slow_alone = max(slow, min(ways)[1])
        seconds = 1 / fast + (1 - slow / fast) / slow_alone  # for a byte of the slower direction
        return (fast, 1 / seconds) if self.read_with_both >= self.written_with_both else (1 / seconds, fast)

    @property
    def both(self) -> float:
        """Bytes per second of both directions together, where as much is read as written."""
        return 2 * min(self.of_equal_amounts())


@dataclass(frozen=True)
class DiskProfile:
    """One probe of the disk that a folder is on."""

    mount: str  # the mount point
    kind: str  # of the file system
    device: str  # its number, "major:minor"
    measured: str  # when, ISO 8601, UTC
    direct: bool  # with direct I/O; else through the page cache, which the file system insists on
    file_bytes: int  # of the file that was read and written
    speeds: tuple[DiskSpeed, ...]  # by rising piece, then by rising depth

    @property
    def recommended(self) -> DiskSpeed:
        """The smallest depth whose speed with both directions at once is within 5% of the best.

        It is that of pieces as the core moves them, or of the largest smaller ones if no such piece was measured.
        """
        fitting = [row.piece_bytes for row in self.speeds if row.piece_bytes <= PIECE_BYTES]
        piece = max(fitting) if fitting else min(row.piece_bytes for row in self.speeds)
        rows = [row for row in self.speeds if row.piece_bytes == piece]
        enough = _NEARLY_BEST * max(row.both for row in rows)
        return min((row for row in rows if row.both >= enough), key=lambda row: row.depth)

    def machine(self) -> Machine:
        """Link speeds for planning: the disk's, both directions at once, at the recommended depth."""
        read, written = self.recommended.of_equal_amounts()
        return Machine(out_bytes_per_second=written, in_bytes_per_second=read)

    def to_json(self) -> str:
        """The content of the profile's file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DiskProfile:
        """Reads what `to_json` wrote. Raises MachineError."""
        fields = fields_of(text, FORMAT, VERSION)
        try:
            fields["speeds"] = tuple(checked(DiskSpeed, row) for row in fields["speeds"])
            profile: DiskProfile = checked(cls, fields)
            if not profile.speeds or any(min(dataclasses.astuple(row)) <= 0 for row in profile.speeds):
                raise ValueError("nothing was measured")
            if any(not isinstance(row.depth, int) or row.depth > _DEEPEST for row in profile.speeds):
                raise ValueError("no depth that was measured")
            profile.machine()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MachineError(f"damaged ({error!r})") from None
        return profile


def disk_profile_path(device: str) -> Path:
    """Where the profile of the disk with a number ("major:minor") is, or would be."""
    return cache_directory() / f"disk-{device.replace(':', '-')}.json"


def load_disk_profile(system: FileSystem) -> DiskProfile | None:
    """The kept profile of a file system, or None."""
    again = "Run `swapd probe --disk` again"
    profile = load_kept(disk_profile_path(system.device), DiskProfile.from_json, again)
    return profile if profile is not None and (profile.mount, profile.kind) == (system.mount, system.kind) else None


def save_disk_profile(profile: DiskProfile) -> Path:
    """Keeps a profile, whole or not at all, and returns its path. Raises OSError."""
    path = disk_profile_path(profile.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, profile.to_json().encode())
    return path


def known_disk(folder: Path) -> DiskProfile | None:
    """The kept profile of the disk that a folder is on, without measuring; None if there is none."""
    try:
        return load_disk_profile(file_system_of(folder))
    except OSError:
        return None
