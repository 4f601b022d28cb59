"""What was measured once: times and workspaces of kernels, and whether dividing them changes a bit.

One file of JSON lines, usable by many processes and machines at once (micro-cuDNN, section III-E, keeps its benchmarks
so). The first line says that it is ours; each other line is what one `put` gave:

    [key, "costs", [[batch, algorithm, seconds, workspace_bytes, spread_seconds], ...]]
    [key, "verdicts", [[how, parts, identical, largest_difference, largest_relative]]]

- *A put is one line*, appended under a lock. A later line replaces what an earlier one says of the same thing. What a
  killed process began to write has no end of line, and the next put takes its place.
- *Lines that cannot be read* are left out; one warning says how many.
- *Whatever else goes wrong* (no folder, read-only, a full disk, a file that is not ours, a lock that stays) costs one
  line in the log. From then on the store works in memory, with what could be read. The file stays as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from swapd.devices.profile import cache_directory
from swapd.splitting.configurations import MicroConfiguration

log = logging.getLogger("ooc.swapd")

HEADER = b'{"format": "ooc measurements", "version": 1}\n'
BUSY_SECONDS = 10.0  # that another process may keep the file locked; it needs milliseconds


@dataclass(frozen=True)
class Key:
    """What was measured. Whatever changes the result belongs into one of the four fields."""

    device: str  # such as "NVIDIA V100", or the processor's model and its number of threads
    library: str  # and its version, such as "torch 2.13.0+cpu"
    operator: str  # such as "aten::convolution"
    shapes: str  # and types, strides, other arguments; costs leave out the number of samples


@dataclass(frozen=True)
class Verdict:
    """How a result in parts compared with the one in one piece."""

    how: str  # the division, such as "rows"
    parts: int
    identical: bool  # every bit
    largest_difference: float  # absolute; infinity where one is not a number and the other is
    largest_relative: float  # to the largest absolute value of the result in one piece

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"{self.how}: a division has at least 1 part, not {self.parts}")
        for value in (self.largest_difference, self.largest_relative):
            if math.isnan(value) or value < 0:
                raise ValueError(f"{self.how}: {value} is no difference; where nothing can be compared it is infinity")


_KINDS: dict[str, Any] = {"costs": MicroConfiguration, "verdicts": Verdict}


def default_path() -> Path:
    """Where the store is unless told otherwise: beside the machine profiles of `swapd probe`."""
    return cache_directory() / "splitting.jsonl"


class Store:
    """Costs and verdicts in the file at `path` (None: in memory alone). Any thread and a forked child may use it.

    No method raises an error because of the file; the module's docstring says what happens instead. A folder is only
    made for the default path.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()  # None once it works in memory
        # By kind and key, rows by their first two fields, which tell them apart.
        self._rows: dict[tuple[str, Key], dict[tuple[Any, ...], Any]] = {}
        self._known_bytes = 0  # of the file: whole lines that are in `_rows`
        self._lock, self._process = threading.Lock(), os.getpid()
        if self.path == default_path():
            with contextlib.suppress(OSError):
                default_path().parent.mkdir(parents=True, exist_ok=True)
        self._catch_up()
        self._write(b"")  # a file that cannot be written is found out now

    def cost(self, key: Key) -> list[MicroConfiguration] | None:
        """Everything measured of a kernel, by size and algorithm; None if nothing was."""
        return self._found("costs", key) or None

    def put_cost(self, key: Key, rows: Iterable[MicroConfiguration]) -> None:
        """Add measurements; one of the same size and algorithm replaces the earlier one. All or none are kept."""
        self._put("costs", key, list(rows))

    def verdict(self, key: Key, how: str, parts: int) -> Verdict | None:
        """The verdict on a division, or None if it is not known."""
        self._catch_up()
        found: Verdict | None = self._rows.get(("verdicts", key), {}).get((how, parts))
        return found

    def put_verdict(self, key: Key, verdict: Verdict) -> None:
        """Keep a verdict. It replaces an earlier one on the same division."""
        self._put("verdicts", key, [verdict])

    def _found(self, kind: str, key: Key) -> list[Any]:
        self._catch_up()
        return [row for _, row in sorted(self._rows.get((kind, key), {}).items())]

    def _put(self, kind: str, key: Key, rows: list[Any]) -> None:
        line = json.dumps([astuple(key), kind, [astuple(row) for row in rows]]).encode() + b"\n"
        with self._alone():
            self._write(line)
            self._learn(line)

    def _write(self, line: bytes) -> None:
        if self.path is None:
            return
        try:
            with open(self.path, "ab+", buffering=0) as file, _locked(file):
                self._read(file)
                self._append(file, line)
        except OSError as error:
            self._continue_in_memory(error)

    def _catch_up(self) -> None:
        """Reads what was added to the file since the last time."""
        with self._alone():
            if self.path is None:
                return
            try:
                if os.stat(self.path).st_size != self._known_bytes:
                    with open(self.path, "rb", buffering=0) as file:
                        self._read(file)
            except FileNotFoundError:
                pass  # the next put makes it
            except OSError as error:
                self._continue_in_memory(error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._process != os.getpid():
            self._lock = threading.Lock()  # in a forked child: another thread of the parent may have held it
            self._process = os.getpid()
        with self._lock:
            yield

    def _read(self, file: FileIO) -> None:
        """Learns the whole lines that are not known yet. Raises OSError if the file is not ours."""
        if os.fstat(file.fileno()).st_size < self._known_bytes:
            self._known_bytes = 0  # it was deleted, and begun again
        file.seek(self._known_bytes)
        text = file.read()
        if self._known_bytes == 0 and not text.startswith(HEADER[: len(text)]):
            raise OSError("it is no store of this release")
        whole = text[: text.rfind(b"\n") + 1]
        lines = whole.splitlines()[0 if self._known_bytes else 1 :]
        unread = sum(not self._learn(line) for line in lines)
        self._known_bytes += len(whole)
        if unread:
            log.warning("the store %s: %d of its lines cannot be read, and are left out", self.path, unread)

    def _learn(self, line: bytes) -> bool:
        """Keeps what a line says. Returns whether it could be read."""
        try:
            key, kind, rows = json.loads(line)
            made = [_KINDS[kind](*row) for row in rows]
            known = self._rows.setdefault((kind, Key(*key)), {})
            known.update((astuple(row)[:2], row) for row in made)
        except (ValueError, TypeError, KeyError):
            return False
        return True

    def _append(self, file: FileIO, line: bytes) -> None:
        """Writes a line behind the whole ones. Raises OSError, and leaves none of it, if it cannot be written whole."""
        added = line if self._known_bytes else HEADER + line
        file.truncate(self._known_bytes)
        written = 0
        try:
            written = file.write(added)
        finally:
            if written < len(added):
                file.truncate(self._known_bytes)
        if written < len(added):
            raise OSError("there is no room for more")
        self._known_bytes += len(added)

    def _continue_in_memory(self, error: OSError) -> None:
        log.warning(
            "the store %s cannot be used (%s): measurements of this process are kept in memory", self.path, error
        )
        self.path = None


@contextlib.contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """Lets only one process at a time, on any machine, write the file."""
    last = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > last:
                raise OSError("another process keeps it locked") from None
            time.sleep(0.01)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has it open too
