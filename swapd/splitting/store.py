"""What was measured once: times and workspaces of kernels, and whether dividing them changes a bit.

One SQLite file, usable by many processes and machines at once (micro-cuDNN, section III-E, keeps its benchmarks so):

    costs     device, library, operator, shapes, batch, algorithm -> seconds, workspace_bytes, spread_seconds
    verdicts  device, library, operator, shapes, how, parts       -> identical, largest_difference, largest_relative

- *A rollback journal, not WAL*: WAL keeps its index in memory that is shared within one machine, and would damage a
  file that several machines write. Here a few rows are written for each kernel that is seen for the first time.
- *A file that is damaged, or not ours,* is renamed and a new one begun; one warning says what it is called now.
- *Whatever else goes wrong* (no folder, read-only, a full disk, a newer release's file, a lock that stays) costs one
  line in the log. From then on the store works in memory, with what could be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeVar

from swapd.devices.profile import cache_directory
from swapd.splitting.configurations import MicroConfiguration

log = logging.getLogger("ooc.swapd")

APPLICATION_ID = 0x4F4F4353  # "OOCS", in the header of every file of ours
VERSION = 1  # of the schema; a file of an older one is set aside, one of a newer one is left alone
BUSY_SECONDS = 10.0  # that another process may keep the file locked; it needs milliseconds
_KEY = "device TEXT NOT NULL, library TEXT NOT NULL, operator TEXT NOT NULL, shapes TEXT NOT NULL"
_SCHEMA = (
    f"""CREATE TABLE costs ({_KEY},
        batch INTEGER NOT NULL CHECK (batch >= 1), algorithm TEXT NOT NULL,
        seconds REAL NOT NULL CHECK (typeof(seconds) = 'real' AND seconds >= 0 AND seconds < 9e999),
        workspace_bytes INTEGER NOT NULL CHECK (typeof(workspace_bytes) = 'integer' AND workspace_bytes >= 0),
        spread_seconds REAL NOT NULL CHECK (typeof(spread_seconds) = 'real' AND spread_seconds >= 0),
        PRIMARY KEY (device, library, operator, shapes, batch, algorithm))""",
    f"""CREATE TABLE verdicts ({_KEY},
        how TEXT NOT NULL, parts INTEGER NOT NULL CHECK (parts >= 1),
        identical INTEGER NOT NULL CHECK (identical IN (0, 1)),
        largest_difference REAL NOT NULL CHECK (typeof(largest_difference) = 'real' AND largest_difference >= 0),
        largest_relative REAL NOT NULL CHECK (typeof(largest_relative) = 'real' AND largest_relative >= 0),
        PRIMARY KEY (device, library, operator, shapes, how, parts))""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
_WHERE = "device = ? AND library = ? AND operator = ? AND shapes = ?"

T = TypeVar("T")


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


class _NotOurs(sqlite3.DatabaseError):
    """SQLite can read the file, but it is of another kind or has an older schema."""


class _Newer(sqlite3.OperationalError):
    """A newer release made the file, and only that release may write it."""


def default_path() -> Path:
    """Where the store is unless told otherwise: beside the machine profiles of `swapd probe`."""
    return cache_directory() / "splitting.sqlite"


class Store:
    """Costs and verdicts in the file at `path` (None: in memory alone). Any thread and a forked child may use it.

    No method raises an error because of the file; the module's docstring says what happens instead. A folder is only
    made for the default path.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()  # None once it works in memory
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = os.getpid()
        self._file: tuple[int, int] | None = None  # device and inode of what is open
        self._abandoned: list[sqlite3.Connection] = []  # of a parent process: not even closing them is allowed here
        if self.path == default_path():
            with contextlib.suppress(OSError):
                default_path().parent.mkdir(parents=True, exist_ok=True)
        self._run(lambda connection: None)

    @property
    def in_memory(self) -> bool:
        """Whether the store works in memory, so that what is put into it is gone with the process."""
        return self.path is None

    def cost(self, key: Key) -> list[MicroConfiguration] | None:
        """Everything measured of a kernel, by size and algorithm; None if nothing was."""
        query = f"SELECT batch, algorithm, seconds, workspace_bytes, spread_seconds FROM costs WHERE {_WHERE}"
        rows = self._run(lambda c: _rows(c, f"{query} ORDER BY batch, algorithm", key, MicroConfiguration))
        return rows or None

    def put_cost(self, key: Key, rows: Iterable[MicroConfiguration]) -> None:
        """Add measurements; one of the same size and algorithm replaces the earlier one. All or none are kept."""
        values = [
            (*astuple(key), row.batch, row.algorithm, row.seconds, row.workspace_bytes, row.spread_seconds)
            for row in rows
        ]
        self._write("INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def verdict(self, key: Key, how: str | None = None, parts: int | None = None) -> Verdict | None:
        """The verdict on a division. Of several that fit `how` and `parts` it is an identical one, else the nearest."""
        found = [v for v in self.verdicts(key) if how in (None, v.how) and parts in (None, v.parts)]
        return min(found, key=lambda v: (not v.identical, v.largest_difference, v.parts), default=None)

    def verdicts(self, key: Key) -> list[Verdict]:
        """All verdicts on divisions of one function."""
        query = f"SELECT how, parts, identical, largest_difference, largest_relative FROM verdicts WHERE {_WHERE}"
        return self._run(lambda c: _rows(c, f"{query} ORDER BY how, parts", key, _verdict))

    def verdicts_of(self, key: Key) -> list[Verdict]:
        """All verdicts on a call, and on each of its results by itself: the shapes of their keys begin as these."""
        query = (
            "SELECT how, parts, identical, largest_difference, largest_relative FROM verdicts WHERE device = ?1 AND "
            "library = ?2 AND operator = ?3 AND (shapes = ?4 OR substr(shapes, 1, length(?4) + 1) = ?4 || ' ')"
        )
        return self._run(lambda c: _rows(c, f"{query} ORDER BY shapes, how, parts", key, _verdict))

    def put_verdict(self, key: Key, verdict: Verdict) -> None:
        """Keep a verdict. It replaces an earlier one on the same division."""
        self._write(
            "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(*astuple(key), verdict.how, verdict.parts, int(verdict.identical), *astuple(verdict)[3:])],
        )

    def close(self) -> None:
        """Close the file. What was put is in it already; a later call opens it again."""
        with self._lock:
            self._close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _write(self, statement: str, rows: list[tuple[str | int | float, ...]]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                connection.executemany(statement, rows)

        self._run(write)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on the file; if the file is damaged, on a new one; if neither can be used, in memory."""
        if self._process != os.getpid():
            self._lock = threading.RLock()  # in a forked child: another thread of the parent may have held it
        with self._lock:
            for _attempt in range(3):
                try:
                    return work(self._opened())
                except sqlite3.DatabaseError as error:
                    if self.path is None or not _from_file(error):
                        raise
                    if _says_damaged(error):
                        self._set_aside(error)
                    else:
                        self._continue_in_memory(str(error))
            self._continue_in_memory("it is damaged again and again")
            return work(self._opened())

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and self.path is not None and self._process != os.getpid():
            self._abandoned.append(self._connection)
            self._connection = None
        self._process = os.getpid()
        if self._connection is not None and self._file != _identity(self.path):
            self._close()  # the file was set aside by another process, or deleted
        if self._connection is None:
            self._connection = _open(self.path)
            self._file = _identity(self.path)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None and self._process == os.getpid() and self.path is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _continue_in_memory(self, reason: str) -> None:
        path, self.path = self.path, None
        log.warning("the store %s cannot be used (%s): measurements of this process are kept in memory", path, reason)
        self._abandon()
        assert path is not None
        self._connection = _copy_of(path)
        self._file = None

    def _abandon(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Rename a damaged file, unless another process did so already."""
        assert self.path is not None
        self._abandon()
        try:
            with _locked(self.path.with_name(self.path.name + ".lock")):
                if _still_damaged(self.path):
                    kept = _rename(self.path)
                    log.warning("the store %s: %s; it was kept as %s, and a new one begun", self.path, error, kept)
        except OSError as failure:
            self._continue_in_memory(f"{error}; it cannot be set aside: {failure}")


def _identity(path: Path | None) -> tuple[int, int] | None:
    try:
        status = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Do all or nothing. It begins by taking the right to write, so that no two readers wait for each other."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _open(path: Path | None) -> sqlite3.Connection:
    """A connection to a file with our schema, made if need be. Raises sqlite3.Error, such as `_NotOurs` or `_Newer`."""
    connection = sqlite3.connect(
        ":memory:" if path is None else path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    if _is_empty(connection):
        with _transaction(connection):
            if _is_empty(connection):  # another process may have been faster
                for statement in _SCHEMA:
                    connection.execute(statement)
    if _number(connection, "application_id") != APPLICATION_ID:
        raise _NotOurs("this is a database of something else")
    version = _number(connection, "user_version")
    if version > VERSION:
        raise _Newer(f"a newer release made it, with version {version} of the schema")
    if version < VERSION:
        raise _NotOurs(f"version {version} of the schema, this release has {VERSION}")
    findings = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if findings != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {findings}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]) == 0


def _verdict(how: str, parts: int, identical: int, *differences: float) -> Verdict:
    return Verdict(how, parts, bool(identical), *differences)


def _rows(connection: sqlite3.Connection, query: str, key: Key, kind: Callable[..., T]) -> list[T]:
    """What a query finds for a key. SQLite lets any column hold anything: a row that is no `kind` counts as damage."""
    rows = connection.execute(query, astuple(key)).fetchall()
    try:
        return [kind(*row) for row in rows]
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"a row is malformed: {error}") from None


def _from_file(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is the cause of an error. Other errors are mistakes of a caller."""
    return type(error) is sqlite3.DatabaseError or isinstance(error, (_NotOurs, sqlite3.OperationalError))


def _says_damaged(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says that the file is damaged.

    SQLite reports missing tables and columns as operational errors, as it does locks and full disks.
    """
    words = ("no such table", "no such column", "malformed", "has no column")
    return not isinstance(error, sqlite3.OperationalError) or any(part in str(error) for part in words)


def _still_damaged(path: Path) -> bool:
    try:
        connection = _open(path)
        try:
            for table in ("costs", "verdicts"):
                connection.execute(f"SELECT * FROM {table}").fetchall()
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        return _says_damaged(error)
    return False


def _rename(path: Path) -> Path:
    """Give the file and its journal other names: a journal left behind would be rolled back into the new file."""
    number = 0
    kept = path.with_name(f"{path.name}.damaged")
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{number}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(f"{path}-journal", f"{kept}-journal")
    os.rename(path, kept)
    return kept


def _copy_of(path: Path) -> sqlite3.Connection:
    """A store in memory with what can be read of the file, if it is ours."""
    memory = _open(None)
    with contextlib.suppress(sqlite3.Error, OSError):
        source = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=0.1)
        try:
            for table in ("costs", "verdicts"):
                if _number(source, "application_id") == APPLICATION_ID and _number(source, "user_version") == VERSION:
                    rows = source.execute(f"SELECT * FROM {table}").fetchall()
                    marks = ", ".join("?" * (len(rows[0]) if rows else 0))
                    memory.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
        finally:
            source.close()
    return memory


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let only one process at a time, on any machine, rename a file: a second one would rename the new file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    last = time.monotonic() + BUSY_SECONDS
    try:
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > last:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
