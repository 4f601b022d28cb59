"""The schedule window without virtual addresses: the seed paper's "Schedule" next to its "Schedule + VA" (section 5).

The paper gives the schedule a smaller budget than the memory has (figure 3: 8 of 16 GB at batch 928), as fragmentation
takes the rest; `best_fit` finds how much smaller.
"""

from __future__ import annotations

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.published.best_fit import plan_fragmented
from swapd.policies.window import window, windows

WINDOW_SHARES = (1 / 2, 1.0)  # of the schedule's budget: the windows tried when none is given


def window_best_fit(problem: Problem, window_bytes: int | None = None) -> Plan:
    """Plan with a schedule window of `window_bytes`; if it is None, with the better one of `WINDOW_SHARES`.

    Raises:
        InfeasibleError: a function alone needs more than the capacity, or (PolicyInfeasibleError) no schedule's
            allocations fit into the memory.
        ValueError: the window is not positive.
    """
    problem.require_feasible()
    if window_bytes is not None and window_bytes <= 0:
        raise ValueError(f"the schedule window must be positive, not {window_bytes}")

    def plans_for(scheduled: Problem) -> list[Plan]:
        sizes = windows(scheduled, WINDOW_SHARES) if window_bytes is None else [window_bytes]
        return [window(scheduled, size, whole=True) for size in sizes]

    return plan_fragmented(problem, "window_best_fit", plans_for)
