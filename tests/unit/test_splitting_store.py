"""The store of measurements: what is put is found again, whoever else writes, dies or damages the file meanwhile."""

import contextlib
import logging
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.devices.profile import cache_directory
from swapd.splitting import store as store_module
from swapd.splitting.configurations import MicroConfiguration
from swapd.splitting.store import FORMAT, Key, Store, Verdict, default_path

KEY = Key("a processor, 2 threads", "torch 2.13.0", "aten::convolution", "f32 64x3x7x7 224x224")
ROWS = [MicroConfiguration(8, "im2col", 0.25, 1 << 33), MicroConfiguration(1, "fft", 1e-6, 0, 2e-7)]
IDENTICAL = Verdict("rows", 4, True, 0.0, 0.0)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measurements.sqlite"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What was logged, as it comes."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ooc.swapd").addHandler(handler)
    yield said
    logging.getLogger("ooc.swapd").removeHandler(handler)


def filled(path: Path) -> Store:
    store = Store(path)
    store.put_cost(KEY, ROWS)
    store.put_verdict(KEY, IDENTICAL)
    return store


def altered(path: Path, statement: str) -> bytes:
    """The file's bytes after somebody else changed it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute(statement)
    return path.read_bytes()


def child(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def output(process: "subprocess.Popen[str]") -> str:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


# --- what is put is found again --------------------------------------------------------------------------------------


def test_what_one_store_puts_another_finds(path: Path) -> None:
    filled(path)
    again = Store(path)
    found = again.cost(KEY)
    assert found is not None and sorted(found, key=lambda row: -row.batch) == ROWS
    assert {row.spread_seconds for row in found} == {0.0, 2e-7}
    assert again.verdict(KEY, "rows", 4) == IDENTICAL
    assert again.path is not None


@pytest.mark.parametrize("field", ["device", "library", "operator", "shapes"])
def test_every_part_of_the_key_counts(path: Path, field: str) -> None:
    other = Key(**{**KEY.__dict__, field: "another"})
    store = filled(path)
    assert store.cost(other) is None
    assert store.verdict(other, "rows", 4) is None


def test_costs_add_up_and_replace_by_size_and_algorithm(path: Path) -> None:
    store = filled(path)
    store.put_cost(KEY, [MicroConfiguration(8, "im2col", 0.5, 7), MicroConfiguration(8, "fft", 0.1, 9)])
    for each in (store, Store(path)):
        assert each.cost(KEY) == [
            MicroConfiguration(1, "fft", 1e-6, 0),
            MicroConfiguration(8, "fft", 0.1, 9),
            MicroConfiguration(8, "im2col", 0.5, 7),
        ]


def test_what_another_process_puts_later_is_found(path: Path) -> None:
    early, late = filled(path), Store(path)
    early.put_verdict(KEY, Verdict("batch", 2, True, 0.0, 0.0))
    assert late.verdict(KEY, "batch", 2) == Verdict("batch", 2, True, 0.0, 0.0)


def test_of_several_verdicts_the_one_on_that_division(path: Path) -> None:
    batch, channels = Verdict("batch", 2, False, 1e-3, math.inf), Verdict("channels", 2, False, 1e-6, 1e-7)
    store = Store(path)
    store.put_verdict(KEY, Verdict("batch", 2, True, 0.0, 0.0))
    store.put_verdict(KEY, channels)
    store.put_verdict(KEY, batch)
    for each in (store, Store(path)):
        assert each.verdict(KEY, "batch", 2) == batch
        assert each.verdict(KEY, "channels", 2) == channels
        assert each.verdict(KEY, "batch", 3) is None and each.verdict(KEY, "rows", 2) is None


def test_what_is_known_is_not_looked_up_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(path)
    other = Store(path)
    assert other.verdict(KEY, "rows", 4) == IDENTICAL
    monkeypatch.setattr(sqlite3, "connect", None)
    assert store.verdict(KEY, "rows", 4) == other.verdict(KEY, "rows", 4) == IDENTICAL


@pytest.mark.parametrize("difference", [math.nan, -1.0])
def test_no_difference_is_refused(difference: float) -> None:
    with pytest.raises(ValueError, match="is no verdict"):
        Verdict("rows", 2, False, difference, 0.0)


def test_the_default_is_beside_the_machine_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = Store(default_path())
    store.put_cost(KEY, ROWS)
    assert store.path == cache_directory() / "measurements.sqlite" and store.path.exists()


def test_the_module_loads_no_framework() -> None:
    code = "import sys, swapd.splitting.store; print('torch' in sys.modules)"
    assert output(child(code)) == "False\n"


# --- many at once ----------------------------------------------------------------------------------------------------

WRITER = """
import sys
from swapd.splitting.configurations import MicroConfiguration
from swapd.splitting.store import Key, Store, Verdict
path, number = sys.argv[1], int(sys.argv[2])
store = Store(path)
for i in range(25):
    store.put_cost(Key("d", "l", "shared", str(i)), [MicroConfiguration(number + 1, "a", i + 1.0, number)])
    store.put_verdict(Key("d", "l", str(number), str(i)), Verdict("rows", i + 1, True, 0.0, 0.0))
print(store.path is None)
"""


def test_eight_processes_write_at_once_and_nothing_is_lost(path: Path) -> None:
    writers = [child(WRITER, path, number) for number in range(8)]
    assert [output(writer) for writer in writers] == ["False\n"] * 8
    store = Store(path)
    for i in range(25):
        found = store.cost(Key("d", "l", "shared", str(i)))
        assert found == [MicroConfiguration(n + 1, "a", i + 1.0, n) for n in range(8)]
        for number in range(8):
            assert store.verdict(Key("d", "l", str(number), str(i)), "rows", i + 1) is not None


ENDLESS = """
import sys
from swapd.splitting.configurations import MicroConfiguration
from swapd.splitting.store import Key, Store
store, i = Store(sys.argv[1]), 0
while True:
    store.put_cost(Key("d", "l", "o", str(i)), [MicroConfiguration(b + 1, "a", 1.0, i) for b in range(64)])
    print(i, flush=True)
    i += 1
"""


def test_killed_while_writing_leaves_whole_puts_only(path: Path, lines: list[str]) -> None:
    for _round in range(5):
        writer = child(ENDLESS, path)
        assert writer.stdout is not None
        last = 0
        for line in writer.stdout:
            last = int(line)
            if last >= 5:
                break
        os.kill(writer.pid, signal.SIGKILL)
        rest, _ = writer.communicate(timeout=60)
        last = max([last, *map(int, rest.split("\n")[:-1])])
        store = Store(path)
        for i in range(last + 1):  # what it said was kept
            assert len(store.cost(Key("d", "l", "o", str(i))) or []) == 64
        unsaid = store.cost(Key("d", "l", "o", str(last + 1)))
        assert len(unsaid or []) in (0, 64)
        store.put_cost(KEY, ROWS)  # its lock is gone with it
        assert store.path is not None
    assert not lines


def test_threads_share_a_store(path: Path) -> None:
    failures: list[BaseException] = []

    def work(store: Store, number: int) -> None:
        try:
            for i in range(20):
                store.put_verdict(Key("d", "l", str(number), str(i)), IDENTICAL)
                assert store.verdict(Key("d", "l", str(number), str(i)), "rows", 4) == IDENTICAL
        except BaseException as error:
            failures.append(error)

    store = Store(path)
    threads = [threading.Thread(target=work, args=(store, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


FORKING = """
import os, signal, sys, threading, time
from swapd.splitting.store import Key, Store, Verdict
store = Store(sys.argv[1])
verdict = Verdict("rows", 2, True, 0.0, 0.0)
store.put_verdict(Key("d", "l", "before", ""), verdict)
begun = threading.Event()
ended = []
def slow():
    begun.set()
    time.sleep(1)
    ended.append(1)
    yield from ()
thread = threading.Thread(target=store._update, args=(slow(),))
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    store.put_verdict(Key("d", "l", "child", ""), verdict)
    os._exit(0 if ended and store.verdict(Key("d", "l", "before", ""), "rows", 2) == verdict else 1)
thread.join()
assert os.waitpid(child, 0)[1] == 0
store.put_verdict(Key("d", "l", "after", ""), verdict)
print([store.verdict(Key("d", "l", name, ""), "rows", 2) == verdict for name in ("before", "child", "after")])
"""


def test_no_fork_while_the_file_is_open(path: Path) -> None:
    """A child that had a connection of its parent's threads could damage the file, or would wait for ever."""
    assert output(child(FORKING, path)) == "[True, True, True]\n"


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["garbage", "[8]", '["rows", 4, true, -1.0, 0.0]', '["rows", 0, true, 0.0, 0.0]'])
def test_a_row_that_cannot_be_read_is_as_if_it_was_not_there(path: Path, bad: str, lines: list[str]) -> None:
    filled(path)
    altered(path, f"UPDATE measurements SET fields = '{bad}' WHERE about LIKE '%verdict%'")
    store = Store(path)
    assert store.verdict(KEY, "rows", 4) is None and store.cost(KEY) is not None
    store.put_verdict(KEY, IDENTICAL)
    assert Store(path).verdict(KEY, "rows", 4) == IDENTICAL
    assert not lines


@pytest.mark.parametrize("newer", [True, False])
def test_a_database_of_something_else_or_of_a_newer_release_is_left_alone(
    path: Path, newer: bool, lines: list[str]
) -> None:
    filled(path)
    altered(path, "UPDATE measurements SET about = replace(about, '4]', '5]')")
    before = altered(path, f"PRAGMA application_id = {FORMAT + 1 if newer else 0}")
    store = Store(path)
    assert store.verdict(KEY, "rows", 5) is None and store.path is None
    store.put_verdict(KEY, IDENTICAL)
    assert store.verdict(KEY, "rows", 4) == IDENTICAL
    assert path.read_bytes() == before
    assert len(lines) == 1 and "no store of this release" in lines[0] and "in memory" in lines[0]


@pytest.mark.parametrize("text", [b"notes\n", b'{"format": "ooc measurements", "version": 1}\n' * 99])
def test_a_file_that_is_no_database_is_left_alone(path: Path, text: bytes, lines: list[str]) -> None:
    path.write_bytes(text)
    store = filled(path)
    assert store.cost(KEY) is not None and store.verdict(KEY, "rows", 4) == IDENTICAL and store.path is None
    assert path.read_bytes() == text and [p.name for p in path.parent.iterdir()] == [path.name]
    assert len(lines) == 1 and "not a database" in lines[0] and "in memory" in lines[0]


def test_of_a_damaged_file_what_can_be_read_is_kept(path: Path, lines: list[str]) -> None:
    keys = [Key("d", "l", "o", f"{i:0100}") for i in range(200)]
    for key in keys:
        Store(path).put_verdict(key, IDENTICAL)
    half = path.stat().st_size // 2
    path.write_bytes(path.read_bytes()[:half] + b"\xff" * half)
    before = path.read_bytes()
    store = Store(path)
    found = [key for key in keys if store.verdict(key, "rows", 4) == IDENTICAL]
    assert store.path is None and 0 < len(found) < 200
    store.put_verdict(KEY, IDENTICAL)
    assert store.verdict(KEY, "rows", 4) == IDENTICAL and path.read_bytes() == before
    assert len(lines) == 1 and "in memory" in lines[0]


def test_a_file_that_was_deleted_is_begun_again(path: Path, lines: list[str]) -> None:
    store = filled(path)
    path.unlink()
    store.put_verdict(KEY, IDENTICAL)
    again = Store(path)
    assert again.verdict(KEY, "rows", 4) == IDENTICAL and again.cost(KEY) is None
    assert not lines


# --- no way to the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["missing/store", "file/store", "."])
def test_without_a_folder_it_works_in_memory(tmp_path: Path, where: str, lines: list[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    store = filled(tmp_path / where)
    assert store.path is None
    assert store.cost(KEY) is not None and store.verdict(KEY, "rows", 4) == IDENTICAL
    assert len(lines) == 1 and "in memory" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_without_a_path_it_works_in_memory_and_says_nothing(lines: list[str]) -> None:
    store = Store(None)
    store.put_cost(KEY, ROWS)
    assert store.cost(KEY) is not None and store.path is None
    assert not lines


READER = """
import logging, os, sys
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
from swapd.splitting.configurations import MicroConfiguration
from swapd.splitting.store import Key, Store
if os.getuid() == 0:  # whom no permission stops
    os.setgid(65534)
    os.setuid(65534)
store = Store(sys.argv[1])
known = store.cost(Key("d", "l", "o", "s"))
store.put_cost(Key("d", "l", "o", "t"), [MicroConfiguration(1, "a", 1.0, 0)])
print(known is not None, len(store.cost(Key("d", "l", "o", "t"))), store.path is None)
"""


@pytest.mark.parametrize("exists", [True, False])
def test_in_a_read_only_folder_what_is_there_is_read(exists: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ooc-read-only-"))  # pytest's own folders are closed to other users
    try:
        path = folder / "measurements.sqlite"
        if exists:
            Store(path).put_cost(Key("d", "l", "o", "s"), ROWS)
            path.chmod(0o444)
        folder.chmod(0o555)
        before = path.read_bytes() if exists else None
        log, said = output(child(READER, path)).splitlines()
        assert said == f"{exists} 1 True"
        assert log.startswith("LOG the store") and "in memory" in log
        assert (path.read_bytes() if exists else None) == before
        assert [p.name for p in folder.iterdir()] == ([path.name] if exists else [])
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


FULL = """
import logging, resource, signal, sys
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
from swapd.splitting.configurations import MicroConfiguration
from swapd.splitting.store import Key, Store
store = Store(sys.argv[1])
store.put_cost(Key("d", "l", "o", "first"), [MicroConfiguration(1, "a", 1.0, 0)])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))
rows = [MicroConfiguration(b, "a", 1.0, b) for b in range(1, 3000)]
store.put_cost(Key("d", "l", "o", "second"), rows)
store.put_cost(Key("d", "l", "o", "third"), rows[:5])
print([len(store.cost(Key("d", "l", "o", name))) for name in ("first", "second", "third")], store.path is None)
"""


def test_when_the_disk_is_full_it_goes_on_in_memory(path: Path, lines: list[str]) -> None:
    log, said = output(child(FULL, path)).splitlines()
    assert said == "[1, 2999, 5] True"
    assert log.startswith("LOG the store") and "in memory" in log
    store = Store(path)  # the file is as before what did not fit
    assert store.cost(Key("d", "l", "o", "first")) == [MicroConfiguration(1, "a", 1.0, 0)]
    assert store.cost(Key("d", "l", "o", "second")) is None and store.path is not None
    assert not lines


def test_a_lock_that_stays_ends_in_memory(path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.05)
    with contextlib.closing(sqlite3.connect(path, isolation_level="IMMEDIATE")) as holder:
        holder.execute("BEGIN IMMEDIATE")
        store = Store(path)
        assert store.verdict(KEY, "rows", 4) == IDENTICAL and store.verdict(KEY, "rows", 5) is None
        assert store.path is not None  # a look needs no lock
        store.put_verdict(KEY, Verdict("batch", 2, True, 0.0, 0.0))
        assert store.path is None and store.cost(KEY) is not None and store.verdict(KEY, "batch", 2) is not None
        assert store.verdict(KEY, "rows", 4) == IDENTICAL
    assert len(lines) == 1 and "locked" in lines[0]
