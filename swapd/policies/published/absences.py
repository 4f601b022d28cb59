"""Absences: whole variables that are away over idle intervals, and the plan that a set of absences makes.

They are for policies that decide per variable and by the order of functions alone, as the published ones do. A variable
leaves after the function before its idle interval and comes back before function `at`, as a whole and in the order of
the program.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import PolicyInfeasibleError, Problem
from swapd.policies.intervals import Intervals
from swapd.policies.usage import make_usage

# {interval: the function before which its in may start, in the coordinates of `intervals`}
Absences = Mapping[int, int]


def resident(problem: Problem, intervals: Intervals, absences: Absences) -> NDArray[np.int64]:
    """int64[n]: chunks on the device while each function runs."""
    profile = make_usage(problem.live)
    for interval, at in absences.items():
        start = int(intervals.start[interval])
        if at > start:
            profile.add(start, at, -int(intervals.chunks[interval]))
    return profile.array()


def fits(problem: Problem, intervals: Intervals, absences: Absences, capacity_chunks: int) -> bool:
    """Whether every function has its room within `capacity_chunks`."""
    return int(resident(problem, intervals, absences).max(initial=0)) <= capacity_chunks


def lay_out(problem: Problem, intervals: Intervals, absences: Absences, policy: str) -> Plan:
    """The plan of `absences`.

    Raises:
        PolicyInfeasibleError: the functions do not all fit with them; they are the most that the policy can do.
    """
    profile = resident(problem, intervals, absences)
    if profile.max(initial=0) > problem.capacity_chunks:
        worst = int(profile.argmax())
        need = (int(profile[worst]) + problem.slab_chunks) * problem.chunk_bytes
        raise PolicyInfeasibleError(worst, problem.names[worst], need, problem.budget_bytes, need, policy)
    n = problem.functions
    outs: list[tuple[int, int]] = []  # after which function, interval
    ins: list[tuple[int, int, int]] = []  # before which function it may start, needed by, interval
    for interval, at in absences.items():
        start, stop = int(intervals.start[interval]), int(intervals.stop[interval])
        if at <= start:
            continue
        outs.append((int(intervals.after[interval]), interval))
        if intervals.in_variable[interval] >= 0:
            ins.append((at % n if at < 0 else at, stop + n if at < 0 else stop, interval))
    outs.sort()
    ins.sort()
    place = {interval: index + 1 for index, (_, interval) in enumerate(outs)}
    moves = []
    for at, stop, interval in ins:
        early = stop > n or (stop == n and absences[interval] < 0)  # serves the next iteration
        left_before = bool(intervals.wraps[interval]) and not early  # its out was in the iteration before
        variable = (intervals.out_variable if early else intervals.in_variable)[interval]
        chunks = int(intervals.chunks[interval])
        moves.append(In(int(variable), 0, chunks, at - 1, 0 if left_before else place[interval], n if early else stop))
    return Plan(
        outs=tuple(Out(int(intervals.out_variable[i]), 0, int(intervals.chunks[i]), after) for after, i in outs),
        ins=tuple(moves),
        policy=policy,
    )
