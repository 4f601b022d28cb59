"""The idle policy: move the least data, over the intervals in which it is missed least.

`choice` says what leaves, and `placement` says when. Both have to guess how long transfers and stalls will take. So the
policy tries a few ways to choose. In those whose plans simulate fastest it then plans again a few times, with the
functions' times stretched by the simulated stalls, which moves the guesses towards what will happen. The number of
attempts depends on the size of the problem, so that planning ends within about a second; half of them, rounded up, are
for ways that were not tried yet.
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
    *(Way(clean_first, margin) for margin in (2.0, 0.0, 4.0, 6.0) for clean_first in (True, False)),
    *(Way(True, margin, LATENCIES // 4) for margin in (2.0, 0.0)),
)
PACED = 4  # of the ways, those of the fastest plans, are tried again with stretched times
ROUNDS, PATIENCE = 4, 2  # attempts of each of them at most, and those in a row that are not faster
WORK = 60_000  # about how many functions and intervals all attempts go through; it takes about a second
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
    left = max(1, work // (problem.functions + len(intervals)))  # attempts
    tried: dict[float, tuple[Plan, SimulationResult, Way]] = {}  # by seconds: equal plans are one
    for way in WAYS[: max((left + 1) // 2, min(left, 3))]:
        left -= 1
        plan, timeline = _attempt(problem, problem, intervals, way)
        tried.setdefault(timeline.seconds, (plan, timeline, way))
        if timeline.seconds <= goal:
            return plan
    found = []
    for _, (plan, timeline, way) in sorted(tried.items())[:PACED]:
        found.append(_paced(problem, plan, timeline, way, min(ROUNDS, left), goal))
        left -= found[-1][2] - 1
        if found[-1][1] <= goal:
            break
    return min(found, key=lambda plan: plan[1])[0]


def plan_in(problem: Problem, way: Way) -> Plan:
    """Plan in one way, for a problem that has its room for each function but not for everything."""
    return _placed(problem, find_intervals(problem), way)


def plan_paced(problem: Problem, way: Way, rounds: int, promising: float, goal: float) -> tuple[Plan, float, int]:
    """The same, planned again `rounds` times with stretched times if the plan simulates `promising` seconds at most.

    Returns:
        The fastest plan, the seconds that it simulates, and the number of plans. `goal` seconds end the attempts.
    """
    plan, timeline = _attempt(problem, problem, find_intervals(problem), way)
    return _paced(problem, plan, timeline, way, rounds if timeline.seconds <= promising else 0, goal)


def _paced(
    problem: Problem, plan: Plan, timeline: SimulationResult, way: Way, rounds: int, goal: float
) -> tuple[Plan, float, int]:
    """As `plan_paced`, from a plan and its simulation; each of the rounds stretches times by the stalls before it.

    Rounds end where `PATIENCE` of them made nothing faster.
    """
    paced, best, attempts, fastest = problem, timeline.seconds, 1, 1
    while attempts <= rounds and attempts < fastest + PATIENCE and best > goal:
        attempts += 1
        paced = _stretched(problem, paced, timeline)
        candidate, timeline = _attempt(problem, paced, find_intervals(paced), way._replace(margin=way.margin or 2.0))
        if timeline.seconds < best:
            plan, best, fastest = candidate, timeline.seconds, attempts
    return plan, best, attempts


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
