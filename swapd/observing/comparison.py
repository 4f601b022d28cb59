"""Comparison: many policies on one trace, over several budgets, or on several traces, on equal terms.

Every figure is from a simulation of the steady state (`analysis.py`). A policy that cannot run in a budget keeps its
row, which says why in the policy's own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from swapd.observing.advice import Report
from swapd.observing.analysis import DEMAND, IN_CORE, Outcome, least_seconds, run_policy, with_budget
from swapd.observing.recomputing import RECOMPUTING, run_recomputing
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import available
from swapd.tiers.first_level import UnsteadyError
from swapd.tiers.three_tiers import HostInfeasibleError, LowerTiers
from swapd.trace.trace import Trace

Refusal = InfeasibleError | UnsteadyError
Seconds = list[float | None]  # of a step on several problems; None where nothing can run
PRECISION = 128  # a policy's smallest budget is found to this part of the budget in which everything fits


class Subject(NamedTuple):
    """A problem that policies are compared on, and the trace that it is of."""

    name: str
    problem: Problem
    trace: Trace


def arms() -> tuple[str, ...]:
    """All names that can be compared: in-core, demand mode, every policy, and ways to choose what is recomputed."""
    return (IN_CORE, DEMAND, *available(), *RECOMPUTING)


def attempt(
    problem: Problem, policy: str, lower: LowerTiers | None = None, trace: Trace | None = None
) -> Outcome | Refusal:
    """One policy on one problem; what is recomputed is chosen from the `trace`, without a disk under host memory.

    In-core is simulated in any budget; `needs_more` says whether that is too small.
    """
    try:
        if policy in RECOMPUTING and trace is not None and lower is None:
            return run_recomputing(problem, policy, trace)
        return run_policy(problem, policy, lower=lower)
    except (InfeasibleError, UnsteadyError) as error:
        return error


def needs_more(problem: Problem, policy: str) -> bool:
    """Whether this is the in-core arm in a budget in which the program does not fit."""
    return policy == IN_CORE and not problem.fits


def policy_facts(subject: Subject, policy: str, lower: LowerTiers | None = None) -> dict[str, Any]:
    """All figures of one policy on one problem, or why it cannot run."""
    problem = subject.problem
    found = attempt(problem, policy, lower, subject.trace)
    if isinstance(found, Outcome):
        facts = found.facts()
        demand = facts["demand_in_count"] + facts["demand_out_count"]
        return {"can_run": not needs_more(problem, policy), "why": "", **facts, "demand_count": demand}
    least = None
    if isinstance(found, InfeasibleError) and not isinstance(found, HostInfeasibleError):
        least = found.min_budget_bytes or None
    return {"policy": policy, "can_run": False, "why": str(found), "least_budget_bytes": least}


def sweep(
    subjects: Sequence[Subject], policies: Sequence[str], report: Report, lower: LowerTiers | None = None
) -> dict[str, Seconds]:
    """Seconds of a step of every policy on every problem."""
    seconds: dict[str, Seconds] = {}
    total = len(policies) * len(subjects)
    for policy in policies:
        found: Seconds = []
        for name, problem, trace in subjects:
            report(f"{policy} on {name}", len(seconds) * len(subjects) + len(found), total)
            outcome = None if needs_more(problem, policy) else attempt(problem, policy, lower, trace)
            found.append(outcome.seconds if isinstance(outcome, Outcome) else None)
        seconds[policy] = found
    return seconds


def lower_bounds(problems: Iterable[Problem], lower: LowerTiers | None = None) -> Seconds:
    """The seconds that no policy beats, on each problem."""
    return [least_seconds(p, lower) if p.min_budget_bytes <= p.budget_bytes else None for p in problems]


def smallest_budget(
    problem: Problem, policy: str, lower: LowerTiers | None = None, trace: Trace | None = None
) -> int | None:
    """The smallest budget in which `policy` works, by bisection, to 1/128 of the budget in which everything fits.

    A policy that finds a plan in one budget is taken to find one in every larger budget. Returns None if the policy
    does not work even in twice the budget in which everything fits.
    """
    most, least = problem.fit_budget_bytes, problem.min_budget_bytes
    if policy == IN_CORE:
        return most

    def works(budget: int) -> bool:
        return isinstance(attempt(with_budget(problem, budget), policy, lower, trace), Outcome)

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
