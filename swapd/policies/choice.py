"""Choice: how many chunks leave over each idle interval.

While functions are over capacity, the one that is furthest over is taken, and chunks leave over the intervals that
cover it, only as many as are needed. The interval with the longest idle time comes first; a chunk that is used in part
comes as much earlier as less of it is copied. With `clean_first`, intervals whose chunks may leave without a copy come
before all others: what was not written since an earlier interval can be written back during that one. Evicting what is
needed furthest ahead is Belady's rule ("A study of replacement algorithms for a virtual-storage computer", 1966);
choosing whole intervals ahead is what lets a transfer start long before its room is needed. Chunks that need not leave,
because of what was chosen later, stay after all.

Transfers take time at both ends of an interval, and the memory is not free meanwhile. With a `margin` the intervals are
first shortened by that many times their own transfer time, so that enough leaves even while other transfers are under
way. Where the shortened intervals do not suffice, the whole ones are used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals, start_times
from swapd.policies.usage import Usage, make_usage

Counts = NDArray[np.int64]


def choose(problem: Problem, intervals: Intervals, margin: float = 0.0, clean_first: bool = False) -> Counts:
    """int64[intervals]: how many chunks leave over each interval so that every function fits.

    Raises:
        RuntimeError: a function does not fit although everything that can leave does.
    """
    turns = _ordered(problem, intervals, clean_first)
    taken = np.zeros(len(intervals), np.int64)
    start, stop = _shortened(problem, intervals, margin)
    resident = make_usage(problem.live)
    _take(problem, turns.of((stop > start)[turns.interval]), start, stop, resident, taken)
    _give_back(problem, turns, start, stop, resident, taken)
    if margin > 0:
        resident = make_usage(problem.live)
        for interval in np.flatnonzero(taken).tolist():
            resident.add(int(intervals.start[interval]), int(intervals.stop[interval]), -int(taken[interval]))
    worst = _take(problem, turns, intervals.start, intervals.stop, resident, taken)
    if worst is not None:
        raise RuntimeError(f"function {worst} ({problem.names[worst]}) does not fit although all else may leave")
    return taken


class _Turns(NamedTuple):
    """Turns, the best first: when it has one, chunks `least` to `most` - 1 of an interval leave."""

    interval: Counts
    least: Counts
    most: Counts

    def of(self, some: NDArray[np.bool_]) -> _Turns:
        return _Turns(*(column[some] for column in self))


def _ordered(problem: Problem, intervals: Intervals, clean_first: bool) -> _Turns:
    """The best is idle longest for each byte that is copied. A last chunk that is used in part has its own turn."""
    chunks = intervals.chunks
    filled = problem.last_eighths[intervals.out_variable] / 8  # of the last chunk
    split = (filled < 1) & (chunks > 1) & (not problem.moves_whole)
    early = np.flatnonzero(split)
    turns = np.concatenate([early, np.arange(len(intervals))])
    least = np.concatenate([np.zeros(len(early), np.int64), split])
    most = np.concatenate([np.ones(len(early), np.int64), chunks])
    whole = np.ceil(8 * (1 - (1 - filled) / chunks)) / 8  # of all chunks together
    copied = np.concatenate([filled[early], np.where(split, 1.0, whole)])
    order = np.lexsort((-intervals.seconds[turns] / copied, clean_first & (intervals.clean_after[turns] < 0)))
    return _Turns(turns[order], least[order], most[order])


def _shortened(problem: Problem, intervals: Intervals, margin: float) -> tuple[Counts, Counts]:
    """The intervals, shortened by `margin` times their variable's copy out at the start, and in at the end."""
    if margin == 0:
        return intervals.start, intervals.stop
    n, machine = problem.functions, problem.link
    times = start_times(problem)
    size = margin * problem.variable_bytes[intervals.out_variable]
    out = times[intervals.start + n] + size / machine.out_bytes_per_second
    back = times[intervals.stop + n] - np.where(intervals.in_variable >= 0, size / machine.in_bytes_per_second, 0.0)
    start = np.searchsorted(times, out, side="left") - n
    stop = np.searchsorted(times, back, side="right") - 1 - n
    return np.maximum(start, intervals.start), np.clip(stop, -n, intervals.stop)


def _take(
    problem: Problem,
    turns: _Turns,
    start: Counts,
    stop: Counts,
    resident: Usage,
    taken: Counts,
) -> int | None:
    """Let chunks leave until every function fits. Returns a function that does not, if there is one."""
    n, capacity = problem.functions, problem.capacity_chunks
    starts, stops = start[turns.interval], stop[turns.interval]
    failed: int | None = None
    hopeless = np.zeros(n, bool)
    while True:
        if failed is None:
            worst = resident.first_of_highest()
        else:
            worst = int(np.where(hopeless, -1, resident.array()).argmax())
        excess = resident.at(worst) - capacity
        if excess <= 0 or hopeless[worst]:
            return failed
        covers = ((starts <= worst) & (worst < stops)) | ((starts <= worst - n) & (worst - n < stops))
        places = (covers & (turns.most > taken[turns.interval])).nonzero()[0]
        columns = turns.interval, turns.most, starts, stops
        for interval, most, first, last in zip(*(column[places].tolist() for column in columns)):
            amount = min(excess, most - int(taken[interval]))
            taken[interval] += amount
            resident.add(first, last, -amount)
            excess = resident.at(worst) - capacity  # twice as much less if the interval covers the function twice
            if excess <= 0:
                break
        if excess > 0:
            hopeless[worst] = True
            failed = worst


def _give_back(problem: Problem, turns: _Turns, start: Counts, stop: Counts, resident: Usage, taken: Counts) -> None:
    """Let chunks stay where there is room for them after all, those of the worst turns first."""
    for interval, least in zip(turns.interval[::-1].tolist(), turns.least[::-1].tolist()):
        if taken[interval] > least:
            first, last = int(start[interval]), int(stop[interval])
            room = problem.capacity_chunks - resident.highest(first, last)
            if last - first > problem.functions:
                room //= 2  # in an interval longer than an iteration, two storages are away at the same time
            room = min(room, int(taken[interval]) - least)
            if room > 0:
                taken[interval] -= room
                resident.add(first, last, room)
