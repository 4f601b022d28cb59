"""Comparison: many policies on one trace, over several budgets, or on several traces, on equal terms.

Every figure is from a simulation of the steady state (`analysis.py`). A policy that cannot run in a budget keeps its
row, which says why in the policy's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swapd.observing.analysis import DEMAND, IN_CORE, Outcome, fit_bytes, run_policy, with_budget
from swapd.planning.lower_bound import lower_bound
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import available

PRECISION = 128  # a policy's smallest budget is found to this part of the budget in which everything fits

Report = Callable[[str, int, int], None]  # text, done, total


@dataclass(frozen=True)
class Row:
    """One policy in one budget: its outcome, or why it cannot run."""

    policy: str
    outcome: Outcome | None
    why: str = ""
    least_bytes: int = 0  # the smallest budget in which the policy can run; 0 if it does not say

    @property
    def seconds(self) -> float | None:
        """The seconds of a step, or None if the policy cannot run."""
        return None if self.outcome is None else self.outcome.timeline.seconds


def arms() -> tuple[str, ...]:
    """All names that can be compared: in-core, demand mode, and every policy."""
    return (IN_CORE, DEMAND, *available())


def compare(problem: Problem, policies: Sequence[str], report: Report) -> list[Row]:
    """A row for each of the policies."""
    rows = []
    for done, policy in enumerate(policies):
        report(policy, done, len(policies))
        rows.append(row_of(problem, policy))
    return rows


def row_of(problem: Problem, policy: str) -> Row:
    """One policy on one problem. In-core is simulated in any budget; `needs_more` says whether that is too small."""
    try:
        return Row(policy, run_policy(problem, policy))
    except InfeasibleError as error:
        return Row(policy, None, str(error), error.min_budget_bytes)


def needs_more(problem: Problem, policy: str) -> bool:
    """Whether this is the in-core arm in a budget in which the program does not fit."""
    return policy == IN_CORE and not problem.fits


@dataclass(frozen=True)
class BudgetSweep:
    """Seconds of a step by policy and budget; None if the policy cannot run."""

    budgets: tuple[int, ...]
    lower_bounds: tuple[float | None, ...]  # seconds
    seconds: dict[str, tuple[float | None, ...]]
    smallest: dict[str, int | None]  # bytes of the smallest budget that works; None if none was found
    compute_seconds: float


def sweep_budgets(problem: Problem, budgets: Sequence[int], policies: Sequence[str], report: Report) -> BudgetSweep:
    """Every policy in every budget, and the smallest budget in which each policy works."""
    total, done = len(policies) * (len(budgets) + 1), 0
    seconds: dict[str, tuple[float | None, ...]] = {}
    smallest: dict[str, int | None] = {}
    problems = [with_budget(problem, budget) for budget in budgets]
    for policy in policies:
        found = []
        for other in problems:
            report(policy, done, total)
            done += 1
            found.append(None if needs_more(other, policy) else row_of(other, policy).seconds)
        report(f"{policy}: smallest budget", done, total)
        done += 1
        seconds[policy], smallest[policy] = tuple(found), smallest_budget(problem, policy)
    bounds = tuple(_lower(other) for other in problems)
    return BudgetSweep(tuple(budgets), bounds, seconds, smallest, problem.compute_seconds)


def _lower(problem: Problem) -> float | None:
    feasible = problem.min_budget_bytes <= problem.budget_bytes
    return lower_bound(problem) if feasible else None


def smallest_budget(problem: Problem, policy: str) -> int | None:
    """The smallest budget in which `policy` works, by bisection, to 1/128 of the budget in which everything fits.

    A policy that finds a plan in one budget is taken to find one in every larger budget. Returns None if the policy
    does not work even in twice the budget in which everything fits.
    """
    most, least = fit_bytes(problem), problem.min_budget_bytes
    if policy == IN_CORE:
        return most

    def works(budget: int) -> bool:
        return row_of(with_budget(problem, budget), policy).outcome is not None

    if works(least):
        return least
    if not works(most):
        least, most = most, 2 * most
        if not works(most):
            return None
    chunk = problem.chunk_bytes
    while most - least > max(chunk, most // PRECISION):
        middle = (least + most) // 2 // chunk * chunk
        if not least < middle < most:
            break
        least, most = (least, middle) if works(middle) else (middle, most)
    return most


@dataclass(frozen=True)
class TraceSweep:
    """The share of the in-core throughput that each policy keeps, by policy and trace."""

    names: tuple[str, ...]
    problems: tuple[Problem, ...]
    bounds: tuple[float | None, ...]  # the most that can be kept
    kept: dict[str, tuple[float | None, ...]]
    seconds: dict[str, tuple[float | None, ...]]
    largest: dict[str, str | None]  # the trace with the highest live peak that the policy can run


def sweep_traces(problems: dict[str, Problem], policies: Sequence[str], report: Report) -> TraceSweep:
    """Every policy on every trace; `problems` by name."""
    total, done = len(policies) * len(problems), 0
    kept: dict[str, tuple[float | None, ...]] = {}
    seconds: dict[str, tuple[float | None, ...]] = {}
    largest: dict[str, str | None] = {}
    by_size = sorted(problems, key=lambda name: problems[name].live_peak_chunks * problems[name].chunk_bytes)
    for policy in policies:
        found: dict[str, float | None] = {}
        for name, problem in problems.items():
            report(f"{policy} on {name}", done, total)
            done += 1
            found[name] = None if needs_more(problem, policy) else row_of(problem, policy).seconds
        seconds[policy] = tuple(found.values())
        kept[policy] = tuple(_kept(problem, found[name]) for name, problem in problems.items())
        largest[policy] = next((name for name in reversed(by_size) if found[name] is not None), None)
    bounds = tuple(_kept(problem, _lower(problem)) for problem in problems.values())
    return TraceSweep(tuple(problems), tuple(problems.values()), bounds, kept, seconds, largest)


def _kept(problem: Problem, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return problem.compute_seconds / seconds if seconds > 0 else 1.0


def facts_of_rows(problem: Problem, rows: Sequence[Row]) -> dict[str, Any]:
    """The keys of ``swapd compare --json`` for one trace and one budget."""
    return {
        "budget_bytes": problem.budget_bytes,
        "min_budget_bytes": problem.min_budget_bytes,
        "fit_budget_bytes": fit_bytes(problem),
        "live_peak_bytes": problem.live_peak_chunks * problem.chunk_bytes,
        "compute_seconds": problem.compute_seconds,
        "policies": [
            {"policy": row.policy, "can_run": False, "why": row.why, "least_budget_bytes": row.least_bytes or None}
            if row.outcome is None
            else {"can_run": not needs_more(problem, row.policy), "why": "", **row.outcome.facts()}
            for row in rows
        ],
    }
