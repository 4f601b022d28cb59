"""The store of measurements: what is put is found again, whoever else writes, dies or damages the file meanwhile."""

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
from swapd.splitting.store import VERSION, Key, Store, Verdict, default_path

KEY = Key("a processor, 2 threads", "torch 2.13.0", "aten::convolution", "f32 64x3x7x7 224x224")
ROWS = [MicroConfiguration(8, "im2col", 0.25, 1 << 33), MicroConfiguration(1, "fft", 1e-6, 0, 2e-7)]
IDENTICAL = Verdict("rows", 4, True, 0.0, 0.0)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "splitting.sqlite"


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
    filled(path).close()
    with Store(path) as again:
        found = again.cost(KEY)
        assert found is not None and sorted(found, key=lambda row: -row.batch) == ROWS
        assert {row.spread_seconds for row in found} == {0.0, 2e-7}
        assert again.verdict(KEY) == IDENTICAL
        assert not again.in_memory


@pytest.mark.parametrize("field", ["device", "library", "operator", "shapes"])
def test_every_part_of_the_key_counts(path: Path, field: str) -> None:
    other = Key(**{**KEY.__dict__, field: "another"})
    with filled(path) as store:
        assert store.cost(other) is None
        assert store.verdict(other) is None


def test_costs_add_up_and_replace_by_size_and_algorithm(path: Path) -> None:
    with filled(path) as store:
        store.put_cost(KEY, [MicroConfiguration(8, "im2col", 0.5, 7), MicroConfiguration(8, "fft", 0.1, 9)])
        assert store.cost(KEY) == [
            MicroConfiguration(1, "fft", 1e-6, 0),
            MicroConfiguration(8, "fft", 0.1, 9),
            MicroConfiguration(8, "im2col", 0.5, 7),
        ]


def test_of_several_verdicts_the_identical_one_then_the_nearest(path: Path) -> None:
    batch, channels = Verdict("batch", 2, False, 1e-3, math.inf), Verdict("channels", 2, False, 1e-6, 1e-7)
    with Store(path) as store:
        store.put_verdict(KEY, batch)
        store.put_verdict(KEY, channels)
        assert store.verdict(KEY) == channels
        store.put_verdict(KEY, Verdict("depth", 9, False, 0.0, 0.0))  # 0.0 and -0.0 are not the same bits
        store.put_verdict(KEY, Verdict("rows", 9, True, 0.0, 0.0))
        assert store.verdict(KEY) == Verdict("rows", 9, True, 0.0, 0.0)
        assert store.verdict(KEY, "batch", 2) == batch
        assert store.verdict(KEY, "batch", 3) is None
        assert store.verdicts(KEY) == [
            batch,
            channels,
            Verdict("depth", 9, False, 0.0, 0.0),
            Verdict("rows", 9, True, 0.0, 0.0),
        ]


def test_verdicts_on_a_call_and_on_its_results_by_themselves() -> None:
    with Store(None) as store:
        for number, shapes in enumerate(("f32[2]", "f32[2] gradient", "f32[2], 1", "f32[2]/1x2", "f32[22]"), 1):
            store.put_verdict(Key("d", "l", "o", shapes), Verdict("rows", number, True, 0.0, 0.0))
        store.put_verdict(Key("d", "l", "other", "f32[2]"), IDENTICAL)
        assert [verdict.parts for verdict in store.verdicts_of(Key("d", "l", "o", "f32[2]"))] == [1, 2]


@pytest.mark.parametrize("difference", [math.nan, -1.0])
def test_no_difference_is_refused(difference: float) -> None:
    with pytest.raises(ValueError, match="is no difference"):
        Verdict("rows", 2, False, difference, 0.0)


def test_a_caller_s_mistake_is_no_damage(path: Path, lines: list[str]) -> None:
    with filled(path) as store:
        with pytest.raises(sqlite3.IntegrityError):
            store.put_cost(Key(None, "", "", ""), ROWS)  # type: ignore[arg-type]
        assert store.cost(KEY) is not None
    assert not lines and [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_default_is_beside_the_machine_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Store(default_path()) as store:
        store.put_cost(KEY, ROWS)
        assert store.path == cache_directory() / "splitting.sqlite" and store.path.exists()


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
print(store.in_memory)
"""


def test_eight_processes_write_at_once_and_nothing_is_lost(path: Path) -> None:
    writers = [child(WRITER, path, number) for number in range(8)]
    assert [output(writer) for writer in writers] == ["False\n"] * 8
    with Store(path) as store:
        for i in range(25):
            found = store.cost(Key("d", "l", "shared", str(i)))
            assert found == [MicroConfiguration(n + 1, "a", i + 1.0, n) for n in range(8)]
            for number in range(8):
                assert store.verdict(Key("d", "l", str(number), str(i))) == Verdict("rows", i + 1, True, 0.0, 0.0)


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
        with Store(path) as store:
            for i in range(last + 1):  # what it said was kept
                assert len(store.cost(Key("d", "l", "o", str(i))) or []) == 64
            unsaid = store.cost(Key("d", "l", "o", str(last + 1)))
            assert len(unsaid or []) in (0, 64)
            store.put_cost(KEY, ROWS)  # its lock is gone with it
            assert not store.in_memory
    assert not lines


def test_threads_share_a_store(path: Path) -> None:
    failures: list[BaseException] = []

    def work(store: Store, number: int) -> None:
        try:
            for i in range(20):
                store.put_verdict(Key("d", "l", str(number), str(i)), IDENTICAL)
                assert store.verdict(Key("d", "l", str(number), str(i))) == IDENTICAL
        except BaseException as error:
            failures.append(error)

    with Store(path) as store:
        threads = [threading.Thread(target=work, args=(store, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures


FORKING = """
import os, signal, sys, threading
from swapd.splitting.store import Key, Store, Verdict
store = Store(sys.argv[1])
verdict = Verdict("rows", 2, True, 0.0, 0.0)
store.put_verdict(Key("d", "l", "before", ""), verdict)
holder = threading.Thread(target=lambda: (store._lock.acquire(), free.wait(60), store._lock.release()))
free = threading.Event()
holder.start()
while store._lock.acquire(blocking=False):
    store._lock.release()
child = os.fork()
if child == 0:
    signal.alarm(30)
    store.put_verdict(Key("d", "l", "child", ""), verdict)
    os._exit(0 if store.verdict(Key("d", "l", "before", "")) == verdict else 1)
free.set()
holder.join()
assert os.waitpid(child, 0)[1] == 0
store.put_verdict(Key("d", "l", "after", ""), verdict)
print([store.verdict(Key("d", "l", name, "")) == verdict for name in ("before", "child", "after")])
"""


def test_a_forked_child_opens_the_file_itself(path: Path) -> None:
    assert output(child(FORKING, path)) == "[True, True, True]\n"


# --- damage ----------------------------------------------------------------------------------------------------------


def kept_files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged*"))


DAMAGES = {
    "garbage": lambda content: b"this is no database, whatever its name says\n" * 300,
    "truncated": lambda content: content[: len(content) // 2],
    "a page less": lambda content: content[:-4096],
    "zeros inside": lambda content: content[:4096] + bytes(4096) + content[8192:],
    "cut within the header": lambda content: content[:50],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_kept_under_another_name_and_rebuilt(path: Path, damage: str, lines: list[str]) -> None:
    filled(path).close()
    content = DAMAGES[damage](path.read_bytes())
    path.write_bytes(content)
    with Store(path) as store:
        assert store.cost(KEY) is None and store.verdict(KEY) is None
        store.put_cost(KEY, ROWS)
        assert not store.in_memory
    (kept,) = kept_files(path)
    assert kept.read_bytes() == content
    (line,) = lines
    assert str(kept) in line and str(path) in line
    with Store(path) as again:
        assert again.cost(KEY) is not None
    assert len(lines) == 1


def test_a_second_damaged_file_does_not_replace_the_first(path: Path) -> None:
    for text in (b"one" * 1000, b"two" * 1000):
        path.write_bytes(text)
        Store(path).close()
    assert [kept.read_bytes()[:3] for kept in kept_files(path)] == [b"one", b"two"]


def test_damage_while_it_is_open(path: Path, lines: list[str]) -> None:
    with filled(path) as store:
        with open(path, "r+b") as file:
            file.write(b"x" * 5000)
        store.put_verdict(KEY, IDENTICAL)
        assert store.verdict(KEY) == IDENTICAL and not store.in_memory
    assert len(kept_files(path)) == len(lines) == 1


def test_a_journal_that_sqlite_left_goes_with_its_file(path: Path) -> None:
    """SQLite rolls one back as it opens a file, if it can; beside a new file it would be rolled back into that."""
    path.write_bytes(b"garbage" * 1000)
    path.with_name(path.name + "-journal").write_bytes(b"its journal")
    store_module._rename(path)
    assert sorted(p.name for p in path.parent.iterdir()) == [f"{path.name}.damaged", f"{path.name}.damaged-journal"]


def test_many_processes_find_the_same_damage(path: Path) -> None:
    path.write_bytes(b"garbage" * 10_000)
    writers = [child(WRITER, path, number) for number in range(6)]
    assert [output(writer) for writer in writers] == ["False\n"] * 6
    assert len(kept_files(path)) == 1  # nobody set the new one aside
    with Store(path) as store:
        assert all(len(store.cost(Key("d", "l", "shared", str(i))) or []) == 6 for i in range(25))


def test_what_another_process_rebuilt_is_not_set_aside_again(path: Path, lines: list[str]) -> None:
    late = filled(path)
    late._set_aside(sqlite3.DatabaseError("as it was when this process looked"))
    assert late.cost(KEY) is not None and not kept_files(path) and not lines


def test_a_file_that_was_deleted_is_begun_again(path: Path, lines: list[str]) -> None:
    with filled(path) as store:
        path.unlink()
        store.put_verdict(KEY, IDENTICAL)
    with Store(path) as again:
        assert again.verdict(KEY) == IDENTICAL and again.cost(KEY) is None


def test_a_database_of_something_else_is_kept(path: Path, lines: list[str]) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE addresses (name TEXT)")
    other.close()
    filled(path).close()
    (kept,) = kept_files(path)
    with sqlite3.connect(kept) as other:
        assert other.execute("SELECT count(*) FROM addresses").fetchone() == (0,)
    other.close()
    assert "something else" in lines[0] and len(lines) == 1


def with_version(path: Path, version: int) -> bytes:
    filled(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {version}")
    database.close()
    return path.read_bytes()


def test_an_older_schema_is_set_aside(path: Path, lines: list[str]) -> None:
    content = with_version(path, VERSION - 1)
    with Store(path) as store:
        assert store.cost(KEY) is None and not store.in_memory
    assert kept_files(path)[0].read_bytes() == content
    assert f"version {VERSION - 1} of the schema" in lines[0] and len(lines) == 1


def test_a_newer_release_s_file_is_left_alone(path: Path, lines: list[str]) -> None:
    content = with_version(path, VERSION + 1)
    with Store(path) as store:
        assert store.cost(KEY) is None
        store.put_cost(KEY, ROWS)
        assert store.cost(KEY) is not None and store.in_memory
    assert path.read_bytes() == content and not kept_files(path)
    assert "a newer release" in lines[0] and len(lines) == 1


def test_rows_that_are_none(path: Path, lines: list[str]) -> None:
    filled(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        database.execute("UPDATE costs SET seconds = 'soon'")
    database.close()
    with Store(path) as store:
        assert store.cost(KEY) is None and not store.in_memory
    assert len(kept_files(path)) == len(lines) == 1


# --- no way to the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["missing/splitting.sqlite", "file/splitting.sqlite", "."])
def test_without_a_folder_it_works_in_memory(tmp_path: Path, where: str, lines: list[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    with filled(tmp_path / where) as store:
        assert store.in_memory
        assert store.cost(KEY) is not None and store.verdict(KEY) == IDENTICAL
    assert len(lines) == 1 and "in memory" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_without_a_path_it_works_in_memory_and_says_nothing(lines: list[str]) -> None:
    with Store(None) as store:
        store.put_cost(KEY, ROWS)
        assert store.cost(KEY) is not None and store.in_memory
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
print(known is not None, len(store.cost(Key("d", "l", "o", "t"))), store.in_memory)
"""


@pytest.mark.parametrize("exists", [True, False])
def test_in_a_read_only_folder_what_is_there_is_read(exists: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ooc-read-only-"))  # pytest's own folders are closed to other users
    try:
        path = folder / "splitting.sqlite"
        if exists:
            with Store(path) as store:
                store.put_cost(Key("d", "l", "o", "s"), ROWS)
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
print([len(store.cost(Key("d", "l", "o", name))) for name in ("first", "second", "third")], store.in_memory)
"""


def test_when_the_disk_is_full_it_goes_on_in_memory(path: Path, lines: list[str]) -> None:
    log, said = output(child(FULL, path)).splitlines()
    assert said == "[1, 2999, 5] True"
    assert log.startswith("LOG the store") and "in memory" in log
    with Store(path) as store:  # the file is as before what did not fit
        assert store.cost(Key("d", "l", "o", "first")) == [MicroConfiguration(1, "a", 1.0, 0)]
        assert store.cost(Key("d", "l", "o", "second")) is None and not store.in_memory
    assert not lines


def test_a_lock_that_stays_ends_in_memory(path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path).close()
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with Store(path) as store:
        store.put_verdict(KEY, Verdict("batch", 2, True, 0.0, 0.0))
        assert store.in_memory and store.cost(KEY) is not None and len(store.verdicts(KEY)) == 2
    holder.execute("ROLLBACK")
    holder.close()
    assert len(lines) == 1 and "locked" in lines[0]
