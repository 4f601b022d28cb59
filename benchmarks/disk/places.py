"""Where an arm keeps its bytes: a folder of the disk as it is, or of a disk that the kernel holds to a bandwidth.

The held disk is a loop device over a file on the same disk, with a file system of its own. The limit is set on that
device, so nobody else is slowed down; and all that an arm does reaches it: direct I/O, the page cache and a swap file.
Where control groups are of version 1, the kernel counts swap and written-back pages as the topmost group's, whoever
caused them, so the limit is the topmost group's and the arm's processes stay in it. In version 2 it is the arm's own.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disk.bandwidth import BLOCK_BYTES
from benchmarks.disk.counting import device_of
from benchmarks.disk.undo import Undo, set_value

_THROTTLES = [f"sys/fs/cgroup/blkio/blkio.throttle.{way}_bps_device" for way in ("read", "write")]


class CannotHold(Exception):
    """The kernel cannot hold a disk to a bandwidth here; the message says why."""


@dataclass(frozen=True)
class Place:
    """A folder that is empty between runs, its disk, and the bytes a second that it is held to, each way."""

    folder: Path
    device: str  # major:minor
    held: int | None = None

    @property
    def label(self) -> str:
        return "as it is" if self.held is None else f"{self.held / 1e6:.0f} MB/s"


def as_it_is(undo: Undo, folder: Path) -> Place:
    """A folder of our own in `folder`, removed at the end."""
    mine = folder / f"ooc-disk-bench-{os.getpid()}"
    undo.before(f"rm -rf '{mine}'")
    mine.mkdir()
    return Place(mine, device_of(mine))


def held(undo: Undo, under: Place, size_bytes: int, bytes_per_second: int, root: Path = Path("/")) -> Place:
    """A file system of `size_bytes` in a file under `under`, held to a bandwidth each way.

    Raises:
        CannotHold: there are no loop devices, no ext4 tools, or the kernel was built without throttling.
    """
    first = (root / _THROTTLES[0]).exists()
    if not first and not (root / "sys/fs/cgroup/cgroup.controllers").exists():
        raise CannotHold("the kernel has neither blkio.throttle (control groups version 1) nor io.max (version 2)")
    for tool in ("losetup", "mkfs.ext4", "mount"):
        if shutil.which(tool) is None:
            raise CannotHold(f"`{tool}` is not installed (util-linux, e2fsprogs)")
    image, folder = under.folder / "held.img", under.folder / "held"
    undo.before(f"rm -rf '{image}'")
    _write_whole(image, size_bytes)
    undo.before(f"losetup -j '{image}' | cut -d: -f1 | xargs -r losetup -d")
    loop = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
    block = root / "sys/block" / Path(loop).name
    if (block / "loop/dio").read_text(encoding="utf-8").strip() != "1":
        raise CannotHold(f"{loop} refuses direct I/O, so that its bytes would be cached twice")
    # The swap's readahead depends on whether its disk says that it turns, so this one says what the real one says.
    real = root / "sys/dev/block" / under.device
    queue = next((path for path in (real / "queue", real.resolve().parent / "queue") if path.exists()), None)
    if queue is not None:
        for name in ("rotational", "read_ahead_kb"):
            set_value(undo, block / "queue" / name, (queue / name).read_text(encoding="utf-8").strip())
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard,lazy_itable_init=0", loop)
    folder.mkdir()
    undo.before(f"! mountpoint -q '{folder}' || umount '{folder}'")
    _run("mount", loop, str(folder))
    device = device_of(folder)
    if first:
        for throttle in (root / name for name in _THROTTLES):
            undo.before(f"echo '{device} 0' > '{throttle}'")
            throttle.write_text(f"{device} {bytes_per_second}", encoding="utf-8")
    return Place(folder, device, bytes_per_second)


def _write_whole(path: Path, size_bytes: int) -> None:
    """A file of 4 MiB blocks that were all written once: the first write to what is only reserved takes longer."""
    with mmap.mmap(-1, BLOCK_BYTES) as zeros:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(file, 0, size_bytes)
            for place in range(0, size_bytes, BLOCK_BYTES):
                os.pwrite(file, zeros, place)
        finally:
            os.close(file)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotHold(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()
