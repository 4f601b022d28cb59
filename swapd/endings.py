"""Ways for a process to end, or to be copied, that Python's `atexit` does not see: `os._exit`, signals, `fork`.

The hooks are installed once and stay while at least one object is told of endings, so that several sessions do not undo
each other's hooks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Watched(Protocol):
    """An object that is told of endings and forks. Its methods must not raise."""

    def program_ends(self) -> None:
        """The process is about to end. This may be called in the middle of anything, and twice."""

    def in_child(self) -> None:
        """This process is a forked copy."""


_lock = threading.Lock()
_watched: tuple[Watched, ...] = ()  # every change makes a new tuple, because handlers read it without the lock
_uninstall: Callable[[], None] | None = None


def watch(one: Watched) -> None:
    """Tells `one` of endings and forks from now on. A signal that the program handles itself is left to it."""
    global _watched, _uninstall
    with _lock:
        _watched = (*_watched, one)
        if _uninstall is None:
            _uninstall = _install()


def forget(one: Watched) -> None:
    """Stops telling `one`."""
    global _watched, _uninstall
    with _lock:
        _watched = tuple(other for other in _watched if other is not one)
        if not _watched and _uninstall is not None:
            _uninstall()
            _uninstall = None


def _tell() -> None:
    for one in _watched:
        one.program_ends()


def _on_signal(number: int, frame: FrameType | None) -> None:
    _tell()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _install() -> Callable[[], None]:
    plain_exit = os._exit

    def exit_and_tell(status: int) -> None:
        _tell()
        plain_exit(status)

    os._exit = exit_and_tell  # type: ignore[assignment]
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _on_signal)

    def uninstall() -> None:
        if os._exit is exit_and_tell:
            os._exit = plain_exit
        if threading.current_thread() is threading.main_thread():
            for number in ours:
                if signal.getsignal(number) is _on_signal:
                    signal.signal(number, signal.SIG_DFL)

    return uninstall


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for one in _watched:
        one.in_child()


os.register_at_fork(after_in_child=_after_fork)
