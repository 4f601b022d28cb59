"""One activation, whatever the framework: the core with its daemon, its iterations, its summary, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ooc_alloc import Core, OocError, device_memory, library_path
from swapd import endings
from swapd.config import Config
from swapd.daemon import Daemon
from swapd.machine import known_machine
from swapd.summary import make_summary, write_summary

log = logging.getLogger("ooc.swapd")

_MAIN_PID = "_OOC_MAIN_PID"  # set for child processes, which must not overwrite the parent's summary
_SUMMARY_EVERY_SECONDS = 1.0


def wanted_config(settings: dict[str, Any]) -> Config:
    """Settings given to a call that turns the allocator on: `alloc` is "auto" unless they or the environment say which.

    Raises:
        ConfigError: a setting cannot be used; the message names it.
        OocError: it is to be off.
    """
    config = Config.from_environment(**settings)
    if config.enabled:
        return config
    if settings.get("alloc") is not None:
        raise OocError("turning the allocator on with alloc='off' makes no sense: leave the call out")
    return Config.from_environment(**{**settings, "alloc": "auto"})


@dataclass(frozen=True)
class CudaDevice:
    """A real device: its number among those that the process sees, and the driver's library."""

    ordinal: int = 0
    driver: str = "libcuda.so.1"
    small_alignment: int = 512  # bytes, of small blocks: what CUDA's libraries are used to


class Session:
    """A core, on a CUDA device if one is given and else on the emulated one, and its daemon.

    Raises ConfigError or OocError; then nothing was changed. After the integration has installed itself it calls
    `started`; until then nothing outside the session is changed either.
    """

    def __init__(self, config: Config, cuda: CudaDevice | None = None) -> None:
        self.config = config
        os.environ.update(  # the emulated driver reads its settings there
            {name: text for name, text in config.to_environment().items() if name.startswith("OOC_EMULATED_")}
        )
        driver = cuda.driver if cuda is not None else str(library_path("libooc_emulated_cuda.so"))
        ordinal = cuda.ordinal if cuda is not None else 0
        total, free = device_memory(driver, ordinal)
        self.core = Core(
            driver,
            budget_bytes=config.resolve_budget(total, free),
            host_budget_bytes=config.resolve_host_budget(),
            chunk_bytes=config.chunk_size,
            small_limit_bytes=config.small_limit,
            small_alignment=cuda.small_alignment if cuda is not None else 0,
            device_ordinal=ordinal,
            strict=config.strict,
            asynchronous=cuda is not None,
        )
        self.budget_bytes = int(self.core.stats()["budget_bytes"])
        self.daemon = Daemon(
            self.core,
            policy="none" if config.policy == "demand" else config.policy,
            window_bytes=config.window,
            expected=known_machine(self.core.device_name, config.emulated_bandwidth if cuda is None else None),
            trace_path=_own_path(config.trace),
        )
        self.summary_path = _own_path(config.summary)
        self.closed = False
        self._forked = False
        self._last_written = 0.0
        self._unwritable = False
        self._write_lock = threading.RLock()  # a signal's handler writes in the middle of a write

    def started(self) -> None:
        """From now on a summary is written however the program ends; a kill -9 leaves the one of the last iteration."""
        os.environ.setdefault(_MAIN_PID, str(os.getpid()))
        atexit.register(self.stop)
        endings.watch(self)
        self._write_summary(final=False)
        if self.config.metrics_port is not None:
            log.warning("OOC_METRICS_PORT is set, but no metrics are served yet")
        log.info("active on %s, budget %d bytes", self.core.device_name, self.budget_bytes)

    def boundary(self) -> None:
        """Ends the iteration under way, unless the calling thread is within a function."""
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

    def summary(self) -> dict[str, Any]:
        """The figures so far; keys as in the README."""
        return make_summary(self.daemon, final=False)

    def stop(self) -> bool:
        """Writes the summary and stops the threads; False if there is nothing to stop. The core stays."""
        if self.closed or self._forked:
            self.closed = True
            return False
        self._write_summary(final=True)
        self.closed = True
        endings.forget(self)
        try:
            self.daemon.close()
        except OSError as error:
            log.warning("cannot write the trace: %s", error)
        atexit.unregister(self.stop)
        return True

    def program_ends(self) -> None:
        """For `endings`: the process is about to be gone."""
        self._write_summary(final=True)

    def in_child(self) -> None:
        """For `endings`: this is a forked copy. Its memory is its own; iterations and files are the parent's."""
        self._forked = True

    def _write_summary(self, *, final: bool) -> None:
        if self.summary_path is None or self.closed or self._forked:
            return
        with self._write_lock:
            try:
                write_summary(self.summary_path, make_summary(self.daemon, final=final))
            except OSError as error:
                if not self._unwritable:
                    log.warning("cannot write the summary %s: %s", self.summary_path, error)
                self._unwritable = True
            self._last_written = time.monotonic()


def _own_path(path: Path | None) -> Path | None:
    """The file for this process: a child process of an active one adds its number."""
    main = os.environ.get(_MAIN_PID)
    if path is None or main in (None, str(os.getpid())):
        return path
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
