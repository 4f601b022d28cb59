"""Fragmented: a policy whose variables live in a caching best-fit allocator, without virtual addresses.

A plan that fits by its bytes can then fail for want of a block that is large enough. So a plan is made for less memory
than there is: the most, in steps of a sixteenth, with which the allocations of three iterations all succeed
(`swapd.policies.published.best_fit.Replay`). Plans move whole variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from swapd.planning.plan import Plan
from swapd.planning.problem import PolicyInfeasibleError, Problem
from swapd.policies.published.best_fit import Replay
from swapd.simulation.simulator import simulate

STEPS = 16


def plan_fragmented(problem: Problem, policy: str, plans_for: Callable[[Problem], Iterable[Plan]]) -> tuple[Plan, int]:
    """Find the most memory for which a plan works. Returns the fastest plan for it, and that memory in chunks.

    `plans_for` makes plans for a problem with less memory; the search ends where it raises PolicyInfeasibleError.

    Raises:
        PolicyInfeasibleError: no plan works.
    """
    memory = problem.capacity_chunks * problem.chunk_bytes  # without the slabs, in which small allocations are
    if problem.fits and Replay(problem, Plan(), memory).failed_function < 0:
        return Plan(policy=policy), problem.capacity_chunks
    failed: tuple[int, int] | None = None  # of the first failure: the function, and the bytes that it would need
    for step in range(STEPS, 0, -1):
        scheduled = replace(problem, capacity_chunks=problem.capacity_chunks * step // STEPS)
        if scheduled.capacity_chunks < int(problem.pinned.max(initial=0)):
            break
        works = []
        try:
            for plan in plans_for(scheduled):
                result = Replay(scheduled, plan, memory)
                if result.failed_function < 0:
                    works.append(plan)
                elif failed is None:
                    need = problem.budget_bytes - result.free_bytes + result.requested_bytes
                    failed = result.failed_function, need
        except PolicyInfeasibleError as error:
            failed = failed or (error.function, error.need_bytes)
            break
        if works:
            best = min(works, key=lambda plan: simulate(scheduled, plan).seconds)
            return replace(best, policy=policy), scheduled.capacity_chunks
    function, need = failed or (int(problem.pinned.argmax()), problem.min_budget_bytes)
    raise PolicyInfeasibleError(policy, function, problem.names[function], need, problem.budget_bytes, 0)
