"""Writes files so that a reader never sees half of one, and tells plain files from pipes, descriptors and devices."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import select
import stat
import sys
import time
from pathlib import Path

_numbers = itertools.count()  # for temporary names: a signal's handler may write while a write is under way
_DESCRIPTOR = re.compile(r"/dev/fd/(\d+)|/proc/(?:self|thread-self|(\d+))/fd/(\d+)")
_STANDARD = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_MOST_LINKS = 40  # the kernel follows as many
_READER_SECONDS = 5.0  # that a FIFO waits for a reader: the end of a program must not wait for ever
_READER_EVERY_SECONDS = 0.02


def descriptor_of(path: str | os.PathLike[str]) -> int | None:
    """Returns the descriptor of this process that a path names (`/dev/stdout`, `/dev/fd/3`), or None."""
    text = os.path.normpath(os.fspath(path))
    for _ in range(_MOST_LINKS):
        found = _DESCRIPTOR.fullmatch(text)
        if found is not None:
            return int(found[1] or found[3]) if found[2] in (None, str(os.getpid())) else None
        if text in _STANDARD or not os.path.islink(text):
            break
        text = os.path.normpath(os.path.join(os.path.dirname(text), os.readlink(text)))
    return _STANDARD.get(text)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a write to `path` adds to what was written before, so that no newer file may take its place.

    Streams are pipes, FIFOs, terminals, /dev/null, and whatever a descriptor leads to. A path where nothing exists is
    no stream, since it will be a file.
    """
    try:
        return descriptor_of(path) is not None or (not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path))
    except OSError:
        return False


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write the file at `path`, whole or not at all.

    It follows links. It writes to a stream (:func:`is_stream`) directly, because a plain file put in its place would
    destroy it. Raises OSError; a plain file is then as before, and no temporary file is left beside it.
    """
    descriptor = descriptor_of(path)
    if descriptor is not None:
        _flush_standard(descriptor)
        _write_all(descriptor, content)
        return
    if is_stream(path):
        descriptor = _open_stream(path)
        try:
            _write_all(descriptor, content)
        finally:
            os.close(descriptor)
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # the caller has to learn of the failed write, not of this
            temporary.unlink(missing_ok=True)
        raise


def _flush_standard(descriptor: int) -> None:
    """Flushes the standard stream of a descriptor, so that what the program printed before comes first."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have replaced or closed the stream; it may be None
            if stream.fileno() == descriptor:
                stream.flush()


def _open_stream(path: str | os.PathLike[str]) -> int:
    """Opens a stream for writing. Raises OSError if it is a FIFO that nobody reads within some seconds."""
    until = time.monotonic() + _READER_SECONDS
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > until:
                raise OSError(errno.ENXIO, "nobody reads it", str(path)) from None
        time.sleep(_READER_EVERY_SECONDS)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
