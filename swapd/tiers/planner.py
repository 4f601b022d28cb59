"""The second level of a run: what its planner asks about host memory with a disk below it."""

from __future__ import annotations

import logging
from dataclasses import replace

from ooc_alloc import Core
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.tiers.first_level import UnsteadyError
from swapd.tiers.moves import BlockMoves, shifts_of
from swapd.tiers.three_tiers import (
    DISK_LATENCY_SECONDS,
    HostInfeasibleError,
    LowerTiers,
    exclusive,
    plan_tiers,
    run_tiers,
)
from swapd.trace.trace import Machine, Trace

log = logging.getLogger("ooc.swapd")

DISK_UNKNOWN = Machine(1e9, 1e9, DISK_LATENCY_SECONDS)  # until enough was moved to measure it
_ENOUGH_BYTES = 64 << 20  # moved one way before the speed counts


class TierPlanner:
    """Plans both levels for a core whose host memory has a disk below it; `expected` is the disk's speed at first."""

    def __init__(self, core: Core, expected: Machine) -> None:
        self.core, self.expected = core, expected

    def lower(self) -> LowerTiers:
        """What lies under the device, with the speeds that the disk has shown so far."""
        stats = self.core.stats()

        def speed(moved: float, busy: float, expected: float) -> float:
            return moved / busy if moved >= _ENOUGH_BYTES and busy > 0 else expected

        known = self.expected
        disk = Machine(
            speed(stats["disk_written_bytes"], stats["disk_write_seconds"], known.out_bytes_per_second),
            speed(stats["disk_read_bytes"], stats["disk_read_seconds"], known.in_bytes_per_second),
        )
        return LowerTiers(int(stats["host_budget_bytes"]), replace(disk, latency_seconds=known.latency_seconds))

    def plan(
        self, problem: Problem, trace: Trace, policy: str, window_bytes: int | None
    ) -> tuple[Plan, BlockMoves]:
        """The first level's plan, and the moves of the second one.

        Where no plan is found for the second level, its blocks move on demand. Raises InfeasibleError for the first.
        """
        try:
            tiers = plan_tiers(problem, self.lower(), policy, window_bytes)
        except (HostInfeasibleError, UnsteadyError) as error:
            log.info("no plan for host memory and the disk: %s", error)
            return make_plan(problem, policy=policy, window_bytes=window_bytes), BlockMoves()
        bound = tiers.lower.bound(problem)
        plan = replace(tiers.level.plan, predicted_seconds=tiers.seconds, bound_seconds=bound)
        downs, ups = shifts_of(tiers.plan, tiers.level, tiers.blocks, trace)
        return plan, BlockMoves(downs, ups, tiers.is_exclusive)

    def predicted_seconds(self, problem: Problem, plan: Plan, moves: BlockMoves) -> float | None:
        """A step's time under the plan with the functions' times of `problem`; None if it cannot be told."""
        try:
            return run_tiers(exclusive(problem) if moves.exclusive else problem, plan, self.lower(), "auto").seconds
        except (HostInfeasibleError, UnsteadyError):
            return None
