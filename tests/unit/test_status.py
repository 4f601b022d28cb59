"""`swapd top`: who may look into a process, what it says, and what happens when either side misbehaves."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.cli import main
from swapd.cli.top import frame, sparkline
from swapd.observing import status
from swapd.observing.status import StatusError, ask, check_folder, folder, processes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECKOUT = f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"  # on PYTHONPATH
SETTINGS = {
    "OOC_ALLOC": "emulated", "OOC_BUDGET": "2MiB", "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB",
    "OOC_EMULATED_MEMORY": "16MiB", "OOC_STATUS": "1",
}  # fmt: skip
PATIENCE_SECONDS = 60


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ooc-alloc"


def start(runtime: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    environment |= {"PYTHONPATH": CHECKOUT, "XDG_RUNTIME_DIR": str(runtime.parent), **SETTINGS, **variables}
    command = [sys.executable, str(HERE / "status_child.py"), *arguments]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "ready"
    return child


@pytest.fixture
def child(runtime: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(runtime, OOC_TIMELINE=str(runtime.parent / "t.json"))
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def test_a_process_says_what_its_counters_say(child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert processes() == [child.pid]
    assert main(["top", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["pid"] == child.pid
    assert facts["steps"] == 3
    assert facts["stats"]["budget_bytes"] == 2 << 20
    assert facts["stats"]["functions"] == 16
    assert facts["stats"]["swap_in_bytes"] > 0
    assert facts["timeline"]["on"]
    assert sum(row["seconds"] for row in facts["waits"]) <= facts["stats"]["stall_seconds"] + 1e-6
    assert facts["waits"]


def test_one_frame_is_printed_without_a_terminal(
    child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(child.pid), "--once"]) == 0
    text = capsys.readouterr().out
    assert f"process {child.pid}" in text
    assert "2.00 MiB of 2.00 MiB" in text
    assert "hostile" in text
    assert "\x1b[31m" not in text
    assert main(["top", "--list"]) == 0
    assert capsys.readouterr().out.split() == [str(child.pid)]


def test_a_timeline_and_a_report_are_written_of_what_runs(
    child: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(child.pid), "--record", str(tmp_path / "now.json"), "--seconds", "0"]) == 0
    events = json.loads((tmp_path / "now.json").read_text())["traceEvents"]
    copied = sum(e["args"]["bytes"] for e in events if e["ph"] == "X" and e["tid"] == 3 and e["pid"] == 3)
    assert copied == json.loads(ask(child.pid, "status"))["stats"]["swap_in_bytes"]
    assert main(["report", "--pid", "0", "-o", str(tmp_path / "a.html")]) == 0
    assert "What waited longest" in (tmp_path / "a.html").read_text()
    assert main(["report", "--pid", "0", "-o", str(tmp_path / "a.png")]) == 2
    assert main(["top", str(child.pid), "--record", str(tmp_path / "no" / "a.json"), "--seconds", "0"]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_who_looks_on_cannot_end_a_timeline_that_the_user_asked_for(child: subprocess.Popen[str]) -> None:
    assert ask(child.pid, "timeline stop") == "done"
    assert json.loads(ask(child.pid, "status"))["timeline"]["on"]
    before = json.loads(ask(child.pid, "status"))["timeline"]["recorded"]
    assert ask(child.pid, "timeline start") == "done"
    assert json.loads(ask(child.pid, "status"))["timeline"]["recorded"] == before > 0  # nor make it forget


def test_a_timeline_that_is_off_is_on_only_for_a_while(runtime: Path, tmp_path: Path) -> None:
    process = start(runtime)
    try:
        before = json.loads(ask(process.pid, "status"))
        assert not before["timeline"]["on"]
        assert before["waits"] == []
        with pytest.raises(StatusError, match="the timeline is off"):
            ask(process.pid, "timeline")
        assert main(["top", "--record", str(tmp_path / "now.json"), "--seconds", "0"]) == 0
        assert json.loads((tmp_path / "now.json").read_text())["otherData"]["pid"] == process.pid
        assert not json.loads(ask(process.pid, "status"))["timeline"]["on"]
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ends_takes_its_name_away(runtime: Path) -> None:
    process = start(runtime, "once")
    assert process.wait(PATIENCE_SECONDS) == 0
    assert list(runtime.iterdir()) == []


def test_a_killed_process_is_said_to_have_ended(
    child: subprocess.Popen[str], runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child.kill()
    child.wait()
    assert list(runtime.iterdir())  # its socket is still there
    with pytest.raises(StatusError, match=f"process {child.pid} has ended"):
        ask(child.pid, "status")
    assert processes() == []
    assert list(runtime.iterdir()) == []
    assert main(["top"]) == 1
    assert "start one with OOC_STATUS=1" in capsys.readouterr().err
    assert main(["top", str(child.pid)]) == 1
    assert "has ended" in capsys.readouterr().err


def left_behind(runtime: Path, name: str) -> Path:
    """The socket of a process that was killed."""
    runtime.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(runtime / name))
    return runtime / name


def test_sockets_of_killed_processes_are_taken_away_by_the_next_start(runtime: Path) -> None:
    """Whoever has their numbers now; and nobody's who answers, or is about to, and nothing else."""
    mine = left_behind(runtime, f"{os.getpid()}.sock")  # this process has the number again, and shows nothing
    others = left_behind(runtime, "1.sock"), left_behind(runtime, "999999999.sock")
    kept = left_behind(runtime, "notes.sock"), runtime / "2.sock"
    kept[1].write_text("a plain file")
    with socket.socket(socket.AF_UNIX) as stopped:  # one that answers nobody now
        stopped.bind(str(runtime / "3.sock"))
        stopped.listen(0)
        with connect(3):  # and takes nobody else any more
            process = start(runtime)
            try:
                assert not mine.exists() and not any(path.exists() for path in others)
                names = {path.name for path in runtime.iterdir()}
                assert names == {*(path.name for path in kept), "3.sock", f"{process.pid}.sock"}
                left_behind(runtime, "1.sock")
                assert set(processes()) == {3, process.pid}
                assert not (runtime / "1.sock").exists()
            finally:
                process.kill()
                process.wait()


def test_a_process_that_dies_while_it_is_watched(child: subprocess.Popen[str], runtime: Path) -> None:
    """On a terminal of its own: the watcher shows frames, says that the process has ended, and ends."""
    control, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": CHECKOUT, "XDG_RUNTIME_DIR": str(runtime.parent), "TERM": "xterm"}
    command = [sys.executable, "-m", "swapd.cli", "top", "--every", "0.1"]
    watcher = subprocess.Popen(command, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    seen, killed, until = b"", False, time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < until:
            if select.select([control], [], [], 0.2)[0]:
                try:
                    part = os.read(control, 1 << 16)
                except OSError:  # the other end is closed
                    break
                seen += part
            if not killed and seen.count(b"functions/s") >= 2:
                child.kill()
                child.wait()
                killed = True
        assert killed, seen[-2000:]
        assert watcher.wait(PATIENCE_SECONDS) == 0
        assert b"has ended" in seen
    finally:
        watcher.kill()
        watcher.wait()
        os.close(control)


def test_a_stopped_process_is_not_waited_for_for_ever(child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])  # all its threads stand still
    try:
        with pytest.raises(StatusError, match="it may be stopped"):
            ask(child.pid, "status", patience_seconds=0.2)
    finally:
        os.kill(child.pid, signal.SIGCONT)
    assert json.loads(ask(child.pid, "status"))["pid"] == child.pid


def connect(pid: int) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE_SECONDS)
    client.connect(str(folder() / f"{pid}.sock"))
    return client


@pytest.mark.parametrize(
    "request_bytes", [b"\n", b"nothing\n", b"\xff\xfe\n", b"x" * 100_000, b"status\x00\n", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_request_that_is_none_is_answered_in_words(child: subprocess.Popen[str], request_bytes: bytes) -> None:
    with connect(child.pid) as client, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(request_bytes)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000).startswith(b"error: ")
    assert json.loads(ask(child.pid, "status"))["pid"] == child.pid


def test_who_asks_and_does_not_read_is_left(
    child: subprocess.Popen[str],
) -> None:
    with connect(child.pid) as silent, connect(child.pid) as rude:
        rude.sendall(b"timeline\n")  # and never reads
        assert silent.fileno() >= 0
        assert json.loads(ask(child.pid, "status", PATIENCE_SECONDS))["pid"] == child.pid


def test_a_folder_of_anybody_else_is_refused(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime.mkdir(mode=0o755)
    runtime.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        check_folder(runtime)
    assert main(["top"]) == 1
    assert "not a folder of this user's alone" in capsys.readouterr().err
    process = start(runtime)  # it trains all the same
    try:
        assert list(runtime.iterdir()) == []
    finally:
        process.kill()
        process.wait()
    runtime.rmdir()
    elsewhere = runtime.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    runtime.symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        check_folder(runtime)


def test_the_socket_is_the_users_alone(child: subprocess.Popen[str], runtime: Path) -> None:
    assert runtime.stat().st_mode & 0o777 == 0o700
    (path,) = runtime.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_runtime_folder_it_is_in_tmp_by_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(status.tempfile, "gettempdir", lambda: str(tmp_path))
    assert folder() == tmp_path / f"ooc-{os.getuid()}"
    assert processes() == []


def test_without_the_setting_nothing_listens(runtime: Path) -> None:
    process = start(runtime, OOC_STATUS="0")
    try:
        assert not runtime.exists()
        with pytest.raises(StatusError, match="OOC_STATUS=1"):
            ask(process.pid, "status")
    finally:
        process.kill()
        process.wait()


def test_another_version_is_said_to_be_one(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapd.cli.top.ask", lambda pid, request: '{"version": 2}')
    assert main(["top", "1", "--once"]) == 1
    assert "another version" in capsys.readouterr().err
    monkeypatch.setattr("swapd.cli.top.ask", lambda pid, request: "<html>")
    assert main(["top", "1", "--once"]) == 1


def test_a_line_of_heights() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert sparkline([0.0]) == " "
    assert sparkline([]) == ""
    assert callable(frame)
