"""Analysis: what a policy makes of a problem, in figures that commands show side by side.

Beside the policies there are two arms to measure them by: ``demand`` moves only what a function waits for, and
``in-core`` is the same program with enough memory. Names of functions come from trace files, so `printable` replaces
everything in them that a terminal might obey.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from swapd.planning.lower_bound import bound, lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import SimulationResult, simulate
from swapd.tiers.three_tiers import LowerTiers, ThreeTiers, plan_tiers, run_tiers

DEMAND, IN_CORE = "demand", "in-core"


@dataclass(frozen=True)
class Recomputed:
    """What an iteration computes again instead of moving it. The outcome's problem is of what is left to move."""

    compute_seconds: float  # without what is computed again
    bound_seconds: float  # that no plan of swapping and recomputing beats
    repeat_seconds: float
    drop_count: int


@dataclass(frozen=True)
class Outcome:
    """One policy on one problem, in the steady state. With a disk, the timeline is the first level's without it."""

    policy: str
    problem: Problem
    plan: Plan
    timeline: SimulationResult
    planning_seconds: float
    lower: LowerTiers | None = None  # what lies under the device, if that is not host memory for everything
    tiers: ThreeTiers | None = None  # both levels; None in-core, and without a disk
    recomputed: Recomputed | None = None

    @property
    def seconds(self) -> float:
        """The step's time."""
        return self.timeline.seconds if self.tiers is None else self.tiers.seconds

    def ratio(self, seconds: float) -> float | None:
        """The step's time over `seconds`, or None if `seconds` is 0."""
        return self.seconds / seconds if seconds > 0 else None

    def facts(self) -> dict[str, Any]:
        """All figures: times in seconds, sizes in bytes, and numbers of moves, whose keys end in `_count`."""
        problem, timeline, chunk = self.problem, self.timeline, self.problem.chunk_bytes
        again, two_phase = self.recomputed, bound(problem).seconds
        least = least_seconds(problem, self.lower) if again is None else again.bound_seconds
        in_core = problem.compute_seconds if again is None else again.compute_seconds
        return {
            "policy": self.policy,
            "window_bytes": self.plan.window_bytes,
            "seconds": self.seconds,
            "lower_bound_seconds": least,
            "two_phase_bound_seconds": two_phase,
            "ratio_to_lower_bound": self.ratio(least),
            "ratio_to_two_phase_bound": self.ratio(two_phase),
            "ratio_to_in_core": self.ratio(in_core),
            "stall_seconds": timeline.stall_seconds + self.seconds - timeline.seconds,
            "out_bytes": timeline.out_bytes,
            "in_bytes": timeline.in_bytes,
            "dropped_bytes": timeline.dropped_bytes,
            "write_back_bytes": timeline.write_back_bytes,
            "planned_out_count": len(self.plan.outs),
            "planned_in_count": len(self.plan.ins),
            "demand_in_count": timeline.demand_in_count,
            "demand_out_count": timeline.demand_out_count,
            "peak_bytes": (timeline.peak_chunks + problem.slab_chunks) * chunk,
            "average_bytes": (timeline.average_chunks + problem.slab_chunks) * chunk,
            "planning_seconds": self.planning_seconds,
            **({} if self.tiers is None else tier_facts(self.tiers)),
            **({} if again is None else {"repeat_seconds": again.repeat_seconds, "drop_count": again.drop_count}),
        }


def tier_facts(tiers: ThreeTiers) -> dict[str, Any]:
    """What host memory and the disk under it have to do with a step, and how long it waits for which link."""
    disk, second = tiers.lower.disk, tiers.result.second
    return {
        "host_budget_bytes": tiers.lower.host_budget_bytes,
        "host_peak_bytes": tiers.host_peak_bytes,
        "disk_write_bytes_per_second": disk.out_bytes_per_second,
        "disk_read_bytes_per_second": disk.in_bytes_per_second,
        "disk_write_bytes": second.out_bytes,
        "disk_read_bytes": second.in_bytes,
        "link_stall_seconds": tiers.link_stall_seconds,
        "disk_stall_seconds": tiers.disk_stall_seconds,
    }


def least_seconds(problem: Problem, lower: LowerTiers | None = None) -> float:
    """The seconds that no policy beats."""
    return lower_bound(problem) if lower is None else lower.bound(problem)


def run_policy(
    problem: Problem, policy: str, window_bytes: int | None = None, lower: LowerTiers | None = None
) -> Outcome:
    """Plan with `policy`, or take one of the two arms, and simulate the iteration. In-core needs no lower tiers.

    Raises:
        InfeasibleError: the policy cannot run in the budget.
        UnsteadyError: with `lower`, the first level's iterations differ.
        ValueError: there is no such policy, or the window is not positive.
    """
    if policy == IN_CORE:
        return Outcome(policy, problem, Plan(policy=policy), simulate(_in_core(problem), Plan()), 0.0, lower)
    if policy == DEMAND:
        return run_plan(problem, Plan(policy=policy), policy, lower=lower)
    problem.require_feasible()
    started = time.perf_counter()
    if lower is not None:
        tiers = plan_tiers(problem, lower, policy, window_bytes)
        spent = time.perf_counter() - started
        return Outcome(policy, problem, tiers.level.plan, tiers.level.timeline, spent, lower, tiers)
    plan = make_plan(problem, policy, window_bytes)
    return run_plan(problem, plan, policy, time.perf_counter() - started)


def run_plan(
    problem: Problem,
    plan: Plan,
    policy: str,
    planning_seconds: float = 0.0,
    lower: LowerTiers | None = None,
    recomputed: Recomputed | None = None,
) -> Outcome:
    """Simulate a given plan; over a disk the second level is planned by `auto`, in demand mode not at all.

    Raises:
        InfeasibleError: the plan cannot run in the budget.
        UnsteadyError: with `lower`, the plan does not do the same in every iteration.
    """
    if lower is not None:
        tiers = run_tiers(problem, plan, lower, None if policy == DEMAND else "auto")
        return Outcome(policy, problem, plan, tiers.level.timeline, planning_seconds, lower, tiers)
    return Outcome(policy, problem, plan, simulate(problem, plan), planning_seconds, recomputed=recomputed)


def _in_core(problem: Problem) -> Problem:
    """The problem with so much memory that nothing ever waits for it."""
    return replace(problem, capacity_chunks=max(problem.capacity_chunks, int(problem.chunks.sum())))


def problem_facts(problem: Problem) -> dict[str, Any]:
    """What every command says of a trace, whatever the budget (docs/figures.md)."""
    return {
        "chunk_bytes": problem.chunk_bytes,
        "min_budget_bytes": problem.min_budget_bytes,
        "fit_budget_bytes": problem.fit_budget_bytes,
        "compute_seconds": problem.compute_seconds,
    }


def with_budget(problem: Problem, budget_bytes: int) -> Problem:
    """The same problem in another budget."""
    capacity = budget_bytes // problem.chunk_bytes - problem.slab_chunks
    return replace(problem, budget_bytes=budget_bytes, capacity_chunks=capacity)


def stalls_by_function(outcome: Outcome, most: int) -> list[dict[str, Any]]:
    """The functions that wait longest: {function, name, seconds, share of the step}."""
    names, rows = outcome.problem.names, sorted(outcome.timeline.stall_by_function.items(), key=lambda row: -row[1])
    return [
        {"function": f, "name": printable(names[f]), "seconds": seconds, "share": _share(outcome, seconds)}
        for f, seconds in rows[:most]
    ]


def stalls_by_variable(outcome: Outcome, most: int) -> list[dict[str, Any]]:
    """The variables that are waited for longest. Variable -1, without bytes, is room for what a function allocates."""
    rows = sorted(outcome.timeline.stall_by_variable.items(), key=lambda row: -row[1])
    return [
        {
            "variable": v,
            "label": outcome.problem.label(v) if v >= 0 else "room",
            "bytes": int(outcome.problem.variable_bytes[v]) if v >= 0 else None,
            "allocated_by": allocated_by(outcome.problem, v) if v >= 0 else None,
            "seconds": seconds,
            "share": _share(outcome, seconds),
        }
        for v, seconds in rows[:most]
    ]


def allocated_by(problem: Problem, v: int) -> str:
    """A text that names the function that allocated variable v, in this iteration or in the one before."""
    n = problem.functions
    before, when = int(problem.previous[v]), int(problem.born[v])
    if when == -1 and 0 <= before != v:
        when, where = int(problem.born[before]), " of the iteration before"
    else:
        where = ""
    if 0 <= when < n:
        return f"{printable(problem.names[when])} (function {when}{where})"
    if when == n:
        return "allocated after the last function"
    rows = problem.uses.function[problem.uses.offsets[v] : problem.uses.offsets[v + 1]]
    first = f", first used by {printable(problem.names[int(rows[0])])}" if len(rows) else ""
    return ("lives across iterations" if before >= 0 else "there before the iteration") + first


def printable(name: str, most: int = 60) -> str:
    """`name` in one line of at most `most` characters that no terminal obeys."""
    text = "".join(c if c.isprintable() else "?" for c in name[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."


def _share(outcome: Outcome, seconds: float) -> float:
    return seconds / outcome.seconds if outcome.seconds > 0 else 0.0
