"""What a run's planner asks for, and what it gets: functions of what was recorded, for whatever process runs them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.recompute.bound import recompute_bound
from swapd.recompute.candidates import find_candidates
from swapd.recompute.choice import choose
from swapd.recompute.history import History
from swapd.recompute.schedule import Schedule, runs_again, schedule_of
from swapd.simulation.simulator import simulate
from swapd.tiers.first_level import UnsteadyError
from swapd.tiers.moves import BlockMoves, shifts_of
from swapd.tiers.three_tiers import HostInfeasibleError, LowerTiers, exclusive, plan_tiers, run_tiers
from swapd.trace.ranged import RangedTrace, plan_in_parts, recorded_plan
from swapd.trace.trace import Trace

log = logging.getLogger("ooc.swapd")


@dataclass(frozen=True, eq=False)
class Request:
    """A plan is wanted for what was recorded, or, `under` a plan, the seconds that a step takes with its times.

    With `recompute` it is also wanted what to drop, so that a step is faster than under that plan.
    """

    recorded: RangedTrace
    budget_bytes: int
    policy: str
    window_bytes: int | None
    lower: LowerTiers | None = None  # what lies under the device, where there are three tiers
    under: Made | None = None
    recompute: bool = False


@dataclass(frozen=True, eq=False)
class Made:
    """A plan, in both numberings, and the moves below it."""

    plan: Plan  # of the trace, in which parts of variables are variables
    known: Plan  # the same one, with the core's numbers
    moves: BlockMoves  # below the device's own

    def columns(self) -> list[list[NDArray[Any]]]:
        """Outs, ins and write-backs, as `Core.install_plan` takes them."""
        arrays = self.known.to_arrays()
        return [[array for name, array in arrays.items() if name.startswith(kind)] for kind in ("out_", "in_", "back_")]


@dataclass(frozen=True, eq=False)
class Answer:
    """What a request came to."""

    spent_seconds: float
    made: Made | None = None
    predicted_seconds: float | None = None  # if a plan was given; None if it cannot be told
    failure: str = ""  # why there is no plan
    schedule: Schedule | None = None  # of drops, if they were asked for and make a step faster
    recompute_bound_seconds: float | None = None  # with a schedule: a step that no plan of swapping and drops beats


def answer(request: Request) -> Answer:
    """Plans or predicts."""
    began = time.perf_counter()
    trace = request.recorded.cut()
    problem = Problem.from_trace(trace, request.budget_bytes).within_slabs()
    if request.under is not None:  # its parts may have had other numbers: those without bytes have none
        under = replace(request.under, plan=plan_in_parts(request.under.known, trace))
        seconds = step_seconds(problem, under, request.lower)
        alone = replace(under.plan, predicted_seconds=seconds)
        schedule, bound = _drops(request, trace, alone) if request.recompute else (None, None)
        spent = time.perf_counter() - began
        return Answer(spent, predicted_seconds=seconds, schedule=schedule, recompute_bound_seconds=bound)
    try:
        made = _plan(request, problem, trace)
    except InfeasibleError as error:
        return Answer(time.perf_counter() - began, failure=str(error))
    return Answer(time.perf_counter() - began, made)


def _drops(request: Request, trace: Trace, swap_only: Plan) -> tuple[Schedule | None, float | None]:
    """What to drop, and a step time that no plan of swapping and recomputing beats; None if nothing is gained.

    A sequence with drops in it is none to drop more from.
    """
    if runs_again(trace):
        return None, None

    def make_problem(trace: Trace) -> Problem:
        return Problem.from_trace(trace, request.budget_bytes).within_slabs()

    policy = partial(make_plan, policy=request.policy, window_bytes=request.window_bytes)
    choice = choose(trace, make_problem, swap_only=swap_only, plan=policy, without_statistics=True)
    if choice.rewritten is None:
        return None, None
    try:
        schedule = schedule_of(request.recorded.whole, trace, choice.rewritten)
    except ValueError as error:
        log.info("nothing is recomputed: %s", error)
        return None, None
    problem = make_problem(trace)
    history = History.beside(problem, trace)
    return schedule, recompute_bound(problem, history, find_candidates(history, final=True))


def _plan(request: Request, problem: Problem, trace: Trace) -> Made:
    """Where no plan is found for the second level, its blocks move on demand. Raises InfeasibleError for the first."""
    if request.lower is not None:
        try:
            tiers = plan_tiers(problem, request.lower, request.policy, request.window_bytes)
        except (HostInfeasibleError, UnsteadyError) as error:
            log.info("no plan for host memory and the disk: %s", error)
        else:
            bound = tiers.lower.bound(problem)
            plan = replace(tiers.level.plan, predicted_seconds=tiers.seconds, bound_seconds=bound)
            downs, ups = shifts_of(tiers.plan, tiers.level, tiers.blocks, trace)
            return Made(plan, recorded_plan(plan, trace), BlockMoves(downs, ups, tiers.is_exclusive))
    plan = make_plan(problem, policy=request.policy, window_bytes=request.window_bytes)
    return Made(plan, recorded_plan(plan, trace), BlockMoves())


def step_seconds(problem: Problem, made: Made, lower: LowerTiers | None) -> float | None:
    """A step's time under a plan with the functions' times of `problem`; None if it cannot be told."""
    if lower is None:
        return simulate(problem, made.plan).seconds
    try:
        return run_tiers(exclusive(problem) if made.moves.exclusive else problem, made.plan, lower, "auto").seconds
    except (HostInfeasibleError, UnsteadyError):
        return None
