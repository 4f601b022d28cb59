"""Disk probe: reads and writes a file as the core does with swapped data, and makes the disk's profile of it.

Pieces of several sizes are moved by several numbers of threads for each direction, each direction alone and both at
once. The file has no name and goes with the probe.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swapd.devices.disk import FileSystem, file_system_of, open_nameless
from swapd.devices.disk_profile import DiskProfile, DiskSpeed
from swapd.units import KIB, MIB, format_bytes

Progress = Callable[[str, int, int], None]
_FILL_BYTES = 4 * MIB  # that are written at a time before anything is measured


class DiskError(RuntimeError):
    """The disk cannot be measured; the message says why and what to do."""


@dataclass(frozen=True)
class Effort:
    """What is measured: sizes in bytes, numbers of pieces under way in each direction, and seconds for each of them."""

    piece_bytes: tuple[int, ...] = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    seconds: float = 0.15
    file_bytes: int = 1 << 30


QUICK = Effort((2 * MIB,), (1, 2, 4, 8, 16), 0.1, 256 * MIB)


class ProbeFile:
    """A file without a name, full of bytes that do not compress. Its first half is written, its second half is read.

    Raises:
        DiskError: there is no such folder, this user may not write to it, or it has not the space.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        try:
            self.system: FileSystem = file_system_of(folder)
            self._file, self.direct, _ = open_nameless(folder)
        except OSError as error:
            raise DiskError(
                f"no file can be made in {folder}: {error.strerror}; give a folder that this user may write to"
            ) from None
        self.bytes = file_bytes // (2 * mmap.PAGESIZE) * 2 * mmap.PAGESIZE
        self._random = mmap.mmap(-1, _FILL_BYTES)  # what is written; a mapping begins at a page, as direct I/O wants it
        self._random.write(os.urandom(_FILL_BYTES))
        try:
            os.posix_fallocate(self._file, 0, self.bytes)
            for offset in range(0, self.bytes, _FILL_BYTES):  # what was never written would be read without the disk
                self._move(True, memoryview(self._random)[: min(_FILL_BYTES, self.bytes - offset)], offset)
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DiskError(f"writing to a file in {folder} failed: {error.strerror}") from None
            free = format_bytes(shutil.disk_usage(folder).free)
            raise DiskError(
                f"{folder} has no room for the {format_bytes(self.bytes)} that are measured with, {free} are free: "
                "make room, or use --quick, which needs less"
            ) from None

    def close(self) -> None:
        """The file is gone afterwards."""
        os.close(self._file)

    def speeds(self, piece_bytes: int, depth: int, read: bool, write: bool, seconds: float) -> tuple[float, float]:
        """Moves pieces for a while, and returns the bytes per second that were read and written.

        Args:
            piece_bytes: whole pages, at most half of the file.
            depth: pieces under way in each direction that is wanted.

        Raises:
            DiskError: the disk failed.
        """
        workers = [
            _Worker(self, is_write, piece_bytes, place, depth)
            for is_write in (*[False] * read, *[True] * write)
            for place in range(depth)
        ]
        began = time.perf_counter()
        for worker in workers:
            worker.until = began + seconds
            worker.start()
        for worker in workers:
            worker.join()
        for worker in workers:
            if worker.error is not None:
                raise DiskError(f"the disk failed while it was measured: {worker.error.strerror}")

        def speed(is_write: bool) -> float:
            chosen = [worker for worker in workers if worker.is_write == is_write]
            return sum(w.moved for w in chosen) / (max(w.ended for w in chosen) - began) if chosen else 0.0

        return speed(False), speed(True)

    def _move(self, is_write: bool, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            rest = memory[done:]
            moved = (
                os.pwrite(self._file, rest, offset + done) if is_write else os.preadv(self._file, [rest], offset + done)
            )
            if moved <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += moved
        if not self.direct:  # what the page cache keeps is memory, and says nothing about the disk
            if is_write:
                os.fdatasync(self._file)
            os.posix_fadvise(self._file, offset, done, os.POSIX_FADV_DONTNEED)


class _Worker(threading.Thread):
    """Moves every `depth`-th piece of one half of the file, over and over; the interpreter's lock is given up."""

    def __init__(self, file: ProbeFile, is_write: bool, piece_bytes: int, place: int, depth: int) -> None:
        super().__init__(daemon=True)
        self.file, self.is_write, self.piece_bytes = file, is_write, piece_bytes
        half = file.bytes // 2
        self.offsets = range(0, max(half // piece_bytes, 1) * piece_bytes, piece_bytes)
        self.first, self.place, self.depth = 0 if is_write else half, place, depth
        self.until = self.ended = 0.0
        self.moved = 0
        self.error: OSError | None = None

    def run(self) -> None:
        memory = memoryview(self.file._random if self.is_write else mmap.mmap(-1, self.piece_bytes))[: self.piece_bytes]
        try:
            for number in itertools.count(self.place, self.depth):
                offset = self.first + self.offsets[number % len(self.offsets)]
                self.file._move(self.is_write, memory, offset)
                self.moved += len(memory)
                if time.perf_counter() >= self.until:
                    break
        except OSError as error:
            self.error = error
        self.ended = time.perf_counter()


def measure(disk: ProbeFile, *, effort: Effort | None = None, progress: Progress | None = None) -> DiskProfile:
    """Measures a disk; it takes as many seconds as `effort` says for each of its rows, three times.

    Args:
        progress: called as (what comes next, steps done, steps in all).

    Raises:
        DiskError: the disk failed.
    """
    effort = effort or Effort()
    pieces = [size for size in effort.piece_bytes if size <= disk.bytes // 2] or [disk.bytes // 2]
    wanted = list(itertools.product(pieces, effort.depths))
    rows = []
    for done, (piece, depth) in enumerate(wanted):
        if progress is not None:
            progress(f"{depth} pieces of {format_bytes(piece)} at once", done, len(wanted))
        read_alone, _ = disk.speeds(piece, depth, True, False, effort.seconds)
        _, written_alone = disk.speeds(piece, depth, False, True, effort.seconds)
        rows.append(
            DiskSpeed(piece, depth, read_alone, written_alone, *disk.speeds(piece, depth, True, True, effort.seconds))
        )
    return DiskProfile(
        mount=disk.system.mount,
        kind=disk.system.kind,
        device=disk.system.device,
        measured=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        direct=disk.direct,
        file_bytes=disk.bytes,
        speeds=tuple(rows),
    )


def probe_folder(folder: Path, *, effort: Effort | None = None, progress: Progress | None = None) -> DiskProfile:
    """Measures the disk that a folder is on. Raises DiskError."""
    effort = effort or Effort()
    with contextlib.closing(ProbeFile(folder, effort.file_bytes)) as disk:
        return measure(disk, effort=effort, progress=progress)
