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

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import numpy as np

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals, find_intervals
from swapd.policies.published.absences import Absences, fits, lay_out
from swapd.policies.published.best_fit import plan_fragmented

MEMORY_RATIO = 0.9  # of the memory, for the tuning; the rest is left to fragmentation


def lms(problem: Problem) -> Plan:
    """Plan by distance, with tuned parameters.

    Raises:
        InfeasibleError: a function alone needs more than the capacity, or (PolicyInfeasibleError) no parameters fit.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="lms")
    intervals = find_intervals(problem)
    return by_distance(problem, intervals, *_tuned(problem, intervals))


def by_distance(problem: Problem, intervals: Intervals, swapout_threshold: int, swapin_ahead: int) -> Plan:
    """Plan by distance with given parameters. Raises PolicyInfeasibleError."""
    return lay_out(problem, intervals, _absences(problem, intervals, swapout_threshold, swapin_ahead), "lms")


def lms_best_fit(problem: Problem) -> Plan:
    """As `lms`, in a caching best-fit allocator such as TensorFlow's. Raises InfeasibleError."""
    problem.require_feasible()
    return plan_fragmented(problem, "lms_best_fit", lambda scheduled: [lms(scheduled)])


def _tuned(problem: Problem, intervals: Intervals) -> tuple[int, int]:
    """The tuned threshold and ahead; if nothing fits, those with which the most is away."""
    n = problem.functions

    def fit(capacity: int, threshold: int, ahead: int) -> bool:
        return fits(problem, intervals, _absences(problem, intervals, threshold, ahead), capacity)

    for capacity in (int(problem.capacity_chunks * MEMORY_RATIO), problem.capacity_chunks):
        if fit(capacity, 1, 1):
            threshold = _largest(n, partial(fit, capacity, ahead=1))
            return threshold, _largest(n, partial(fit, capacity, threshold))
        if fit(capacity, 1, 0):
            return _largest(n, partial(fit, capacity, ahead=0)), 0
    return 1, 0


def _absences(problem: Problem, intervals: Intervals, threshold: int, ahead: int) -> Absences:
    """The absences between two uses of what is made and dropped within the iteration."""
    own = (problem.born >= 0) & (problem.died < problem.functions)
    movable = own[intervals.out_variable] & (intervals.in_variable >= 0)
    chosen = np.flatnonzero(movable & (intervals.stop - (intervals.start - 1) > threshold))
    back = np.maximum(intervals.start, intervals.stop - ahead)[chosen]
    return dict(zip(chosen.tolist(), back.tolist()))


def _largest(most: int, good: Callable[[int], bool]) -> int:
    """The largest value up to `most` for which `good` holds. It must hold from 1 up to some value, not beyond."""
    return 1 + bisect_left(range(2, most + 1), True, key=lambda value: not good(value))
