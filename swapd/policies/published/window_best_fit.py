"""The schedule window without virtual addresses: the seed paper's "Schedule" next to its "Schedule + VA" (section 5).

The paper gives the schedule a smaller budget than the memory has (figure 3: 8 of 16 GB at batch 928), as fragmentation
takes the rest; `fragmented` finds how much smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.published.fragmented import plan_fragmented
from swapd.policies.window import window_of_wholes

WINDOW_SHARES = (1 / 2, 1.0)  # of the schedule's budget: the windows tried when none is given


def window_best_fit(problem: Problem, window_bytes: int | None = None) -> Plan:
    """Plan with a schedule window of `window_bytes`; if it is None, with the better one of `WINDOW_SHARES`.

    Raises:
        InfeasibleError: a function alone needs more than the capacity, or (PolicyInfeasibleError) no schedule's
            allocations fit into the memory.
        ValueError: the window is not positive.
    """
    return schedule(problem, window_bytes)[0]


def schedule(problem: Problem, window_bytes: int | None = None) -> tuple[Plan, int]:
    """The plan, and the budget in chunks that it was made for. Raises what `window_best_fit` raises."""
    problem.require_feasible()
    if window_bytes is not None and window_bytes <= 0:
        raise ValueError(f"the schedule window must be positive, not {window_bytes}")

    def plans_for(scheduled: Problem) -> Iterator[Plan]:
        if window_bytes is not None:
            yield window_of_wholes(scheduled, window_bytes)
            return
        for share in WINDOW_SHARES:
            chunks = max(1, int(share * scheduled.capacity_chunks))
            yield window_of_wholes(scheduled, chunks * scheduled.chunk_bytes)

    return plan_fragmented(problem, "window_best_fit", plans_for)
