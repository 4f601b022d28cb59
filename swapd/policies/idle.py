"""The idle policy: move the least data, over the intervals in which it is missed least.

Choice. While a function is over capacity, take the one that is furthest over and let chunks leave over the idle
intervals that cover it, longest idle time first, only as many chunks as are needed. (Evicting what is needed furthest
in the future is Belady's rule, "A study of replacement algorithms for a virtual-storage computer", 1966; choosing whole
intervals up front is what lets a transfer start long before its room is needed.) Afterwards a chunk that later choices
made superfluous stays.

Placement. An out starts as soon as the interval does. Ins are ordered by the function that needs them; each starts at
the earliest function from which on there is room for it up to that need, given all others, and only after as many outs
as that function's room depends on. The result does not depend on the speed of the link: a slower link delays moves but
never turns their order into a deadlock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swapd.plan import Plan
from swapd.policies.intervals import Intervals, add_over, find_intervals
from swapd.policies.placement import place
from swapd.problem import Problem


def idle(problem: Problem) -> Plan:
    """Plan by longest idle time.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="idle")
    intervals = find_intervals(problem)
    return place(problem, intervals, choose(problem, intervals, intervals.seconds), "idle")


def choose(problem: Problem, intervals: Intervals, priority: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64[intervals]: how many chunks leave over each interval so that every function fits.

    `priority`: float64[intervals], the larger leaves first; ties go to the earlier interval.
    """
    capacity = problem.capacity_chunks
    resident = problem.live.copy()
    taken = np.zeros(len(intervals), np.int64)
    order = np.argsort(-priority, kind="stable")
    start, stop = intervals.start[order], intervals.stop[order]
    n = problem.functions
    while True:
        worst = int(resident.argmax())
        excess = int(resident[worst]) - capacity
        if excess <= 0:
            break
        covers = ((start <= worst) & (worst < stop)) | (start <= worst - n)
        for interval in order[np.flatnonzero(covers)].tolist():
            amount = min(excess, int(intervals.chunks[interval] - taken[interval]))
            if amount > 0:
                taken[interval] += amount
                add_over(resident, int(intervals.start[interval]), int(intervals.stop[interval]), -amount)
                excess -= amount
                if excess == 0:
                    break
        if excess > 0:
            raise RuntimeError(f"function {worst} ({problem.names[worst]}) does not fit although all else may leave")
    _give_back(problem, intervals, order, resident, taken)
    return taken


def _give_back(
    problem: Problem,
    intervals: Intervals,
    order: NDArray[np.int64],
    resident: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Let chunks stay where there is room for them after all, those of the lowest priority first."""
    capacity = problem.capacity_chunks
    for interval in order[::-1].tolist():
        if taken[interval] > 0:
            start, stop = int(intervals.start[interval]), int(intervals.stop[interval])
            room = capacity - highest_over(resident, start, stop)
            if stop - start > problem.functions:
                room //= 2  # longer than an iteration: two storages are within it at the same time
            room = min(room, int(taken[interval]))
            if room > 0:
                taken[interval] -= room
                add_over(resident, start, stop, room)


def highest_over(profile: NDArray[np.int64], start: int, stop: int) -> int:
    """The maximum over the functions `start` to `stop` - 1."""
    parts = ([profile[start:]] if start < 0 else []) + ([profile[max(start, 0) : stop]] if stop > 0 else [])
    return max(int(part.max()) for part in parts if len(part))
