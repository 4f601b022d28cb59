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

from ooc_alloc import WRITE, Core, Iteration
from swapd.planner import Planner
from swapd.trace.ranged import roots
from swapd.trace.trace import Trace

_SPIN_SECONDS = 200e-6  # the system wakes sleepers later than asked for


class ReplayError(ValueError):
    """The trace cannot be replayed; the message says why."""


Watch = Callable[[int, "Replay"], None]


@dataclass(frozen=True)
class _Storage:
    """A variable as the recorder numbered it, with the trace's variables that are its parts."""

    parts: range
    bytes: int
    absent: bool  # allocated without bytes, and used in ranges
    born: int  # of its first part
    died: int
    previous: int  # as the recorder numbered it


@dataclass(frozen=True)
class _Function:
    identifier: int
    operands: tuple[tuple[int, int, int, int], ...]  # storage, READ | WRITE, first byte, bytes (0: the whole storage)
    absent: tuple[int, ...]  # allocated before it
    births: tuple[int, ...]  # allocated by it
    deaths: tuple[int, ...]  # after it
    seconds: float


class Replay:
    """Runs iterations of `trace` on `core`.

    A variable in parts is allocated absent and used in ranges, so that it may be larger than the budget.

    Args:
        core: it should have `small_limit_bytes=0`, so that every variable is a region as in the trace.
        trace: at least one function; variables of no bytes are left out.
        planner: whose `boundary` ends each iteration, and so plans; None: nothing is planned.
        pace: how much longer than recorded a function takes.

    Raises:
        ReplayError: the trace has no function, or parts in chunks of another size than the core's.
    """

    def __init__(self, core: Core, trace: Trace, planner: Planner | None = None, pace: float = 1.0) -> None:
        if trace.functions == 0:
            raise ReplayError("the trace has no function to replay")
        if trace.part_of is not None and core.stats()["chunk_bytes"] != trace.chunk_bytes:
            raise ReplayError(f"the trace has parts of variables: it needs chunks of {trace.chunk_bytes} bytes")
        self.core, self.trace, self.planner = core, trace, planner
        self.names = [core.function_id(name) for name in trace.function_names]
        self.storages = _storages(trace)
        self.functions = self._functions(pace)
        self.last_births = [number for number, s in self.storages.items() if s.born == trace.functions]
        self.strangers = [number for number, s in self.storages.items() if s.born == -1 and s.previous < 0]
        self.address: dict[int, int] = {}  # of each live storage, in the numbering of the iteration under way
        self._first_variables()

    def _functions(self, pace: float) -> list[_Function]:
        trace, n = self.trace, self.trace.functions
        absent: list[list[int]] = [[] for _ in range(n)]
        births: list[list[int]] = [[] for _ in range(n)]
        deaths: list[list[int]] = [[] for _ in range(n)]
        for number, storage in self.storages.items():
            if 0 <= storage.born < n:
                (absent if storage.absent else births)[storage.born].append(number)
            if 0 <= storage.died < n:
                deaths[storage.died].append(number)
        made = []
        for f in range(n):
            rows = range(int(trace.use_offsets[f]), int(trace.use_offsets[f + 1]))
            fresh = set(births[f])
            operands = tuple(
                self._operand(int(trace.use_variables[row]), int(trace.use_flags[row]))
                for row in rows
                if trace.recorded(int(trace.use_variables[row])) not in fresh
                and trace.variable_bytes[trace.use_variables[row]]
            )
            seconds = pace * float(trace.function_seconds[f])
            made.append(
                _Function(self.names[f], operands, tuple(absent[f]), tuple(births[f]), tuple(deaths[f]), seconds)
            )
        return made

    def _operand(self, v: int, access: int) -> tuple[int, int, int, int]:
        number = self.trace.recorded(v)
        if not self.storages[number].absent and len(self.storages[number].parts) == 1:
            return number, access, 0, 0
        first, _ = self.trace.chunk_range(v)
        return number, access, first * self.trace.chunk_bytes, int(self.trace.variable_bytes[v])

    def _first_variables(self) -> None:
        """What the iteration inherits is made by functions of its own, before the first iteration."""
        make = self.core.function_id("replay: set-up")
        for number, storage in self.storages.items():
            if storage.previous < 0:
                continue
            if not storage.absent:
                self.core.function_begin(make, ())
                self._allocate(number)
                self.core.function_end()
                continue
            self._allocate(number)
            for v in storage.parts:
                if self.trace.born[v] < 0:
                    self._begin(make, [self._operand(v, WRITE)])
                    self.core.function_end()
        self._boundary()

    def _boundary(self) -> Iteration:
        return self.core.boundary() if self.planner is None else self.planner.boundary()

    def _allocate(self, number: int) -> None:
        storage = self.storages[number]
        allocate = self.core.malloc_absent if storage.absent else self.core.malloc
        self.address[number] = allocate(storage.bytes)

    def _begin(self, identifier: int, operands: tuple[tuple[int, int, int, int], ...] | list[tuple[int, ...]]) -> None:
        address = self.address
        self.core.function_begin(identifier, [(address[o[0]] + o[2], o[1], o[3]) for o in operands])

    def iteration(self, watch: Watch | None = None) -> Iteration:
        """Run one iteration. `watch(i, self)` is called while function i runs, after what it allocates.

        Raises:
            ooc_alloc.OutOfMemory: a function alone needs more than the budget.
        """
        core = self.core
        for number in self.strangers:
            self._allocate(number)
        for number, storage in self.storages.items():
            if storage.died < 0 and storage.born < 0:
                self._free(number)
        due = time.perf_counter()
        for index, function in enumerate(self.functions):
            for number in function.absent:
                self._allocate(number)
            self._begin(function.identifier, function.operands)
            for number in function.births:
                self._allocate(number)
            due = max(due, time.perf_counter()) + function.seconds  # it computes once it has all its memory
            if watch is not None:
                watch(index, self)
            _wait_until(due)
            core.function_end()
            for number in function.deaths:
                self._free(number)
        for number in self.last_births:
            self._allocate(number)
        self._renumber()
        return self._boundary()

    def _free(self, number: int) -> None:
        if number in self.address:
            self.core.free(self.address.pop(number))

    def _renumber(self) -> None:
        """What survives takes its number of the next iteration; the rest that is left is freed."""
        following = {s.previous: number for number, s in self.storages.items() if s.previous >= 0}
        survivors = {following[number]: address for number, address in self.address.items() if number in following}
        for number in [number for number in self.address if number not in following]:
            self._free(number)
        self.address = survivors

    def resident(self) -> dict[int, NDArray[np.bool_]]:
        """For each live variable, as the recorder numbered it, which of its chunks are on the device."""
        chunk = int(self.core.stats()["chunk_bytes"])
        sizes = {number: -(-self.storages[number].bytes // chunk) for number in self.address}
        return {number: self.core.residency(address, sizes[number]) for number, address in self.address.items()}

    def close(self) -> None:
        """Free all variables."""
        for number in list(self.address):
            self._free(number)


def _storages(trace: Trace) -> dict[int, _Storage]:
    """By recorded number, those that have bytes. What is one storage in several iterations is large enough for all."""
    numbers = sorted({trace.recorded(v) for v in range(trace.variables)})
    count = numbers[-1] + 1 if numbers else 0
    previous, ends = np.full(count, -1, np.int32), np.zeros(count, np.int64)
    for v in range(trace.variables):
        number, first = trace.recorded(v), 0 if trace.part_first_chunk is None else int(trace.part_first_chunk[v])
        ends[number] = max(ends[number], first * trace.chunk_bytes + int(trace.variable_bytes[v]))
        if trace.previous[v] >= 0:
            previous[number] = trace.recorded(int(trace.previous[v]))
    same = roots(previous)
    sizes = np.zeros(count, np.int64)
    np.maximum.at(sizes, same, ends)
    pieces = np.zeros(count, np.int64)
    np.maximum.at(pieces, same, [_pieces(trace, number) for number in range(count)])
    found = {}
    for number in numbers:
        parts, size = trace.parts_of(number), int(sizes[same[number]])
        if size:
            born, died = int(trace.born[parts[0] : parts[-1] + 1].min()), int(trace.died[parts[0]])
            absent = bool(pieces[same[number]] > 1)
            found[number] = _Storage(parts, size, absent, born, died, int(previous[number]))
    return found


def _pieces(trace: Trace, number: int) -> int:
    """1 for a variable that is whole; more for one in parts, or of which a part is all that is used."""
    parts = trace.parts_of(number)
    return len(parts) + (bool(parts) and trace.part_first_chunk is not None and trace.part_first_chunk[parts[0]] > 0)


def _wait_until(due: float) -> None:
    left = due - time.perf_counter()
    if left > _SPIN_SECONDS:
        time.sleep(left - _SPIN_SECONDS)
    while time.perf_counter() < due:
        pass
