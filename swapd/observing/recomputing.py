"""Ways to choose what is computed again instead of moved, on one trace and side by side with the policies.

``recompute`` is ours (`swapd.recompute.choice`), ``swap_then_recompute`` and ``checkpointed`` are published ones
(`swapd.recompute.published`); of the numbers of segments that `checkpointed` takes, the fastest counts. What they do
not drop is swapped as policy `auto` plans it. All are given the same functions that may run again, normalisations by
batch among them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swapd.observing.analysis import Outcome, Recomputed, run_plan
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.recompute.bound import recompute_bound
from swapd.recompute.candidates import Drop, find_candidates
from swapd.recompute.choice import SEGMENTS, choose
from swapd.recompute.history import History
from swapd.recompute.published import checkpointed, swap_then_recompute
from swapd.recompute.rewriting import Rewritten, rewrite
from swapd.recompute.schedule import runs_again
from swapd.trace.trace import Trace

OURS, CAPUCHIN, CHECKPOINTED = "recompute", "swap_then_recompute", "checkpointed"
RECOMPUTING = (OURS, CAPUCHIN, CHECKPOINTED)

MakeProblem = Callable[[Trace], Problem]


def like(problem: Problem) -> MakeProblem:
    """Makes the problem of another trace on the machine and in the budget of this one."""

    def make(trace: Trace) -> Problem:
        return Problem.from_trace(
            trace,
            problem.budget_bytes,
            chunk_bytes=problem.chunk_bytes,
            slab_chunks_peak=problem.slab_chunks,
            machine=problem.machine,
        )

    return make


def run_recomputing(problem: Problem, way: str, trace: Trace) -> Outcome:
    """Choose with one of `RECOMPUTING`, plan what is left, and simulate the iteration.

    Args:
        problem: of `trace`.
        way: who chooses.
        trace: one iteration of a program that drops nothing yet; of one that does, nothing more is dropped.

    Raises:
        InfeasibleError: a function alone needs more than the budget.
    """
    problem.require_feasible()
    began, make_problem = time.perf_counter(), like(problem)
    if way == OURS and not runs_again(trace):
        choice = choose(trace, make_problem, without_statistics=True)
        plan, rewritten = choice.plan, choice.rewritten
    elif runs_again(trace):
        plan, rewritten = make_plan(problem), None
    else:
        plan, rewritten = _published(problem, way, trace)
    spent = time.perf_counter() - began
    history = History.beside(problem, trace)
    recomputed = Recomputed(
        compute_seconds=problem.compute_seconds,
        bound_seconds=recompute_bound(
            problem, history, [] if runs_again(trace) else find_candidates(history, final=True)
        ),
        repeat_seconds=rewritten.repeated_seconds if rewritten is not None else 0.0,
        drop_count=rewritten.drop_count if rewritten is not None else 0,
    )
    left = make_problem(rewritten.trace) if rewritten is not None else problem
    return run_plan(left, plan, way, spent, recomputed=recomputed)


def _published(problem: Problem, way: str, trace: Trace) -> tuple[Plan, Rewritten]:
    history = History(trace, without_statistics=True)
    over = problem.live > problem.capacity_chunks
    found = find_candidates(history, least_bytes=problem.chunk_bytes, during=over)
    sets = [swap_then_recompute(problem, found)]
    if way == CHECKPOINTED:
        sets = [checkpointed(problem, found, segments) for segments in SEGMENTS]
    tried = [_planned(problem, history, drops) for drops in sets]
    refusals = [result for result in tried if isinstance(result, InfeasibleError)]
    if len(refusals) == len(tried):
        raise refusals[0]
    made = [result for result in tried if not isinstance(result, InfeasibleError)]
    return min(made, key=lambda result: result[0].predicted_seconds or 0.0)


def _planned(problem: Problem, history: History, drops: list[Drop]) -> tuple[Plan, Rewritten] | InfeasibleError:
    rewritten = rewrite(history, drops)
    try:
        return make_plan(like(problem)(rewritten.trace)), rewritten
    except InfeasibleError as error:
        return error
