"""Replay: a trace's functions and variables on a real core, with nothing computed.

The core allocates, pins, moves and frees exactly as for the program that the trace was recorded from; a function does
nothing for as long as the trace says (times `pace`). So the executor can be held against the simulator, and a plan be
tried on a device, without the program. What variables contain is not looked at here; the integrations' tests do that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc_alloc import Core, Iteration
from swapd.daemon import Daemon
from swapd.steps import Steps
from swapd.trace import Trace

_SPIN_SECONDS = 200e-6  # the system wakes sleepers later than asked for


class ReplayError(ValueError):
    """The trace cannot be replayed; the message says why."""


Watch = Callable[[int, "Replay"], None]


@dataclass(frozen=True)
class _Function:
    identifier: int
    operands: tuple[tuple[int, int], ...]  # variable, READ | WRITE
    births: tuple[int, ...]
    deaths: tuple[int, ...]  # after it
    seconds: float


class Replay:
    """Runs iterations of `trace` on `core`.

    Args:
        core: it should have `small_limit_bytes=0`, so that every variable is a region as in the trace.
        trace: at least one function; variables of no bytes are left out.
        daemon: whose `boundary` ends each iteration, and so plans; None: nothing is planned.
        pace: how much longer than recorded a function takes.

    Raises:
        ReplayError: the trace has no function.
    """

    def __init__(self, core: Core, trace: Trace, daemon: Daemon | None = None, pace: float = 1.0) -> None:
        if trace.functions == 0:
            raise ReplayError("the trace has no function to replay")
        self.core, self.trace, self.daemon = core, trace, daemon
        self.names = [core.function_id(name) for name in trace.function_names]
        self.functions = self._functions(pace)
        self.last_births = [int(v) for v in np.flatnonzero(trace.born == trace.functions) if trace.variable_bytes[v]]
        self.strangers = [
            int(v)
            for v in np.flatnonzero((trace.born == -1) & (trace.previous < 0))
            if trace.variable_bytes[v]
        ]
        self.address: dict[int, int] = {}  # of each live variable, in the numbering of the iteration under way
        self._first_variables()

    def _functions(self, pace: float) -> list[_Function]:
        trace, n = self.trace, self.trace.functions
        births: list[list[int]] = [[] for _ in range(n)]
        deaths: list[list[int]] = [[] for _ in range(n)]
        for v in np.flatnonzero(trace.variable_bytes > 0).tolist():
            if 0 <= trace.born[v] < n:
                births[trace.born[v]].append(v)
            if 0 <= trace.died[v] < n:
                deaths[trace.died[v]].append(v)
        made = []
        for f in range(n):
            rows = range(int(trace.use_offsets[f]), int(trace.use_offsets[f + 1]))
            fresh = set(births[f])
            operands = tuple(
                (int(trace.use_variables[row]), int(trace.use_flags[row]))
                for row in rows
                if int(trace.use_variables[row]) not in fresh and trace.variable_bytes[trace.use_variables[row]]
            )
            made.append(
                _Function(
                    self.names[f], operands, tuple(births[f]), tuple(deaths[f]), pace * float(trace.function_seconds[f])
                )
            )
        return made

    def _first_variables(self) -> None:
        """What the iteration inherits is made by functions of its own, before the first iteration."""
        make = self.core.function_id("replay: set-up")
        for v in np.flatnonzero(self.trace.previous >= 0).tolist():
            if self.trace.variable_bytes[v]:
                self.core.function_begin(make, ())
                self.address[v] = self.core.malloc(int(self.trace.variable_bytes[v]))
                self.core.function_end()
        self._boundary()

    def _boundary(self) -> Iteration:
        return self.core.boundary() if self.daemon is None else self.daemon.boundary()

    def iteration(self, watch: Watch | None = None) -> Iteration:
        """Run one iteration. `watch(i, self)` is called while function i runs, after what it allocates.

        Raises:
            ooc_alloc.OutOfMemory: a function alone needs more than the budget.
        """
        core, trace, address = self.core, self.trace, self.address
        for v in self.strangers:
            address[v] = core.malloc(int(trace.variable_bytes[v]))
        for v in np.flatnonzero((trace.died < 0) & (trace.born < 0)).tolist():
            self._free(v)
        due = time.perf_counter()
        for index, function in enumerate(self.functions):
            core.function_begin(function.identifier, [(address[v], access) for v, access in function.operands])
            began = time.perf_counter()
            for v in function.births:
                address[v] = core.malloc(int(trace.variable_bytes[v]))
            if watch is not None:
                watch(index, self)
            due = max(due, began) + function.seconds
            _wait_until(due)
            core.function_end()
            for v in function.deaths:
                self._free(v)
        for v in self.last_births:
            address[v] = core.malloc(int(trace.variable_bytes[v]))
        self._renumber()
        return self._boundary()

    def _free(self, v: int) -> None:
        if v in self.address:
            self.core.free(self.address.pop(v))

    def _renumber(self) -> None:
        """What survives takes its number of the next iteration; the rest that is left is freed."""
        previous = self.trace.previous
        following = {int(previous[v]): v for v in np.flatnonzero(previous >= 0).tolist()}
        survivors = {following[v]: address for v, address in self.address.items() if v in following}
        for v in [v for v in self.address if v not in following]:
            self._free(v)
        self.address = survivors

    def resident(self, steps: Steps) -> dict[int, NDArray[np.bool_]]:
        """For each live variable which of its chunks are on the device; `steps` of a problem of the same trace."""
        return {v: self.core.residency(address, steps.chunks[v]) for v, address in self.address.items()}

    def close(self) -> None:
        """Free all variables."""
        for v in list(self.address):
            self._free(v)


def _wait_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > _SPIN_SECONDS:
        time.sleep(left - _SPIN_SECONDS)
    while time.perf_counter() < due:
        pass
