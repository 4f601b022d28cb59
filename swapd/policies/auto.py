"""The auto policy: plan in several ways, simulate each, keep the fastest.

Candidates are the idle policy and the schedule-window policy with several windows. Of plans within half a percent of
the fastest, the one that moves the fewest bytes is kept: what the simulator does not know makes transfers dearer.
"""

from __future__ import annotations

from swapd.plan import Plan
from swapd.policies.idle import idle
from swapd.policies.window import window, windows
from swapd.problem import Problem
from swapd.simulator import simulate

_TOLERANCE = 1.005


def auto(problem: Problem, window_bytes: int | None = None) -> Plan:
    """The best of the candidates; a given `window_bytes` is the only window tried.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="auto")
    plans = [idle(problem)]
    plans += [window(problem, size) for size in (windows(problem) if window_bytes is None else [window_bytes])]
    results = [(plan, simulate(problem, plan)) for plan in plans]
    limit = _TOLERANCE * min(timeline.seconds for _, timeline in results)
    return min(
        (result for result in results if result[1].seconds <= limit),
        key=lambda result: result[1].out_bytes + result[1].in_bytes,
    )[0]
