"""The policy of ZeRO-Infinity: Rajbhandari, Ruwase, Rasley, Smith, He, "ZeRO-Infinity: breaking the GPU memory wall for
extreme scale deep learning" (SC 2021), sections 5.1 (offload engine) and 6.2 (overlap-centric design), on one GPU.

Model states (parameters, gradients, optimizer state) live in the lowest memory. Each leaves when the operator that
used it has ended and comes back ahead of the next one that needs it: while operator i runs, parameters of i + 3 come
from the disk to the host, and those of i + 2 from the host to the device. In the optimizer's step the states stream
through in the same way, chunk by chunk. Activations stay where they are made if there is room; else they are offloaded
too, as the paper does with checkpoints of activations.

An operator here is a function that uses a model state, and a model state is a variable that lives across iterations.

    zero_infinity           all model states stream, as published
    zero_infinity_tuned     also tries to let only the optimizer's states stream, those that are used the fewest times;
                            parameters then stay above, as the program's settings allow

Where there is no room for that, whatever is idle for longer than the prefetch distance streams as well. Users tune how
much is prefetched. So distances of 1 to 64 operators are tried, and the plan that simulates fastest is taken. On a
second level, whose functions are the copies of the first one, the same rule moves blocks between host and disk: states
are streamed a layer or so ahead on both.

Three things differ. The optimizer runs where the trace runs it, on the device, not on the processor. The paper's
partitioning among GPUs, and its aggregate bandwidth, are not there: there is one GPU, one link, one disk. And what has
not been written is dropped without a copy, which the paper's program does for parameters only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import Plan
from swapd.planning.problem import PolicyInfeasibleError, Problem
from swapd.policies.intervals import Intervals, find_intervals
from swapd.policies.published.absences import lay_out
from swapd.simulation.simulator import simulate_once

DISTANCES = (1, 2, 4, 8, 16, 32, 64)  # operators ahead


def zero_infinity(problem: Problem, policy: str = "zero_infinity") -> Plan:
    """Plan with one of the two policies above, at the fastest of `DISTANCES`.

    Raises:
        InfeasibleError: a function alone needs more than the capacity, or (PolicyInfeasibleError) the functions do not
            fit although everything streams.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy=policy)
    intervals, states = find_intervals(problem), model_states(problem)
    plans = list(_plans(problem, intervals, states, policy))
    if policy == "zero_infinity_tuned":
        plans += _plans(problem, intervals, _least_used(problem, intervals, states), policy)
    everything = np.ones(problem.variables, bool)
    plans = plans or list(_plans(problem, intervals, everything, policy))
    if not plans:
        streaming(problem, intervals, everything, DISTANCES[0], policy)  # raises what is missing
    return min(plans, key=lambda plan: simulate_once(problem, plan).seconds)


def model_states(problem: Problem) -> NDArray[np.bool_]:
    """bool[V]: variables that live across iterations."""
    entry = (problem.previous >= 0) & (problem.died >= 0)
    states: NDArray[np.bool_] = entry | (problem.successor >= 0)
    return states


def _least_used(problem: Problem, intervals: Intervals, states: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool[V]: the states that are idle the fewest times in an iteration, which are those of the optimizer."""
    times = np.bincount(intervals.out_variable, minlength=problem.variables)
    handed_on = np.flatnonzero((problem.successor >= 0) & (problem.successor != np.arange(problem.variables)))
    later = problem.successor[handed_on]
    times[handed_on] = times[later] = times[handed_on] + times[later]
    found: NDArray[np.bool_] = states & (times == times[states & (times > 0)].min(initial=np.iinfo(np.int64).max))
    return found


def _plans(problem: Problem, intervals: Intervals, streamed: NDArray[np.bool_], policy: str) -> Iterator[Plan]:
    """The plans that fit, by growing distance; with a larger distance less is away."""
    for distance in DISTANCES:
        try:
            yield streaming(problem, intervals, streamed, distance, policy)
        except PolicyInfeasibleError:
            return


def streaming(
    problem: Problem, intervals: Intervals, streamed: NDArray[np.bool_], distance: int, policy: str = "zero_infinity"
) -> Plan:
    """The plan in which `streamed` variables come back so many operators ahead. Raises PolicyInfeasibleError."""
    return lay_out(problem, intervals, dict(_absences(problem, intervals, streamed, distance)), policy)


def _absences(
    problem: Problem, intervals: Intervals, streamed: NDArray[np.bool_], distance: int
) -> Iterator[tuple[int, int]]:
    n = problem.functions
    within = np.unique(problem.uses.function[streamed[problem.uses.variable]])
    operators = np.concatenate([within - n, within]).tolist()
    for interval in np.flatnonzero(streamed[intervals.out_variable]).tolist():
        start, stop = int(intervals.start[interval]), int(intervals.stop[interval])
        at = stop
        if intervals.in_variable[interval] >= 0:
            operator = bisect_left(operators, stop) - distance
            at = operators[operator] if operator >= 0 else -n
        if max(at, stop - n) > start:
            yield interval, max(at, stop - n)
