"""Session: one activation of the allocator, whatever the framework, from the making of its core to its summary."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ooc_alloc import Core, Iteration, OocError, device_memory, library_path, refused_settings
from swapd import endings
from swapd.background import BackgroundProcess
from swapd.config import Config, ConfigError
from swapd.devices.disk_profile import DEPTH_UNKNOWN, known_disk
from swapd.devices.profile import known_machine
from swapd.files import is_stream
from swapd.observing.observer import Observer
from swapd.planner import Planner
from swapd.ranks import claim, is_child, is_launcher, own_file, sharing, with_word
from swapd.speeds import DISK_UNKNOWN
from swapd.summary import audit_agrees, make_summary, write_summary

log = logging.getLogger("ooc.swapd")

SESSION_OF = "_OOC_SESSION_OF"  # set for child processes, which must not overwrite the parent's summary
_CUDA_GRANULARITY, _EMULATED_GRANULARITY = 2 << 20, 64 << 10  # bytes: what a chunk's size is a multiple of
_EMULATED = "libooc_emulated_cuda.so"
_EMULATED_MEMORY = "OOC_EMULATED_MEMORY"
_FOR_LIBRARIES = 3 << 29  # bytes that a default budget leaves on a GPU: modules and cuBLAS are loaded later
_SUMMARY_EVERY_SECONDS = 1.0
_AUDIT_EVERY_SECONDS = 60.0  # for followers: a recount holds the program up for a millisecond or so


def wanted_config(settings: dict[str, Any]) -> Config:
    """Reads the settings of a call that turns the allocator on.

    `alloc` is "auto" unless the call or the environment names a device.

    Raises:
        ConfigError: a setting cannot be used; the message names it.
        OocError: the call says that the allocator is to be off.
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
    ranks: int = 1  # processes of the job that use it
    small_alignment: int = 512  # bytes, of small blocks: CUDA's libraries are used to it


class Limits(NamedTuple):
    """What the settings amount to on a device, in bytes."""

    driver: str  # the library of the device's driver
    budget_bytes: int
    host_budget_bytes: int
    chunk_bytes: int
    small_limit_bytes: int
    disk_budget_bytes: int = 0
    budget_ranks: int = 1  # processes among which a share of the device was divided


def limits_of(config: Config, cuda: CudaDevice | None = None) -> Limits:
    """Returns what the settings amount to on a CUDA device, or on the emulated one, without making a core.

    Raises:
        ConfigError: the settings cannot be used on this device.
        OocError: the device is not available.
    """
    os.environ.update(  # the emulated driver reads its settings from the environment
        {name: text for name, text in config.to_environment().items() if name.startswith("OOC_EMULATED_")}
    )
    driver = cuda.driver if cuda is not None else str(library_path(_EMULATED))
    emulated = driver == str(library_path(_EMULATED))
    memory = config.resolve_emulated_memory() if emulated else None
    try:
        if memory is not None:  # for a moment: the driver looks once, and child processes have budgets of their own
            os.environ[_EMULATED_MEMORY] = str(memory)
        total, free = device_memory(driver, cuda.ordinal if cuda is not None else 0)
    except OocError:
        if emulated and (refused := refused_settings(driver)):
            raise ConfigError(refused) from None
        raise
    finally:
        if memory is not None:
            del os.environ[_EMULATED_MEMORY]
    ranks = cuda.ranks if cuda is not None else sharing()
    budget = config.resolve_budget(total, free, 0 if emulated else _FOR_LIBRARIES, ranks)
    granularity = _CUDA_GRANULARITY if not emulated else config.emulated_granularity or _EMULATED_GRANULARITY
    chunks = config.resolve_chunks(budget, granularity)
    # A device whose memory is the host's has a disk right below it, unless it plays one with a memory of its own.
    apart = not emulated or config.host_budget is not None or config.emulated_bandwidth is not None
    host = config.resolve_host_budget() if config.disk is None or apart else 0
    divided = ranks if config.budget is None or config.budget.fraction is not None else 1
    return Limits(driver, budget, host, *chunks, config.resolve_disk_budget(), divided)


@dataclass(frozen=True)
class Snapshot:
    """Counters of one moment. A summary and metrics that are made from the same snapshot agree exactly."""

    stats: dict[str, int | float]  # as of `Core.stats`
    audit_agrees: bool  # whether the last recount of every chunk agreed with the counters


class Follower(Protocol):
    """An object that shows a session to the outside, such as metrics. Its methods must not raise."""

    def finish(self, last: Snapshot) -> None:
        """The session ends, and its core may be gone afterwards. This is called once."""

    def program_ends(self, last: Snapshot) -> None:
        """The process is about to end. This may be called in the middle of anything, and twice."""

    def in_child(self) -> None:
        """This process is a forked copy."""


class Session:
    """A core and its planner, on a CUDA device if one is given, else on the emulated one.

    The constructor raises ConfigError or OocError, and then has changed nothing. The integration calls `started` after
    it has installed itself. Until then the session changes nothing outside itself.
    """

    def __init__(self, config: Config, cuda: CudaDevice | None = None, limits: Limits | None = None) -> None:
        self.config = config
        self.start_time = time.time()
        limits = limits_of(config, cuda) if limits is None else limits
        self.emulated = limits.driver == str(library_path(_EMULATED))
        self.device_ordinal = cuda.ordinal if cuda is not None else 0
        disk = known_disk(config.disk) if config.disk is not None else None  # as `swapd probe --disk` measured it
        self.core = Core(
            limits.driver,
            budget_bytes=limits.budget_bytes,
            host_budget_bytes=limits.host_budget_bytes,
            chunk_bytes=limits.chunk_bytes,
            small_limit_bytes=limits.small_limit_bytes,
            small_alignment=cuda.small_alignment if cuda is not None else 0,
            device_ordinal=self.device_ordinal,
            strict=config.strict,
            asynchronous=cuda is not None,
            safe=config.safe,
            wait_limit_seconds=config.wait_limit,
            disk_folder=str(config.disk.absolute()) if config.disk is not None else "",
            disk_budget_bytes=limits.disk_budget_bytes,
            disk_depth=disk.recommended.depth if disk is not None else DEPTH_UNKNOWN,
        )
        self.budget_ranks = limits.budget_ranks
        self.budget_bytes = int(self.core.stats()["budget_bytes"])
        self.device_name = self.core.device_name
        measured = disk.machine() if disk is not None else None
        if config.disk is not None and limits.host_budget_bytes == 0:
            self.expected_link = measured
        else:
            self.expected_link = known_machine(self.device_name, config.emulated_bandwidth if cuda is None else None)
        self.planner = Planner(
            self.core,
            policy="none" if config.policy == "demand" else config.policy,
            window_bytes=config.window,
            expected=self.expected_link,
            trace_path=_own_path(config.trace),
            asynchronous=cuda is not None,
            disk=(measured or DISK_UNKNOWN) if config.disk is not None and limits.host_budget_bytes else None,
            executor=BackgroundProcess() if config.planning == "background" else None,
            recompute=config.recompute == "exact",
        )
        self.summary_path = _own_path(config.summary)
        self._rewritten = self.summary_path is not None and not is_stream(self.summary_path)
        self.observer = Observer(
            self.core,
            self.planner,
            timeline=_own_path(config.timeline),
            report=_own_path(config.report),
            summary=self.summary,
            record_places=self.record_places,
        )
        self.closed = False
        self.forked = False  # whether this process is a forked copy, in which the figures are the parent's
        self._followers: list[Follower] = []
        self._audit_agrees = True
        self._last: Snapshot | None = None
        self._snapshot_lock = threading.RLock()  # once `_last` is set under it, the core may be gone
        self._boundary_lock = threading.RLock()  # threads may end iterations at the same time
        self._last_written = self._last_audit = 0.0
        self._unwritable = False
        self._write_lock = threading.RLock()  # both locks are reentrant: a signal's handler writes amid a write

    def started(self) -> None:
        """From now on a summary is written however the program ends. A kill -9 leaves one of an earlier iteration."""
        claim(SESSION_OF)
        atexit.register(self.stop)
        self.observer.start(self.config.nvtx, self.config.status)
        endings.watch(self)
        log.info("active on %s, budget %d bytes", self.device_name, self.budget_bytes)

    def follow(self, follower: Follower) -> None:
        """Tells `follower` from now on how the session ends. Call this after `started`."""
        self._followers.append(follower)

    def snapshot(self) -> Snapshot:
        """Counters as they are now, or as they were when the session ended, without a recount. Any thread may call."""
        with self._snapshot_lock:
            return self._last if self._last is not None else Snapshot(self.core.stats(), self._audit_agrees)

    def boundary(self) -> None:
        """Ends the iteration under way, unless the calling thread is within a function."""
        if self.closed or self.forked or self.core.in_function():
            return
        try:
            with self._boundary_lock:
                ended = self.planner.boundary()
                self.observer.ended(ended)
                self.iteration_ended(ended)
        except Exception:
            if self.config.strict:
                raise
            log.warning("planning failed; the program goes on in demand mode", exc_info=True)
            self.planner.give_up()
        if self._rewritten and time.monotonic() - self._last_written > _SUMMARY_EVERY_SECONDS:
            self._write_summary(final=False)
        elif self._followers and time.monotonic() - self._last_audit > _AUDIT_EVERY_SECONDS:
            self._audited()  # here this thread is not amid an allocation, where a recount would not agree

    def iteration_ended(self, ended: Iteration) -> None:
        """For an integration: an iteration ended; without functions in it, it was none."""

    def _audited(self) -> Snapshot:
        self._audit_agrees = audit_agrees(self.core)
        self._last_audit = time.monotonic()
        return self.snapshot()

    def summary(self) -> dict[str, Any]:
        """The figures so far, with the keys of `make_summary`."""
        last = self._audited()
        return self._figures(False, last)

    def _figures(self, final: bool, last: Snapshot) -> dict[str, Any]:
        split = self.split_figures()
        return make_summary(self.planner, final, last.stats, last.audit_agrees, split, budget_ranks=self.budget_ranks)

    def stop(self) -> bool:
        """Writes the summary and stops the threads, but keeps the core. Returns false if there is nothing to stop."""
        if self.closed or self.forked:
            self.closed = True
            return False
        last = self._audited()
        with self._snapshot_lock:
            self._last = last
        self._write_summary(final=True, snapshot=last)
        if self.managed():
            self.observer.write(in_a_hurry=False)
        self.observer.close()
        self.closed = True
        endings.forget(self)
        for follower in self._followers:
            follower.finish(last)
        log.info(
            "ended after %d steps: %d bytes swapped out, %d in, %.3f s of stalls",
            self.planner.steps.histogram.count,
            last.stats["swap_out_bytes"],
            last.stats["swap_in_bytes"],
            last.stats["stall_seconds"],
        )
        try:
            self.planner.close()
        except OSError as error:
            log.warning("cannot write the trace: %s", error)
        atexit.unregister(self.stop)
        return True

    def program_ends(self) -> None:
        """Called by `endings`: the process is about to end."""
        if self.closed or self.forked:
            return
        last = self._audited()
        self._write_summary(final=True, snapshot=last)
        for follower in self._followers:
            follower.program_ends(last)
        if self.managed():
            self.observer.write(in_a_hurry=True)
        self.observer.close()

    def in_child(self) -> None:
        """Called by `endings` in a forked copy. Its memory is its own; iterations and files stay the parent's."""
        self.forked = True
        self.observer.in_child()
        self._snapshot_lock = threading.RLock()  # another thread of the parent may have held it
        for follower in self._followers:
            follower.in_child()

    def record_places(self, on: bool) -> None:
        """Called by the observer: switches whether the integration tells where the program allocates variables."""

    def managed(self) -> bool:
        """Whether there was anything to manage. A process that had nothing, such as a launcher, leaves no files."""
        stats = self.snapshot().stats
        return bool(stats["functions"] or stats["allocations"])

    def split_figures(self) -> dict[str, Any] | None:
        """Returns the summary's figures about what ran in parts, or None if the integration runs nothing in parts."""
        return None

    def _write_summary(self, *, final: bool, snapshot: Snapshot | None = None) -> None:
        if self.summary_path is None or self.closed or self.forked or not self.managed():
            return
        with self._write_lock:
            if not self._rewritten:  # a stream is written once, at the end
                if not final or self._last_written:
                    return
                self._last_written = time.monotonic()
            try:
                last = self._audited() if snapshot is None else snapshot
                write_summary(self.summary_path, self._figures(final, last))
            except OSError as error:
                if not self._unwritable:
                    log.warning("cannot write the summary %s: %s", self.summary_path, error)
                self._unwritable = True
            self._last_written = time.monotonic()


def _own_path(path: Path | None) -> Path | None:
    """Returns the file for this process, or None if it is to write none.

    Each rank has a file of its own. A child of an active process adds its process id to the name of its rank's file. A
    launcher writes no file, and a child leaves a pipe to its parent.
    """
    if path is None or is_launcher():
        return None
    own = own_file(path)
    if own is None or not is_child(SESSION_OF):
        return own
    return None if is_stream(own) else with_word(own, str(os.getpid()))
