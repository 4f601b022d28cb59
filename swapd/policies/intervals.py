"""Idle intervals: the stretches of functions over which a variable's chunks may be off the device.

An interval lies between two uses that follow each other, and may cross the end of the iteration when the variable
survives it (*wrap*). Two kinds have one end only: from the last use to the death of a variable (nothing comes back),
and from the start of the iteration to the first use of an entry variable whose past is not known.

Coordinates: the functions of the iteration are 0 to n - 1, those of the one before -n to -1. An interval lies over
the functions `start` to `stop` - 1; a wrapping one has a negative `start`. Its swap-out follows function
``start - 1``, its swap-in precedes function `stop`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swapd.planning.problem import Problem


@dataclass(frozen=True, eq=False)
class Intervals:
    """Arrays of one entry per interval."""

    out_variable: NDArray[np.int64]  # the variable that leaves, as numbered in the iteration in which it leaves
    in_variable: NDArray[np.int64]  # the same storage, as numbered where it comes back; -1 if it does not come back
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    chunks: NDArray[np.int64]  # of the variable
    seconds: NDArray[np.float64]  # how long the functions within it take
    wraps: NDArray[np.bool_]  # whether it crosses the end of the iteration
    after: NDArray[np.int64]  # the function that ends as it begins, numbered as in the iteration in which that ends
    clean_after: NDArray[np.int64]  # the storage's interval before this one, if nothing wrote in between; else -1

    def __len__(self) -> int:
        return len(self.start)


def find_intervals(problem: Problem) -> Intervals:
    """Every idle interval of at least one function, of variables of at least one chunk."""
    return _Finder(problem).find()


def host_valid(intervals: Intervals, taken: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each interval, how many chunks leave clean if ``taken[i]`` leave over each interval i, always the same first.

    The host copy of a chunk stays valid from one interval to the next as long as no function writes in between.
    """
    valid = np.zeros(len(intervals), np.int64)
    before = intervals.clean_after
    linked = np.flatnonzero(before >= 0)
    while True:
        found = valid.copy()
        found[linked] = np.maximum(taken[before[linked]], valid[before[linked]])
        if np.array_equal(found, valid):
            return valid
        valid = found


def start_times(problem: Problem) -> NDArray[np.float64]:
    """float64[2n + 1]: index f + n has the time at which function f starts if nothing stalls, for f from -n to n."""
    total = np.concatenate([[0.0], np.cumsum(problem.seconds)])
    return np.concatenate([total[:-1] - total[-1], total])


class _Finder:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.n = problem.functions
        self.rows: list[tuple[int, int, int, int, int]] = []  # out_variable, in_variable, start, stop, clean_after
        self.unwritten: dict[int, int] = {}  # inherited variable: its first interval, if nothing wrote before it
        self.latest: dict[int, int] = {}  # variable: its last interval, if nothing wrote after it; else -1

    def find(self) -> Intervals:
        problem = self.problem
        uses = problem.uses
        functions, writes, offsets = uses.function.tolist(), uses.write.tolist(), uses.offsets.tolist()
        arrives = self._wraps(functions, offsets)
        for v in range(problem.variables):
            if problem.chunks[v] > 0:
                first, last = offsets[v], offsets[v + 1]
                self._within(v, functions[first:last], writes[first:last], arrives)
        for v, row in self.unwritten.items():  # a host copy from the iteration before is still valid
            before = self.latest.get(int(problem.previous[v]), -1)
            self.rows[row] = (*self.rows[row][:4], before)
        columns = np.array(self.rows, dtype=np.int64).reshape(len(self.rows), 5).T
        out_variable, in_variable, start, stop, clean_after = (np.ascontiguousarray(column) for column in columns)
        times = start_times(problem)
        seconds = times[stop + self.n] - times[start + self.n]
        wraps = np.arange(len(start)) < len(arrives)
        after = start - 1 + np.where(wraps, self.n, 0)
        chunks = problem.chunks[out_variable]
        return Intervals(out_variable, in_variable, start, stop, chunks, seconds, wraps, after, clean_after)

    def _wraps(self, functions: list[int], offsets: list[int]) -> dict[int, int]:
        """Add the intervals across the end of the iteration. Returns {entry variable: its interval}."""
        problem, n = self.problem, self.n
        arrives: dict[int, int] = {}
        for v in np.flatnonzero(problem.successor >= 0).tolist():
            entry = int(problem.successor[v])
            used = offsets[v + 1] > offsets[v]
            if problem.chunks[v] == 0 or not (used or problem.born[v] == n):
                continue
            if offsets[entry + 1] == offsets[entry] and problem.successor[entry] >= 0:
                continue  # idle for more than an iteration, which a plan of one iteration cannot express
            start = functions[offsets[v + 1] - 1] + 1 - n if used else 0
            if offsets[entry + 1] > offsets[entry]:
                stop, returns = functions[offsets[entry]], entry
            else:
                stop, returns = min(int(problem.died[entry]) + 1, n), -1
            if stop > start:
                arrives[entry] = len(self.rows)
                self.rows.append((v, returns, start, stop, -1))
        return arrives

    def _within(self, v: int, functions: list[int], writes: list[bool], arrives: dict[int, int]) -> None:
        problem, n = self.problem, self.n
        born, died = int(problem.born[v]), int(problem.died[v])
        stranger = born == -1 and problem.previous[v] < 0
        latest = arrives.get(v, -1)
        written = stranger or born >= 0 or v in arrives
        if stranger and functions and functions[0] > 0:
            latest = self._add(v, v, 0, functions[0], -1)
        if stranger and not functions and died >= 0:
            self._add(v, -1, 0, min(died + 1, n), -1)
        for row, (function, write) in enumerate(zip(functions, writes)):
            if write:
                latest, written = -1, True
            if row + 1 < len(functions) and functions[row + 1] > function + 1:
                latest = self._add(v, v, function + 1, functions[row + 1], latest)
                if not written:
                    self.unwritten[v] = latest
                    written = True
        self.latest[v] = latest
        if problem.successor[v] >= 0:
            wrap = arrives.get(int(problem.successor[v]))
            if wrap is not None:
                self.rows[wrap] = (*self.rows[wrap][:4], latest)
        elif functions and min(died + 1, n) > functions[-1] + 1:
            self._add(v, -1, functions[-1] + 1, min(died + 1, n), latest)

    def _add(self, out_variable: int, in_variable: int, start: int, stop: int, clean_after: int) -> int:
        self.rows.append((out_variable, in_variable, start, stop, clean_after))
        return len(self.rows) - 1
