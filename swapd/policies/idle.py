"""The idle policy: move the least data, over the intervals in which it is missed least.

`choice` says what leaves, and `placement` says when. Both have to guess how long transfers and stalls will take. So the
policy tries a few ways to choose, and keeps the plan that simulates fastest. It then plans again a few times, with the
functions' times stretched by the simulated stalls, which moves the guesses towards what will happen. The number of
attempts depends on the size of the problem, so that planning ends within about a second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from swapd.planning.lower_bound import quick_lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.choice import choose
from swapd.policies.intervals import Intervals, find_intervals
from swapd.policies.placement import LATENCIES, place
from swapd.simulation.simulator import SimulationResult, simulate_once


class Way(NamedTuple):
    """How to choose and to place."""

    clean_first: bool  # what may leave without a copy is chosen before what is idle longest
    margin: float  # intervals are shortened by so many times their own transfer time
    latencies: int = LATENCIES  # a piece takes at least so many times the latency of a copy


WAYS = (
    *(Way(clean_first, margin) for margin in (2.0, 0.0, 4.0) for clean_first in (True, False)),
    *(Way(True, margin, LATENCIES // 4) for margin in (2.0, 0.0, 4.0)),
)
ROUNDS = 3  # attempts with stretched times
WORK = 40_000  # about how many functions and intervals all attempts go through; it takes less than a second
CLOSE = 1.01  # times the bound: a plan that is this near ends the search


def idle(problem: Problem, work: int = WORK) -> Plan:
    """Plan by longest idle time, going through about `work` functions and intervals in all.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="idle")
    goal = CLOSE * quick_lower_bound(problem)
    intervals = find_intervals(problem)
    attempts = max(1, work // (problem.functions + len(intervals)))
    tried = []
    for way in WAYS[: max(attempts - ROUNDS, min(attempts, 3))]:
        tried.append((*_attempt(problem, problem, intervals, way), way))
        if tried[-1][1].seconds <= goal:
            break
    plan, timeline, way = min(tried, key=lambda attempt: attempt[1].seconds)
    paced, best = problem, timeline.seconds
    for _ in range(min(ROUNDS, attempts - len(tried))):
        if best <= goal:
            break
        paced = _stretched(problem, paced, timeline)
        candidate, timeline = plan_paced(problem, paced, way._replace(margin=way.margin or 2.0))
        if timeline.seconds < best:
            plan, best = candidate, timeline.seconds
    return plan


def plan_in(problem: Problem, way: Way) -> Plan:
    """Plan in one way, for a problem that has its room for each function but not for everything."""
    return _placed(problem, find_intervals(problem), way)


def plan_paced(problem: Problem, paced: Problem, way: Way) -> tuple[Plan, SimulationResult]:
    """The same with the times of `paced`, and the plan's simulation with those of `problem`."""
    return _attempt(problem, paced, find_intervals(paced), way)


def _attempt(problem: Problem, paced: Problem, intervals: Intervals, way: Way) -> tuple[Plan, SimulationResult]:
    """A plan made with the times and the intervals of `paced`, and its simulation with the times of `problem`."""
    plan = _placed(paced, intervals, way)
    return plan, simulate_once(problem, plan)


def _placed(problem: Problem, intervals: Intervals, way: Way) -> Plan:
    return place(problem, intervals, choose(problem, intervals, way.margin, way.clean_first), "idle", way.latencies)


def _stretched(problem: Problem, paced: Problem, timeline: SimulationResult) -> Problem:
    """`problem` with times half-way from those of `paced` to the simulated ones, stalls included."""
    ends = np.append(timeline.starts[1:], timeline.starts[0] + timeline.seconds)
    return replace(problem, seconds=0.5 * paced.seconds + 0.5 * (ends - np.array(timeline.starts)))
