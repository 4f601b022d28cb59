"""The auto policy: plan in several ways, simulate each, keep the fastest.

Candidates are the idle policy and, unless that is within half a percent of the bound already or the problem is large,
the ledger of `nnabla` and the schedule-window policy with several windows. Of plans within half a percent of the
fastest, the one that moves the fewest bytes is kept: what the simulator does not know makes transfers dearer.
"""

from __future__ import annotations

from collections.abc import Iterator

from swapd.planning.lower_bound import quick_lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.idle import idle
from swapd.policies.published.nnabla import nnabla_within
from swapd.policies.window import window, windows
from swapd.simulation.simulator import simulate_once

_TOLERANCE = 1.005
MOST_FUNCTIONS = 1500  # of problems for which windows are tried: each window takes about 0.06 ms a function
MOST_OF_LEDGER = 4000  # functions of problems for which the ledger is tried: it takes a tenth of a window's time
_LEDGER_PASSES = 4  # at most, as some problems take a hundred; each takes about 10 us a function


def auto(problem: Problem, window_bytes: int | None = None) -> Plan:
    """The best of the candidates; a given `window_bytes` is the only window tried.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="auto")
    results = []
    for plan in _candidates(problem, window_bytes):
        results.append((plan, simulate_once(problem, plan)))
        if results[-1][1].seconds <= _TOLERANCE * quick_lower_bound(problem):
            break
    limit = _TOLERANCE * min(timeline.seconds for _, timeline in results)
    return min(
        (result for result in results if result[1].seconds <= limit),
        key=lambda result: result[1].out_bytes + result[1].in_bytes,
    )[0]


def _candidates(problem: Problem, window_bytes: int | None) -> Iterator[Plan]:
    yield idle(problem)
    if window_bytes is None and problem.functions <= MOST_OF_LEDGER:
        ledger = nnabla_within(problem, _LEDGER_PASSES)
        if ledger is not None:
            yield ledger
    if window_bytes is None and problem.functions > MOST_FUNCTIONS:
        return
    for size in windows(problem) if window_bytes is None else [window_bytes]:
        yield window(problem, size)
