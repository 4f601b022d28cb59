"""The first level: what a plan does between device and host in its steady state, for the level below.

The copies of one iteration, in the order in which they start, are what the second level has to serve.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Lost, Run, SimulationResult
from swapd.simulation.simulator import simulate_events


class UnsteadyError(RuntimeError):
    """The first level does not do the same in every iteration, so no plan can be made for what it does."""


@dataclass(frozen=True, eq=False)
class FirstLevel:
    """One iteration of a simulated plan, with host memory for everything. Times count from the iteration's start."""

    problem: Problem
    plan: Plan
    timeline: SimulationResult
    runs: tuple[Run, ...]
    carried: tuple[Copy, ...]  # those of the iteration before that are still under way, by end
    copies: tuple[Copy, ...]  # that start in the iteration, by start
    lost: tuple[Lost, ...]

    @property
    def seconds(self) -> float:
        """The step's time when the host has memory for everything."""
        return self.timeline.seconds

    @cached_property
    def starts(self) -> list[float]:
        """When each copy starts."""
        return [copy.start for copy in self.copies]

    @cached_property
    def outlasts(self) -> list[int]:
        """How many of the copies that start later, in the next iteration too, start before each copy ends."""
        starts = [*self.starts, *(start + self.seconds for start in self.starts)]
        return [max(0, bisect_left(starts, copy.end, k + 1) - k - 1) for k, copy in enumerate(self.copies)]

    def copies_before(self, time: float) -> int:
        """How many copies have started by then."""
        return bisect_right(self.starts, time)


def first_level(problem: Problem, plan: Plan, iterations: int = 2) -> FirstLevel:
    """Simulate `iterations` of `plan` and take the last of them.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
        UnsteadyError: what is under way as the iteration ends is not what was under way as it began.
    """
    timeline, events = simulate_events(problem, plan, iterations)
    begun = {True: timeline.out_count, False: timeline.in_count}
    carried: list[Copy] = []
    copies: list[Copy] = []
    for copy in reversed(events.copies):
        begun[copy.is_out] -= 1
        (copies if begun[copy.is_out] >= 0 else carried).append(copy)
    successor = [*problem.successor.tolist(), -1]
    left = {(c.is_out, successor[c.variable], c.mask) for c in copies if c.end > timeline.seconds}
    if left != {(c.is_out, c.variable, c.mask) for c in carried}:
        raise UnsteadyError("the copies under way at the ends of two iterations differ")
    carried.sort(key=lambda copy: copy.end)
    return FirstLevel(problem, plan, timeline, events.runs, tuple(carried), tuple(reversed(copies)), events.lost)
