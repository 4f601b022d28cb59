"""One activation: the core, its daemon, PyTorch's allocator and hooks, and what must happen when the program ends."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ooc_alloc
from integrations.pytorch import boundaries, build, compiled, raw_access, threads
from ooc_alloc import Core, OocError
from swapd.config import Config
from swapd.daemon import Daemon
from swapd.machine import known_machine
from swapd.summary import make_summary, write_summary

log = logging.getLogger("ooc.pytorch")

_MAIN_PID = "_OOC_MAIN_PID"  # set for child processes, which must not overwrite the parent's summary
_SUMMARY_EVERY_SECONDS = 1.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_LARGEST_SLICE = 8 << 20  # also with memory to spare: the call needs a slice at once, and `min_budget_bytes` says so


class Session:
    """Raises ConfigError, OocError or build.AdapterError; then nothing was changed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.driver = _driver(config)
        total, free = ooc_alloc.device_memory(self.driver)
        build.load()
        self.core = Core(
            self.driver,
            budget_bytes=config.resolve_budget(total, free),
            host_budget_bytes=config.resolve_host_budget(),
            chunk_bytes=config.chunk_size,
            small_limit_bytes=config.small_limit,
            strict=config.strict,
        )
        self.daemon = Daemon(
            self.core,
            policy="none" if config.policy == "demand" else config.policy,
            window_bytes=config.window,
            expected=known_machine(self.core.device_name, config.emulated_bandwidth),
            trace_path=_own_path(config.trace),
        )
        self.summary_path = _own_path(config.summary)
        self.closed = False
        self._forked = False
        self._explicit = False
        self._last_written = 0.0
        self._unwritable = False
        self._write_lock = threading.RLock()  # a signal's handler writes in the middle of a write
        budget = int(self.core.stats()["budget_bytes"])
        torch.ops.ooc.install(self.core.handle, min(_LARGEST_SLICE, max(budget // 8, 1)))
        torch.ops.ooc.intercept_thread(True)
        self._undo = [
            threads.install(),
            raw_access.install(self.core),
            compiled.install(),
            boundaries.install(self.automatic_boundary),
        ]
        os.environ.setdefault(_MAIN_PID, str(os.getpid()))
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.close)
        self._undo.append(self._catch_exits())
        self._write_summary(final=False)
        if config.metrics_port is not None:
            log.warning("OOC_METRICS_PORT is set, but no metrics are served yet")
        log.info("active on %s, budget %d bytes", self.core.device_name, budget)

    # ---- iterations ----

    def automatic_boundary(self) -> None:
        if not self._explicit:
            self._boundary()

    def explicit_step(self) -> None:
        self._explicit = True  # from now on the program says where iterations end
        self._boundary()

    def _boundary(self) -> None:
        if self.closed or self._forked or self.core.in_function():
            return
        try:
            self.daemon.boundary()
        except Exception:
            if self.config.strict:
                raise
            log.warning("planning failed; the program goes on in demand mode", exc_info=True)
            self.daemon.policy = "none"
        if self.summary_path is not None and time.monotonic() - self._last_written > _SUMMARY_EVERY_SECONDS:
            self._write_summary(final=False)

    # ---- figures ----

    def summary(self, *, final: bool) -> dict[str, Any]:
        return make_summary(self.daemon, final=final)

    def _write_summary(self, *, final: bool) -> None:
        if self.summary_path is None or self.closed or self._forked:
            return
        with self._write_lock:
            try:
                write_summary(self.summary_path, self.summary(final=final))
            except OSError as error:
                if not self._unwritable:
                    log.warning("cannot write the summary %s: %s", self.summary_path, error)
                self._unwritable = True
            self._last_written = time.monotonic()

    def keep_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            raw_access.pin_for_life(self.core, tensor)

    # ---- the end ----

    def close(self, *, detach: bool = False) -> None:
        """Writes the summary and stops the threads. The core stays: tensors may outlive everything else."""
        if self.closed or self._forked:
            return
        self._write_summary(final=True)
        self.closed = True
        try:
            self.daemon.close()
        except OSError as error:
            log.warning("cannot write the trace: %s", error)
        if not detach:
            return
        for undo in reversed(self._undo):
            undo()
        torch.ops.ooc.uninstall()
        torch.ops.ooc.intercept_thread(False)
        self.core.detach()
        atexit.unregister(self.close)

    def _after_fork(self) -> None:
        self._forked = True

    def _catch_exits(self) -> Callable[[], None]:
        """The summary is written however the program ends; a kill -9 leaves the one of the last iteration.

        Returns what undoes it.
        """
        plain_exit = os._exit

        def exit_with_summary(status: int) -> None:
            self._write_summary(final=True)
            plain_exit(status)

        os._exit = exit_with_summary  # type: ignore[assignment]
        ours = []
        if threading.current_thread() is threading.main_thread():
            ours = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        for number in ours:
            signal.signal(number, self._on_signal)

        def undo() -> None:
            if os._exit is exit_with_summary:
                os._exit = plain_exit
            if threading.current_thread() is threading.main_thread():
                for number in ours:
                    if signal.getsignal(number) == self._on_signal:
                        signal.signal(number, signal.SIG_DFL)

        return undo

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._write_summary(final=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _own_path(path: Path | None) -> Path | None:
    """The file for this process: a child process of an active one adds its number."""
    main = os.environ.get(_MAIN_PID)
    if path is None or main in (None, str(os.getpid())):
        return path
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _driver(config: Config) -> str:
    if config.alloc == "cuda" or (config.alloc == "auto" and torch.version.cuda and torch.cuda.device_count() > 0):
        raise OocError(
            "memory of a CUDA device is not managed yet; set OOC_ALLOC=emulated to manage this process's CPU tensors "
            "on the emulated device"
        )
    os.environ.update(  # the emulated driver reads its settings there
        {name: text for name, text in config.to_environment().items() if name.startswith("OOC_EMULATED_")}
    )
    return str(ooc_alloc.library_path("libooc_emulated_cuda.so"))
