"""Work in a process beside the program: where it runs, and what happens when that process is not there."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import swapd.background
from swapd.background import BackgroundProcess


@pytest.fixture
def background() -> Iterator[BackgroundProcess]:
    made = BackgroundProcess()
    yield made
    made.shutdown()


def result(future: Future[Any]) -> Any:
    return future.result(timeout=60)


def test_work_is_done_by_one_other_process(background: BackgroundProcess) -> None:
    first, second = (result(background.submit(os.getpid)) for _ in range(2))
    assert first == second != os.getpid()
    assert result(background.submit(os.getpriority, os.PRIO_PROCESS, 0)) > os.getpriority(os.PRIO_PROCESS, 0)
    assert result(background.submit(sorted, range(300_000), reverse=True))[0] == 299_999  # more than a pipe holds


def test_an_error_there_is_an_error_here(background: BackgroundProcess) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        result(background.submit(divmod, 1, 0))
    with pytest.raises(RuntimeError, match="cannot pickle"):
        result(background.submit(memoryview, b"that no pickle holds"))
    assert result(background.submit(divmod, 7, 2)) == (3, 1)


def test_what_is_printed_there_is_no_answer(background: BackgroundProcess) -> None:
    assert result(background.submit(print, "loud")) is None
    assert result(background.submit(os.write, 1, b"louder\n")) == 7


def test_ctrl_c_is_for_the_program(background: BackgroundProcess) -> None:
    os.kill(result(background.submit(os.getpid)), signal.SIGINT)
    assert result(background.submit(divmod, 7, 2)) == (3, 1)


@pytest.mark.parametrize("amid", [False, True])
def test_a_process_that_ends_is_replaced_by_a_thread(
    background: BackgroundProcess, amid: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other = result(background.submit(os.getpid))
    if amid:
        work = background.submit(time.sleep, 1.0)
        os.kill(other, signal.SIGKILL)
        assert result(work) is None
    else:
        os.kill(other, signal.SIGKILL)
    assert result(background.submit(os.getpid)) == os.getpid()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("executable", "/nowhere/python"), ("frozen", True)])
def test_where_no_process_can_be_started_a_thread_works(
    background: BackgroundProcess, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    assert result(background.submit(os.getpid)) == os.getpid()


def test_the_end_waits_for_nothing_and_leaves_nothing(background: BackgroundProcess) -> None:
    other = result(background.submit(os.getpid))
    work = background.submit(time.sleep, 600.0)
    background.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        result(work)
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
    with pytest.raises(RuntimeError, match="shut down"):
        result(background.submit(os.getpid))


def test_an_end_while_the_process_is_started_leaves_nothing(
    background: BackgroundProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, started = swapd.background._start, []

    def start() -> Any:
        background.shutdown()
        started.append(plain())
        return started[0]

    monkeypatch.setattr(swapd.background, "_start", start)
    with pytest.raises(RuntimeError, match="shut down"):
        result(background.submit(os.getpid))
    assert started[0].poll() is not None
