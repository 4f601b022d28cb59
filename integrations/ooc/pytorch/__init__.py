"""Out-of-core PyTorch without code changes.

With an environment variable: ``OOC_ALLOC=1 OOC_BUDGET=2GiB python train.py``; or with two lines::

    import ooc
    ooc.enable(budget="2GiB")

Every setting of docs/settings.md is an environment variable and a keyword of :func:`enable`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ooc.pytorch.cuda import Waiting
    from ooc.pytorch.session import TorchSession

__all__ = [
    "disable",
    "enable",
    "enabled",
    "keep_resident",
    "memory_snapshot",
    "report",
    "sleep",
    "step",
    "summary",
    "timeline",
    "timeline_start",
    "wake",
]

_lock = threading.Lock()
_session: TorchSession | None = None
_waiting: Waiting | None = None  # for CUDA to be initialised


def enable(**settings: Any) -> None:
    """Turns the allocator on for this process; call it before the first large tensor is made.

    Args:
        settings: any of the settings, e.g. ``budget="8GiB"``, ``chunk_size="256KiB"``; those not given come from the
            environment. ``alloc`` is "auto" unless given.

    Raises:
        ConfigError: a setting cannot be used; the message names it.
        OocError: the device cannot be used, or the allocator is on already with other settings.
        AdapterError: the PyTorch adapter cannot be built (no compiler).
    """
    from ooc_alloc import OocError
    from swapd.session import wanted_config

    global _session
    config = wanted_config(settings)  # first, so that an unusable setting is reported at once
    import torch  # noqa: F401 - which turns the allocator on where the environment says so, and takes the lock

    with _lock:
        on = _session or _waiting
        if on is not None:
            if config == on.config:
                return
            raise OocError("the allocator is on already with other settings; call disable() first")
        from ooc.pytorch.session import TorchSession

        _session = TorchSession(config)


def enable_at_start(attempt: Callable[[Callable[[], None]], None]) -> None:
    """Turns the allocator on as the environment says, at the end of `import torch`.

    Where it is to manage a CUDA device it waits until PyTorch initialises CUDA. Until then no driver call is made, so a
    process that never uses CUDA has no context, and one that forks before has children that can use CUDA.

    Args:
        attempt: calls its argument, which turns the allocator on later, and deals with its errors.

    Raises:
        As :func:`enable`.
    """
    from swapd.session import wanted_config

    global _waiting
    config = wanted_config({})
    if config.alloc != "cpu":
        from ooc.pytorch import cuda

        if cuda.can_wait():
            with _lock:
                _waiting = cuda.Waiting(config, lambda: attempt(_end_of_waiting))
            return
    enable()


def _end_of_waiting() -> None:
    global _waiting
    with _lock:
        waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.end()
        enable()


def _active() -> TorchSession:
    from ooc_alloc import OocError

    if _waiting is not None:
        _end_of_waiting()
    if _session is None:
        raise OocError("the allocator is off: set OOC_ALLOC=1 or call ooc.pytorch.enable()")
    return _session


def enabled() -> bool:
    """Whether the allocator is on, or will be when CUDA is initialised."""
    return _session is not None or _waiting is not None


def step() -> None:
    """Marks the end of an iteration. Call it where the end is not found by itself (no optimizer, no module call)."""
    _active().explicit_step()


def disable() -> None:
    """Turns the allocator off: every tensor becomes plain memory at the same address. Nothing is lost.

    The summary, if one was asked for, is written. Does nothing if the allocator is off.
    """
    global _session, _waiting
    with _lock:
        if _waiting is not None:
            _waiting.end()
            _waiting = None
        if _session is not None:
            _session.detach()
            _session = None


def sleep() -> int:
    """Sends every tensor to the host, or the disk, and gives the device's memory back, for another program or engine.

    Addresses and values stay. Functions that other threads run are waited for. Returns the bytes of the device that
    stay in use, as something reaches them past PyTorch (NumPy views, `data_ptr`, `keep_resident`): 0 if nothing does.

    Raises:
        OocError: the allocator is off, the calling thread is within an operator, or the device is lost.
        torch.OutOfMemoryError: the host has no room for all of it; then everything is as it was.
    """
    return _active().sleep()


def wake() -> int:
    """Brings back what was on the device when it fell asleep, what is used next first; returns the bytes copied.

    The first operator wakes the device, too, and then tensors come on demand. Does nothing where the device is awake.

    Raises:
        OocError: the allocator is off, or the device is lost.
        torch.OutOfMemoryError: the device's memory is not there for the small tensors, which come first.
    """
    return _active().wake()


def summary() -> dict[str, Any]:
    """Returns the run's figures so far, with the keys of `swapd.summary`. Raises OocError if the allocator is off."""
    return _active().summary()


def keep_resident(*tensors: Any) -> None:
    """Keeps tensors on the device until they are freed: for code that uses their memory behind PyTorch's back."""
    _active().keep_resident(tensors)


def timeline_start(events: int = 1 << 17) -> None:
    """Keeps a timeline from now on. It holds the newest `events` functions, copies and waits, in 80 bytes each.

    `OOC_TIMELINE=FILE` keeps one from the start of the program to its end. Raises OocError if the allocator is off.
    """
    _active().observer.start_timeline(events)


def timeline_is_on() -> bool:
    """Whether a timeline is kept now. Raises OocError if the allocator is off."""
    return bool(_active().core.timeline_state().on)


def timeline(path: str | os.PathLike[str]) -> None:
    """Writes what the timeline holds now, for https://ui.perfetto.dev. A file whose name ends in ``.gz`` is compressed.

    Raises:
        OocError: the allocator is off, or no timeline was started.
        OSError: the file cannot be written.
    """
    _active().observer.save_timeline(Path(path))


def report(path: str | os.PathLike[str]) -> None:
    """Writes the HTML page about the run so far, as `OOC_REPORT=FILE` does at its end.

    It raises the same errors as :func:`timeline`.
    """
    _active().observer.save_report(Path(path))


def memory_snapshot(path: str | os.PathLike[str]) -> None:
    """Writes PyTorch's memory snapshot of the CUDA device, which https://pytorch.org/memory_viz opens.

    Raises:
        OocError: the allocator is off, or manages the emulated device, whose memory :func:`report` shows.
        OSError: the file cannot be written.
    """
    _active().memory_snapshot(Path(path))
