"""`swapd top`: who may look into a process, what it says, and what happens when either side misbehaves."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.cli import main
from swapd.cli.top import frame, sparkline
from swapd.observing import status
from swapd.observing.status import Server, StatusError, address, ask, processes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECKOUT = f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"  # on PYTHONPATH
SETTINGS = {
    "OOC_ALLOC": "emulated", "OOC_BUDGET": "2MiB", "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB",
    "OOC_EMULATED_MEMORY": "16MiB", "OOC_PLANNING": "blocking", "OOC_STATUS": "1",
}  # fmt: skip
PATIENCE_SECONDS = 60


def shown(*ours: subprocess.Popen[str]) -> list[int]:
    """Those of `processes` that a test has started. Other tests may run beside it."""
    return [pid for pid in processes() if pid in [child.pid for child in ours]]


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    environment |= {"PYTHONPATH": CHECKOUT, **SETTINGS, **variables}
    command = [sys.executable, str(HERE / "status_child.py"), *arguments]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "ready"
    return child


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(OOC_TIMELINE=str(tmp_path / "t.json"))
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def test_a_process_says_what_its_counters_say(child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(child) == [child.pid]
    assert main(["top", str(child.pid), "--json"]) == 0
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
    assert str(child.pid) in capsys.readouterr().out.split()


def test_a_disk_is_shown_in_the_place_of_host_memory(
    child: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_disk = start(OOC_DISK=str(tmp_path), OOC_DISK_BUDGET="8MiB")
    try:
        assert main(["top", str(on_disk.pid), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["stats"]["disk_written_bytes"] > 0
        assert facts["peak_rss_bytes"] > 1 << 20
        assert main(["top", str(on_disk.pid), "--once"]) == 0
        shown_of_disk = capsys.readouterr().out
        assert re.search(r"disk +[\d.]+ MiB of 8.00 MiB taken; written [\d.]+ MiB, read [\d.]+ MiB", shown_of_disk)
        assert re.search(r"process +[\d.]+ MiB of the machine's memory at its peak", shown_of_disk)
        assert "swapped out" not in shown_of_disk
    finally:
        on_disk.kill()
        on_disk.wait()
    assert main(["top", str(child.pid), "--once"]) == 0
    assert "swapped out" in (text := capsys.readouterr().out) and "disk" not in text


def swapped_in(pid: int) -> int:
    found: int = json.loads(ask(pid, "status"))["stats"]["swap_in_bytes"]
    return found


def test_a_timeline_and_a_report_are_written_of_what_runs(
    child: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(100):  # what was planned ahead may still come in as the child says that it is ready
        came_in = swapped_in(child.pid)
        assert main(["top", str(child.pid), "--record", str(tmp_path / "now.json"), "--seconds", "0"]) == 0
        if swapped_in(child.pid) == came_in:
            break
    events = json.loads((tmp_path / "now.json").read_text())["traceEvents"]
    copied = sum(e["args"]["bytes"] for e in events if e["ph"] == "X" and e["tid"] == 3 and e["pid"] == 3)
    assert copied == came_in > 0
    assert main(["report", "--pid", str(child.pid), "-o", str(tmp_path / "a.html")]) == 0
    assert "What waited longest" in (tmp_path / "a.html").read_text()
    assert main(["report", "--pid", "0", "-o", str(tmp_path / "a.png")]) == 2
    assert main(["top", str(child.pid), "--record", str(tmp_path / "no" / "a.json"), "--seconds", "0"]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_who_looks_on_cannot_end_a_timeline_that_the_user_asked_for(child: subprocess.Popen[str]) -> None:
    assert ask(child.pid, "timeline stop") == "done"
    assert json.loads(ask(child.pid, "status"))["timeline"]["on"]
    before = json.loads(ask(child.pid, "status"))["timeline"]["recorded"]
    assert ask(child.pid, "timeline start") == "done"
    # Nor make it forget; the last copies of the plan may end meanwhile.
    assert json.loads(ask(child.pid, "status"))["timeline"]["recorded"] >= before > 0


def test_a_timeline_that_is_off_is_on_only_for_a_while(tmp_path: Path) -> None:
    process = start()
    try:
        before = json.loads(ask(process.pid, "status"))
        assert not before["timeline"]["on"]
        assert before["waits"] == []
        with pytest.raises(StatusError, match="the timeline is off"):
            ask(process.pid, "timeline")
        assert main(["top", str(process.pid), "--record", str(tmp_path / "now.json"), "--seconds", "0"]) == 0
        assert json.loads((tmp_path / "now.json").read_text())["otherData"]["pid"] == process.pid
        assert not json.loads(ask(process.pid, "status"))["timeline"]["on"]
    finally:
        process.kill()
        process.wait()


def test_a_process_that_ends_takes_its_name_away() -> None:
    process = start("once")
    assert process.wait(PATIENCE_SECONDS) == 0
    assert shown(process) == []


def test_the_newest_process_is_looked_into(
    child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = start()
    try:
        assert shown(child, newer) == [newer.pid, child.pid]
        monkeypatch.setattr("swapd.cli.top.processes", lambda: shown(child, newer))
        assert main(["top", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["pid"] == newer.pid
    finally:
        newer.kill()
        newer.wait()


def test_a_killed_process_is_said_to_have_ended(
    child: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child.kill()
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None
    with pytest.raises(StatusError, match=f"process {child.pid} has ended"):
        ask(child.pid, "status")  # nobody has asked yet how it ended
    child.wait()
    with pytest.raises(StatusError, match=f"process {child.pid} has ended"):
        ask(child.pid, "status")
    assert shown(child) == []
    monkeypatch.setattr("swapd.cli.top.processes", lambda: shown(child))
    assert main(["top"]) == 1
    assert "start one with OOC_STATUS=1" in capsys.readouterr().err
    assert main(["top", str(child.pid)]) == 1
    assert "has ended" in capsys.readouterr().err


def test_a_process_that_dies_while_it_is_watched(child: subprocess.Popen[str]) -> None:
    """On a terminal of its own: the watcher shows frames, says that the process has ended, and ends."""
    control, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": CHECKOUT, "TERM": "xterm"}
    command = [sys.executable, "-m", "swapd.cli", "top", str(child.pid), "--every", "0.1"]
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
    client.connect(address(pid))
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


def test_only_the_same_user_is_answered_and_believed(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen by a process that takes itself for another user than the one at the other end is."""
    credentials = struct.pack("3i", child.pid, os.getuid() + 1, os.getgid())
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: credentials)
    with pytest.raises(StatusError, match="another user's process answers"):
        ask(child.pid, "status")
    monkeypatch.setattr(status, "address", lambda pid: f"\0ooc-test/{os.getpid()}")
    server = Server(lambda request: "told")
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(status.address(0))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                client.sendall(b"status\n")
                assert client.recv(100) == b""
    finally:
        server.close()


def test_nothing_listens_for_a_name_that_is_taken() -> None:
    server = Server(lambda request: "told")
    try:
        with pytest.raises(OSError, match="in use"):
            Server(lambda request: "told")
        assert ask(os.getpid(), "status") == "told"
    finally:
        server.close()
    for _ in range(100):  # the name is free again, each time
        Server(lambda request: "told").close()


def test_without_the_setting_nothing_listens() -> None:
    process = start(OOC_STATUS="0")
    try:
        assert shown(process) == []
        with pytest.raises(StatusError, match="OOC_STATUS=1"):
            ask(process.pid, "status")
    finally:
        process.kill()
        process.wait()


def test_another_version_is_said_to_be_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
