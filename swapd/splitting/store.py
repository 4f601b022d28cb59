"""What was measured once: times and workspaces of kernels, and whether dividing them changes a bit.

One SQLite file, usable by many processes and machines at once (micro-cuDNN, section III-E, keeps its benchmarks so).
Its only table has a row for each measurement: what tells it apart, and its fields, both as JSON.

- *A put is one transaction*: it is in the file whole or not at all, whenever a process is killed.
- *A row that cannot be read* is as if it was not there; what is measured instead takes its place.
- *Whatever goes wrong* (no folder, read-only, a full disk, a file that is damaged or not ours, a lock that stays) costs
  one line in the log. From then on the store works in memory, with what could be read. The file stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from swapd.devices.profile import cache_directory
from swapd.splitting.configurations import MicroConfiguration

log = logging.getLogger("ooc.swapd")

BUSY_SECONDS = 10.0  # that another process may keep the file locked; it needs milliseconds
FORMAT = 0x4F4F4302  # "OOC" and a number: the application_id of files that this release reads and writes

# A connection exists only while this is held, and so does no fork: a child that inherited one could damage the file.
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_SCHEMA = f"""
    BEGIN IMMEDIATE;
    CREATE TABLE IF NOT EXISTS measurements (number INTEGER PRIMARY KEY AUTOINCREMENT, about UNIQUE, fields);
    PRAGMA application_id = {FORMAT};
    COMMIT;
"""


@dataclass(frozen=True)
class Key:
    """What was measured. Whatever changes the result belongs into one of the four fields."""

    device: str  # such as "NVIDIA V100", or the processor's model and its number of threads
    library: str  # and its version, such as "torch 2.13.0+cpu"
    operator: str  # such as "aten::convolution"
    shapes: str  # and types, strides, other arguments; costs leave out the number of samples


@dataclass(frozen=True)
class Verdict:
    """How a result in parts compared with the one in one piece; by default data only moved."""

    how: str  # the division, such as "rows"
    parts: int
    identical: bool = True  # every bit
    largest_difference: float = 0.0  # absolute; infinity where one is not a number and the other is
    largest_relative: float = 0.0  # to the largest absolute value of the result in one piece

    def __post_init__(self) -> None:
        if self.parts < 1 or not (self.largest_difference >= 0 and self.largest_relative >= 0):
            raise ValueError(f"{self} is no verdict; where nothing can be compared, the differences are infinity")


_KINDS: dict[str, Callable[..., Any]] = {"cost": MicroConfiguration, "verdict": Verdict}


def default_path() -> Path:
    """Where the store is unless told otherwise: beside the machine profiles of `swapd probe`."""
    return cache_directory() / "measurements.sqlite"


class Store:
    """Costs and verdicts in the file at `path` (None: in memory alone). Any thread and a forked child may use it.

    No method raises an error because of the file; the module's docstring says what happens instead. A folder is only
    made for the default path.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()  # None once it works in memory
        # By kind and key, measurements by their first two fields, which tell them apart.
        self._known: dict[tuple[str, Key], dict[tuple[Any, Any], Any]] = {}
        if self.path == default_path():
            with contextlib.suppress(OSError):
                default_path().parent.mkdir(parents=True, exist_ok=True)
        self._last = 0  # number of a row of the file that is known
        self._update()

    def cost(self, key: Key) -> list[MicroConfiguration] | None:
        """Everything measured of a kernel, by size and algorithm; None if nothing was."""
        self._update()
        known = self._known.get(("cost", key), {}).copy()
        return [row for _, row in sorted(known.items())] or None

    def put_cost(self, key: Key, rows: Iterable[MicroConfiguration]) -> None:
        """Add measurements; one of the same size and algorithm replaces the earlier one. All or none are kept."""
        self._put("cost", key, rows)

    def verdict(self, key: Key, how: str, parts: int) -> Verdict | None:
        """The verdict on a division, or None if it is not known. Only what this process has not seen is looked up."""
        if (how, parts) not in self._known.get(("verdict", key), {}):
            self._update()
        found: Verdict | None = self._known.get(("verdict", key), {}).get((how, parts))
        return found

    def put_verdict(self, key: Key, verdict: Verdict) -> None:
        """Keep a verdict. It replaces an earlier one on the same division."""
        self._put("verdict", key, [verdict])

    def _put(self, kind: str, key: Key, measured: Iterable[Any]) -> None:
        fields = map(astuple, measured)
        self._update([(None, json.dumps([kind, *astuple(key), *each[:2]]), json.dumps(each)) for each in fields])

    def _update(self, rows: Iterable[tuple[Any, ...]] = ()) -> None:
        """Learns what others have put into the file since the last time, and puts `rows` there, all or none of them."""
        with _lock:
            try:
                if self.path is not None:
                    with _opened(self.path) as file:
                        new = "SELECT * FROM measurements WHERE number > ? ORDER BY number"
                        self._learn(file.execute(new, (self._last,)))
                        if rows:  # a look takes no lock from those who write
                            file.executemany("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?)", rows)
            except sqlite3.Error as error:
                log.warning("the store %s cannot be used (%s): what is measured stays in memory", self.path, error)
                self.path = None
            self._learn(rows)

    def _learn(self, rows: Iterable[tuple[Any, ...]]) -> None:
        for number, about, fields in rows:
            self._last = number or self._last
            with contextlib.suppress(ValueError, TypeError, KeyError):
                kind, *names, first, second = json.loads(about)
                self._known.setdefault((kind, Key(*names)), {})[first, second] = _KINDS[kind](*json.loads(fields))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction on a file of ours, which is begun if it is empty. Raises sqlite3.Error."""
    with contextlib.closing(sqlite3.connect(path, BUSY_SECONDS, isolation_level="IMMEDIATE")) as file, file:
        if file.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            file.executescript(_SCHEMA)
        if file.execute("PRAGMA application_id").fetchone() != (FORMAT,):
            raise sqlite3.DatabaseError("it is no store of this release")
        yield file
