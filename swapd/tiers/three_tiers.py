"""Three tiers: a plan for each level, and what a step takes with both.

The second level is planned by the same policies as the first. `auto` chooses the first level's plan by what both make
of it: a plan that moves the least may be slower over the link, and still the better one over a disk. Where the disk is
what a step waits for, it may also be better that the host keeps no copy of what is on the device (`exclusive`): then a
clean chunk is copied out anew, over a link that has time, and the host's room goes to chunks that would need the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from swapd.planning.lower_bound import CUTS, planning_cuts, two_link_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, PolicyInfeasibleError, Problem
from swapd.policies import make_plan
from swapd.policies.idle import Way, plan_in
from swapd.tiers.first_level import FirstLevel, UnsteadyError, first_level
from swapd.tiers.host_blocks import HostBlocks, host_blocks
from swapd.tiers.joint import JointResult, simulate_jointly
from swapd.tiers.moves import of_whole_blocks
from swapd.trace.trace import WRITE, Machine

DISK_LATENCY_SECONDS = 100e-6  # of one read of an NVMe drive, the order of magnitude on all of these
_ITERATIONS = (2, 3, 4, 6, 9, 14)  # of the first level, until it is steady
_LEAST = (Way(True, 0.0), Way(False, 0.0))  # the ways of the idle policy that move the least
_CLOSE = 1.01  # times the bound: plans that are this near end the search


@dataclass(frozen=True)
class LowerTiers:
    """What lies under a device: host memory for so many bytes of its data, and a disk, whose outs are writes."""

    host_budget_bytes: int
    disk: Machine

    def host_chunks(self, problem: Problem) -> int:
        """The host budget in the chunks of a problem."""
        return self.host_budget_bytes // problem.chunk_bytes

    def bound(self, problem: Problem, cuts: int = CUTS) -> float:
        """The seconds of a step that no plans of the two levels beat."""
        return two_link_bound(problem, self.host_chunks(problem), self.disk, cuts)


@dataclass(eq=False)
class HostInfeasibleError(InfeasibleError):
    """Host memory is too small for a single copy of the first level, or (`policy`) for what a policy leaves in it."""

    policy: str = ""

    def __str__(self) -> str:
        if self.policy:
            return (
                f"policy {self.policy} finds no plan for host memory: {self.function_name} (copy {self.function} of an "
                f"iteration) would run beside {self.need_bytes} bytes in all, the host budget is {self.budget_bytes} "
                f"bytes"
            )
        return (
            f"{self.function_name} (copy {self.function} of an iteration) needs {self.need_bytes} bytes of host memory "
            f"at once, the host budget is {self.budget_bytes} bytes; the smallest that works with this plan is "
            f"{self.min_budget_bytes} bytes"
        )


@dataclass(frozen=True, eq=False)
class ThreeTiers:
    """Both levels with their plans, in the steady state."""

    lower: LowerTiers
    level: FirstLevel  # its problem may be the `exclusive` one
    blocks: HostBlocks  # the second level's problem
    plan: Plan  # the second level's, of whole blocks
    result: JointResult

    @property
    def is_exclusive(self) -> bool:
        """Whether the host has no copy of what is on the device."""
        return bool((self.level.problem.use_flags & WRITE).all())

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.result.seconds

    @property
    def link_stall_seconds(self) -> float:
        """What a step would wait with host memory for everything."""
        return max(0.0, self.level.seconds - self.level.problem.compute_seconds)

    @property
    def disk_stall_seconds(self) -> float:
        """What a step waits in addition, because of the disk."""
        return max(0.0, self.seconds - self.level.seconds)

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes of blocks in host memory at a time."""
        return self.result.second.peak_chunks * self.blocks.chunk_bytes


def second_level(problem: Problem, plan: Plan, lower: LowerTiers) -> tuple[FirstLevel, HostBlocks]:
    """The first level under `plan` and the problem of the second one.

    Raises:
        InfeasibleError: a function, or (HostInfeasibleError) a copy of the plan, alone exceeds its level's budget.
        UnsteadyError: the plan does not do the same in every iteration.
    """
    for iterations in _ITERATIONS:
        try:
            level = first_level(problem, plan, iterations)
            blocks = host_blocks(level, lower.host_budget_bytes, lower.disk)
            break
        except UnsteadyError:
            if iterations == _ITERATIONS[-1]:
                raise
    try:
        blocks.require_feasible()
    except InfeasibleError as error:
        raise HostInfeasibleError(**vars(error)) from None
    return level, blocks


def run_tiers(problem: Problem, plan: Plan, lower: LowerTiers, policy: str | None) -> ThreeTiers:
    """The first level under `plan`, the second one under the plan of `policy`; without a plan if that is None.

    Raises what `second_level` does; HostInfeasibleError too if the policy finds no plan.
    """
    level, blocks = second_level(problem, plan, lower)
    try:
        planned = Plan() if policy is None else make_plan(blocks, policy)
    except PolicyInfeasibleError as error:
        raise HostInfeasibleError(**vars(error)) from None
    below = of_whole_blocks(planned, blocks)
    return ThreeTiers(lower, level, blocks, below, simulate_jointly(level, blocks, below))


def plan_tiers(
    problem: Problem, lower: LowerTiers, policy: str = "auto", window_bytes: int | None = None
) -> ThreeTiers:
    """Plan both levels with `policy`. A schedule window is for the first one.

    Raises:
        InfeasibleError: a function alone exceeds the budget, or the policy finds no plan (PolicyInfeasibleError); or
            so for a copy and host memory (HostInfeasibleError).
        UnsteadyError: as in `second_level`.
        ValueError: there is no such policy, or the window is not positive.
    """
    if policy != "auto":
        whole = replace(problem, moves_whole=True)
        return run_tiers(whole, make_plan(whole, policy, window_bytes), lower, policy)
    goal = _CLOSE * lower.bound(problem, planning_cuts(problem))
    found: list[ThreeTiers] = []
    failed: Exception | None = None
    for variant, plan in _first_plans(problem, window_bytes):
        try:
            found.append(run_tiers(variant, plan, lower, policy))
        except (HostInfeasibleError, UnsteadyError) as error:
            failed = failed or error
            continue
        if found[-1].seconds <= goal:
            break
    if not found and failed is not None:
        raise failed
    return min(found, key=lambda tiers: tiers.seconds)


def exclusive(problem: Problem) -> Problem:
    """The problem if the host gives up its copy of whatever a function uses, as it does where a function writes."""
    return replace(problem, use_flags=problem.use_flags | np.uint8(WRITE))


def _first_plans(problem: Problem, window_bytes: int | None) -> Iterator[tuple[Problem, Plan]]:
    """Plans for the first level, each with the problem that it is for."""
    yield problem, make_plan(problem, "auto", window_bytes)
    if window_bytes is None and not problem.fits:
        problem = replace(problem, moves_whole=True)  # the plan above is for a host that has room for all of it
        apart = exclusive(problem)
        clean_first, longest_first = _LEAST
        for variant, way in ((problem, clean_first), (apart, clean_first), (problem, longest_first)):
            yield variant, plan_in(variant, way)
