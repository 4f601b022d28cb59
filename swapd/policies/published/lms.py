"""The policy of Large Model Support: Le, Imai, Negishi, Kawachiya, "Automatic GPU memory management for large neural
models in TensorFlow" (ISMM 2019), with the tuning of its program, TensorFlow Large Model Support 2.

Distances are counted in functions. A tensor whose next use is more than `swapout_threshold` functions away leaves
after the use before it, and starts to come back `swapin_ahead` functions before it (the seed paper, section 2, states
the rule so). Learnt parameters, and whatever else survives an iteration, stay. The tuning simulates memory. It takes
the largest threshold that fits in nine tenths of the memory while tensors come back one function ahead, and then the
largest `swapin_ahead` that still fits. If nothing fits, swap-ins are synchronised with their function (`swapin_ahead`
0); if still nothing fits, all of the memory is used, as a user would set the parameters by hand.

Two things differ here. The program orders by levels of TensorFlow's graph; here the order is the sequence of functions.
Its `swapin_groupby`, by which uses near each other share one swap-in, follows here from the threshold, because what has
come back stays until its next use is further away than that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals, find_intervals
from swapd.policies.published.absences import Absences, fits, lay_out, refuse
from swapd.policies.published.fragmented import plan_fragmented

MEMORY_RATIO = 0.9  # of the memory, for the tuning; the rest is left to fragmentation


def lms(problem: Problem, swapout_threshold: int | None = None, swapin_ahead: int | None = None) -> Plan:
    """Plan by distance; parameters that are None are tuned.

    Raises:
        InfeasibleError: a function alone needs more than the capacity, or (PolicyInfeasibleError) no parameters fit.
        ValueError: a parameter is negative.
    """
    if min(swapout_threshold or 0, swapin_ahead or 0) < 0:
        raise ValueError("swapout_threshold and swapin_ahead must not be negative")
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="lms")
    intervals = find_intervals(problem)
    movable = _movable(problem, intervals)

    def absences(threshold: int, ahead: int) -> Absences:
        return _absences(intervals, movable, threshold, ahead)

    if swapout_threshold is not None and swapin_ahead is not None:
        chosen = absences(swapout_threshold, swapin_ahead)
        if not fits(problem, intervals, chosen, problem.capacity_chunks):
            raise refuse("lms", problem, intervals, chosen)
        return lay_out(problem, intervals, chosen, "lms")
    for ratio in (MEMORY_RATIO, 1.0):
        capacity = int(problem.capacity_chunks * ratio)

        def fit(threshold: int, ahead: int, capacity: int = capacity) -> bool:
            return fits(problem, intervals, absences(threshold, ahead), capacity)

        found = _tune(fit, problem.functions, swapout_threshold, swapin_ahead)
        if found is not None:
            return lay_out(problem, intervals, absences(*found), "lms")
    raise refuse("lms", problem, intervals, absences(swapout_threshold or 1, swapin_ahead or 0))


def lms_best_fit(problem: Problem) -> Plan:
    """As `lms`, in a caching best-fit allocator such as TensorFlow's. Raises InfeasibleError."""
    problem.require_feasible()
    return plan_fragmented(problem, "lms_best_fit", lambda scheduled: [lms(scheduled)])[0]


def _tune(
    fit: Callable[[int, int], bool], functions: int, threshold: int | None, ahead: int | None
) -> tuple[int, int] | None:
    """The tuned threshold and ahead; one that is given stays as it is. Returns None if nothing fits."""
    for start in (1, 0) if ahead is None else (ahead,):
        if not fit(threshold or 1, start):
            continue
        found = threshold or _largest(partial(_flipped, fit, start), 1, functions)
        if ahead is None and start:
            return found, _largest(partial(fit, found), start, functions)
        return found, start
    return None


def _flipped(fit: Callable[[int, int], bool], ahead: int, threshold: int) -> bool:
    return fit(threshold, ahead)


def _movable(problem: Problem, intervals: Intervals) -> list[int]:
    """Intervals between two uses of what is made and dropped within the iteration."""
    own = (problem.born >= 0) & (problem.died < problem.functions)
    chosen = own[intervals.out_variable] & (intervals.in_variable >= 0)
    return [int(interval) for interval in np.flatnonzero(chosen)]


def _absences(intervals: Intervals, movable: list[int], threshold: int, ahead: int) -> dict[int, int]:
    result = {}
    for interval in movable:
        start, stop = int(intervals.start[interval]), int(intervals.stop[interval])
        if stop - (start - 1) > threshold:
            result[interval] = max(start, stop - ahead)
    return result


def _largest(good: Callable[[int], bool], low: int, high: int) -> int:
    """The largest value for which `good` holds, by bisection. It must hold from `low` up to some value, not beyond."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
