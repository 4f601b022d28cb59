"""A disk below the memory: what stays in the folder however a process ends, and how much memory the process takes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PROGRAM = """
    import ctypes, os, sys
    from ooc_alloc import READ, WRITE, Core, library_path
    from swapd.host_limits import peak_rss_bytes

    MIB = 1 << 20
    core = Core(str(library_path("libooc_emulated_cuda.so")), budget_bytes=32 * MIB, host_budget_bytes=0,
                chunk_bytes=MIB, disk_folder=sys.argv[1], disk_budget_bytes=1024 * MIB)
    use = core.function_id("use")

    def fill(address, value):
        core.function_begin(use, [(address, WRITE)])
        ctypes.memset(address, value, 8 * MIB)
        core.function_end()

    def check(address, value):
        core.function_begin(use, [(address, READ)])
        assert ctypes.string_at(address, 8 * MIB) == bytes([value]) * (8 * MIB), "other bytes"
        core.function_end()

    before = peak_rss_bytes()
    live = []
    for value in range(24):
        core.function_begin(use, [])
        live.append(core.malloc(8 * MIB))
        core.function_end()
        fill(live[-1], value)
"""
CHURN = (
    PROGRAM
    + """
    print("begins", flush=True)
    while True:
        for value, address in enumerate(live):
            check(address, value)
            fill(address, value)
"""
)


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), str(folder)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(program: str, folder: Path) -> str:
    process = start(program, folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


@pytest.mark.parametrize("times", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_kill_leaves_nothing_in_the_folder(tmp_path: Path, times: int) -> None:
    """The process is killed at random moments, from before its file is made on."""
    moments = random.Random(14)
    for _ in range(times):
        process = start(CHURN, tmp_path)
        if moments.random() < 0.7:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
        time.sleep(moments.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []


def test_space_comes_back_when_the_process_ends(tmp_path: Path) -> None:
    """What a file without a name takes is free again at once: nobody else may hold it."""
    process = start(CHURN, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    files = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
    mine = [name for name in files if name.startswith(str(tmp_path))]
    assert len(mine) == 1
    assert mine[0].endswith("(deleted)")
    process.kill()
    process.communicate()


def test_memory_is_the_budget(tmp_path: Path) -> None:
    """192 MiB of variables in a budget of 32: the process grows by the budget, not by what it has allocated."""
    program = (
        PROGRAM
        + """
    for value, address in enumerate(live):
        check(address, value)
    stats = core.stats()
    assert stats["disk_used_bytes"] >= (192 - 32) * MIB, stats
    print(peak_rss_bytes() - before)
    """
    )
    grown = int(finished(program, tmp_path))
    assert 24 << 20 < grown < (32 + 24) << 20  # with the eight MiB that each comparison takes twice


def test_the_peak_of_memory_is_the_process_own_and_not_its_parents() -> None:
    """The system's largest resident set of a process begins as that of who started it."""
    ballast = bytearray(os.urandom(1 << 20) * 200)
    shown = "from swapd.host_limits import peak_rss_bytes; print(peak_rss_bytes())"
    output = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout
    assert 4 << 20 < int(output) < len(ballast) // 2


def test_a_forked_child_has_bytes_of_its_own_and_takes_no_memory_for_them(tmp_path: Path) -> None:
    """The child reads what was on the disk from a file of its own; the parent goes on writing."""
    program = (
        PROGRAM
        + """
    child = os.fork()
    if child == 0:
        status = open("/proc/self/status").read()
        anonymous = int(status.split("RssAnon:")[1].split()[0]) * 1024
        assert anonymous < 64 * MIB, anonymous
        for value, address in enumerate(live):
            assert ctypes.string_at(address, 8 * MIB) == bytes([value]) * (8 * MIB)
            ctypes.memset(address, 100, MIB)
            assert ctypes.string_at(address, MIB) == bytes([100]) * MIB
        os._exit(0)
    for value, address in enumerate(live):
        fill(address, value + 100)
    for value, address in enumerate(live):
        check(address, value + 100)
    assert os.waitpid(child, 0)[1] == 0, "the child found other bytes"
    """
    )
    finished(program, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_detached_variables_are_plain_memory(tmp_path: Path) -> None:
    program = (
        PROGRAM
        + """
    core.detach()
    for value, address in enumerate(live):
        assert ctypes.string_at(address, 8 * MIB) == bytes([value]) * (8 * MIB)
        ctypes.memset(address, 100, 8 * MIB)
    """
    )
    finished(program, tmp_path)
