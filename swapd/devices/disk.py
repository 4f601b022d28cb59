"""A folder as swapped data would see it: its file system, what is free there, and whether direct I/O works.

What is tried is what `ooc_alloc/csrc/disk_file.cpp` does: a file without a name, or one that is unlinked at once,
opened for direct I/O.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # file systems whose files are memory
OVER_A_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs")
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)  # what open() says where O_TMPFILE is not known


@dataclass(frozen=True)
class FileSystem:
    """Where a folder lies."""

    mount: str  # the mount point
    kind: str  # as the kernel calls it, such as "ext4"; "unknown" where /proc does not say
    device: str  # its device number, "major:minor"


@dataclass(frozen=True)
class Disk:
    """A folder's file system, and what it is good for."""

    system: FileSystem
    free_bytes: int
    direct: bool  # whether it takes direct I/O
    nameless: bool  # whether it has files without a name

    @property
    def in_memory(self) -> bool:
        """Whether its files are memory, so that nothing is gained by swapping to them."""
        return self.system.kind in IN_MEMORY


def file_system_of(folder: Path) -> FileSystem:
    """The file system that a folder is on. Raises OSError if there is no such folder."""
    place = folder.resolve(strict=True)
    number = os.stat(place).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    mount, kind = "", "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        for line in lines:  # the longest path that leads to the folder, and of equal ones the last that was mounted
            before, _, after = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4])
            if len(point) >= len(mount) and place.is_relative_to(point):
                mount, kind = point, after.split(" ")[0]
    return FileSystem(mount, kind, device)


def describe(folder: Path) -> Disk:
    """Tries what swapped data would do in a folder: makes a file there that is gone afterwards, and writes a page.

    Raises:
        OSError: there is no such folder, or this user may not write to it.
    """
    system = file_system_of(folder)
    file, direct, nameless = open_nameless(folder)
    os.close(file)
    return Disk(system, shutil.disk_usage(folder).free, direct, nameless)


def open_nameless(folder: Path) -> tuple[int, bool, bool]:
    """Opens a file that no folder has, and returns it, whether it is for direct I/O, and whether it never had a name.

    Raises:
        OSError: there is no such folder, this user may not write to it, or not a page can be written.
    """
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    for direct in (os.O_DIRECT, 0):
        try:
            file, nameless = _opened(folder, direct)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                continue
            raise
        with mmap.mmap(-1, mmap.PAGESIZE) as page:  # direct I/O wants memory that begins at a page
            try:
                os.pwrite(file, page, 0)
                return file, direct != 0, nameless
            except OSError as error:
                os.close(file)
                if not direct or error.errno != errno.EINVAL:
                    raise
    raise AssertionError("the second way returns or raises")


def _opened(folder: Path, more: int) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CLOEXEC | more
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600), True
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
    made, name = tempfile.mkstemp(prefix=".ooc-", dir=folder)
    try:
        os.close(made)
        return os.open(name, flags), False
    finally:
        os.unlink(name)
