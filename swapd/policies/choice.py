"""Choice: how many chunks leave over each idle interval.

While functions are over capacity, the one that is furthest over is taken, and chunks leave over the intervals that
cover it, only as many as are needed. The interval with the longest idle time comes first. With `clean_first`, intervals
whose chunks may leave without a copy come before all others: what was not written since an earlier interval can be
written back during that one. Evicting what is needed furthest ahead is Belady's rule ("A study of replacement
algorithms for a virtual-storage computer", 1966); choosing whole intervals ahead is what lets a transfer start long
before its room is needed. Chunks that need not leave, because of what was chosen later, stay after all.

Transfers take time at both ends of an interval, and the memory is not free meanwhile. With a `margin` the intervals are
first shortened by that many times their own transfer time, so that enough leaves even while other transfers are under
way. Where the shortened intervals do not suffice, the whole ones are used.
"""

from __future__ import annotations

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
    order = np.lexsort((-intervals.seconds, clean_first & (intervals.clean_after < 0)))
    taken = np.zeros(len(intervals), np.int64)
    start, stop = _shortened(problem, intervals, margin)
    resident = make_usage(problem.live)
    _take(problem, intervals, order[stop[order] > start[order]], start, stop, resident, taken)
    _give_back(problem, order, start, stop, resident, taken)
    if margin > 0:
        resident = make_usage(problem.live)
        for interval in np.flatnonzero(taken).tolist():
            resident.add(int(intervals.start[interval]), int(intervals.stop[interval]), -int(taken[interval]))
    worst = _take(problem, intervals, order, intervals.start, intervals.stop, resident, taken)
    if worst is not None:
        raise RuntimeError(f"function {worst} ({problem.names[worst]}) does not fit although all else may leave")
    return taken


def _shortened(problem: Problem, intervals: Intervals, margin: float) -> tuple[Counts, Counts]:
    """The intervals, shortened by `margin` times their variable's copy out at the start, and in at the end."""
    if margin == 0:
        return intervals.start, intervals.stop
    n, machine = problem.functions, problem.link
    times = start_times(problem)
    size = margin * intervals.chunks * problem.chunk_bytes
    out = times[intervals.start + n] + size / machine.out_bytes_per_second
    back = times[intervals.stop + n] - np.where(intervals.in_variable >= 0, size / machine.in_bytes_per_second, 0.0)
    start = np.searchsorted(times, out, side="left") - n
    stop = np.searchsorted(times, back, side="right") - 1 - n
    return np.maximum(start, intervals.start), np.clip(stop, -n, intervals.stop)


def _take(
    problem: Problem,
    intervals: Intervals,
    order: Counts,
    start: Counts,
    stop: Counts,
    resident: Usage,
    taken: Counts,
) -> int | None:
    """Let chunks leave until every function fits. Returns a function that does not, if there is one."""
    n, capacity = problem.functions, problem.capacity_chunks
    starts, stops = start[order], stop[order]
    left = intervals.chunks[order] - taken[order]
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
        for place in np.flatnonzero(covers & (left > 0)).tolist():
            interval, amount = int(order[place]), min(excess, int(left[place]))
            taken[interval] += amount
            left[place] -= amount
            resident.add(int(starts[place]), int(stops[place]), -amount)
            excess = int(resident.at(worst)) - capacity  # twice as much less if the interval covers the function twice
            if excess <= 0:
                break
        if excess > 0:
            hopeless[worst] = True
            failed = worst


def _give_back(problem: Problem, order: Counts, start: Counts, stop: Counts, resident: Usage, taken: Counts) -> None:
    """Let chunks stay where there is room for them after all, those of the shortest intervals first."""
    for interval in order[::-1].tolist():
        if taken[interval] > 0:
            first, last = int(start[interval]), int(stop[interval])
            room = problem.capacity_chunks - resident.highest(first, last)
            if last - first > problem.functions:
                room //= 2  # in an interval longer than an iteration, two storages are away at the same time
            room = min(room, int(taken[interval]))
            if room > 0:
                taken[interval] -= room
                resident.add(first, last, room)
