"""What holds for every program: plans of all policies are sound, nothing beats the lower bound, defects are named."""

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")

from hypothesis import assume, event, find, given
from hypothesis import strategies as st
from program_strategies import CHUNK, examples, problems, traces

from benchmarks.planning.validator import Fault, validate
from swapd.planning.lower_bound import lower_bound
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.planning.violations import Misfit
from swapd.policies import available, get
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Trace

WINDOWS = st.none() | st.integers(1, 17).map(lambda chunks: chunks * CHUNK)


@pytest.mark.parametrize("policy", available())
@pytest.mark.medium
def test_every_plan_is_sound(policy: str) -> None:
    @examples(60)
    @given(problems(), WINDOWS)
    def check(problem: Problem, window: int | None) -> None:
        plan = plan_or_refusal(problem, policy, window)
        if plan is None:
            return
        assert validate(problem, plan) == []
        timeline = simulate(problem, plan, 3)
        assert (timeline.demand_in_count, timeline.demand_out_count) == (0, 0)
        assert timeline.peak_chunks <= problem.capacity_chunks
        assert timeline.seconds >= problem.compute_seconds * (1 - 1e-9)
        assert lower_bound(problem) <= slowest(problem, plan) * (1 + 1e-9)

    check()


def plan_or_refusal(problem: Problem, policy: str, window: int | None) -> Plan | None:
    """The plan; None where the policy refuses for reasons of its own, as every function by itself fits."""
    kind: type[Exception] = InfeasibleError
    try:
        plan = get(policy)(problem, window)
    except InfeasibleError as error:
        kind = type(error)
    else:
        event("planned" if plan else "empty")
        return plan
    event("refused")
    assert kind is not InfeasibleError, f"{policy} says that a function by itself does not fit"
    return None


def slowest(problem: Problem, plan: Plan) -> float:
    """Seconds of the slowest of some iterations: two in a row may differ for ever, and the bound is for their mean."""
    return max(simulate(problem, plan, count).seconds for count in (3, 4, 5, 6))


@examples(150)
@given(problems())
def test_demand_mode_ends_and_stays_in_memory(problem: Problem) -> None:
    timeline = simulate(problem, Plan(), 3)
    assert timeline.peak_chunks <= problem.capacity_chunks
    assert timeline.seconds == pytest.approx(timeline.compute_seconds + timeline.stall_seconds)
    if problem.fits and not (problem.previous < 0).any():
        assert timeline.out_bytes == timeline.in_bytes == 0


@examples(100)
@given(traces())
def test_a_trace_survives_its_file(trace: Trace) -> None:
    again = Trace.from_bytes(trace.to_bytes())
    assert again == trace and again.to_bytes() == trace.to_bytes()


def some_plan(problem: Problem) -> Plan:
    plan = get("idle")(problem, None)
    assume(plan.outs and plan.ins)
    assert validate(problem, plan) == []
    return plan


def _out(plan: Plan, index: int, **values: int) -> Plan:
    outs = list(plan.outs)
    outs[index] = outs[index]._replace(**values)
    return replace(plan, outs=tuple(outs))


def _in(plan: Plan, index: int, **values: int) -> Plan:
    ins = list(plan.ins)
    ins[index] = ins[index]._replace(**values)
    return replace(plan, ins=tuple(ins))


def _used(problem: Problem, move: In) -> bool:
    """Whether a function of this iteration uses what comes in."""
    uses = problem.uses.function[problem.uses.offsets[move.variable] : problem.uses.offsets[move.variable + 1]]
    return move.before_function < problem.functions and bool((uses > move.after_function).any())


def _left_before(plan: Plan, move: In) -> bool:
    """Whether chunks that come in have left earlier in the same iteration."""
    return any(out.variable == move.variable and out.after_function <= move.after_function
               and out.first_chunk < move.first_chunk + move.chunk_count
               and move.first_chunk < out.first_chunk + out.chunk_count for out in plan.outs)  # fmt: skip


def _repeat_out(plan: Plan, index: int) -> Plan:
    outs = (*plan.outs[: index + 1], *plan.outs[index:])
    ins = tuple(move._replace(after_outs=move.after_outs + (move.after_outs > index)) for move in plan.ins)
    return replace(plan, outs=outs, ins=ins)


OUT_DEFECTS = {
    "no such variable": (lambda p, plan, i: _out(plan, i, variable=p.variables), Misfit.UNKNOWN_VARIABLE),
    "too many chunks": (lambda p, plan, i: _out(plan, i, chunk_count=1 << 30), Misfit.BAD_CHUNK_RANGE),
    "no chunks": (lambda p, plan, i: _out(plan, i, chunk_count=0), Misfit.BAD_CHUNK_RANGE),
    "no such function": (lambda p, plan, i: _out(plan, i, after_function=p.functions), Misfit.BAD_FUNCTION),
    "twice": (lambda p, plan, i: _repeat_out(plan, i), Fault.OUT_OF_ABSENT),
}


@examples(60)
@given(problems(), st.integers(0, 99))
def test_each_defect_of_an_out_is_named(problem: Problem, index: int) -> None:
    plan = some_plan(problem)
    for defect, (plant, fault) in OUT_DEFECTS.items():
        assert fault in {v.fault for v in validate(problem, plant(problem, plan, index % len(plan.outs)))}, defect


IN_DEFECTS = {
    "waits for outs that there are not": (
        lambda p, plan, i: _in(plan, i, after_outs=len(plan.outs) + 1),
        lambda p, plan, move: True,
        Misfit.BAD_OUT_COUNT,
    ),
    "needed before it may start": (
        lambda p, plan, i: _in(plan, i, before_function=plan.ins[i].after_function),
        lambda p, plan, move: True,
        Misfit.BAD_FUNCTION,
    ),
    "lost": (
        lambda p, plan, i: replace(plan, ins=plan.ins[:i] + plan.ins[i + 1 :]),
        lambda p, plan, move: _used(p, move),
        Fault.USE_OF_ABSENT,
    ),
    "twice": (
        lambda p, plan, i: replace(plan, ins=(*plan.ins[: i + 1], *plan.ins[i:])),
        lambda p, plan, move: True,
        Fault.IN_OF_RESIDENT,
    ),
    "overtakes its out": (
        lambda p, plan, i: _in(plan, i, after_outs=0),
        lambda p, plan, move: _left_before(plan, move),
        Fault.IN_BEFORE_OUT,
    ),
    "says to be needed later": (
        lambda p, plan, i: _in(plan, i, before_function=p.functions),
        lambda p, plan, move: _used(p, move),
        Fault.IN_TOO_LATE,
    ),
}


@pytest.mark.medium
def test_each_defect_of_an_in_is_named() -> None:
    planted = Counter[str]()

    @examples(80)
    @given(problems(), st.integers(0, 99))
    def check(problem: Problem, first: int) -> None:
        plan = some_plan(problem)
        for defect, (plant, applies, fault) in IN_DEFECTS.items():
            for index in ((first + n) % len(plan.ins) for n in range(len(plan.ins))):
                if applies(problem, plan, plan.ins[index]):
                    assert fault in {v.fault for v in validate(problem, plant(problem, plan, index))}, defect
                    planted[defect] += 1
                    break

    check()
    assert all(planted[defect] >= 40 for defect in IN_DEFECTS), planted


@pytest.mark.slow
def test_programs_shrink_to_something_readable() -> None:
    """A policy that forgets its last in is caught with a program of a few functions."""

    def is_wrong(problem: Problem) -> bool:
        plan = get("idle")(problem, None)
        return bool(plan.ins) and validate(problem, replace(plan, ins=plan.ins[:-1])) != []

    smallest = find(problems(), is_wrong, settings=examples(2000))
    assert smallest.functions <= 4 and smallest.variables <= 8
    assert isinstance(get("idle")(smallest, None).outs[0], Out)
