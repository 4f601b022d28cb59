import random
from dataclasses import replace

import pytest
from planning_traces import Builder, random_trace

from benchmarks.planning.validator import Fault, validate
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.planning.violations import Misfit, Violation
from swapd.policies import get
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine

X, A, C, D = range(4)


def problem(capacity: int = 7) -> Problem:
    """A (4 chunks) is idle during functions 1 to 3, X (1 chunk) during 1 and 2; C and D take 4 each meanwhile."""
    b = Builder()
    assert b.entry(1) == X
    b.call("f0", [X], [4], seconds=1.0)
    b.call("f1", [], [4], seconds=1.0)
    b.free(C)
    b.call("f2", [], [4], seconds=1.0)
    b.free(D)
    b.call("f3", [X], seconds=1.0)
    b.call("f4", [A], seconds=1.0)
    b.free(A)
    return Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), capacity)


OUT = Out(A, 0, 4, 0)
IN = In(A, 0, 4, 2, 1, 4)
SOUND = Plan((OUT,), (IN,))


def faults(outs: tuple[Out, ...] = (OUT,), ins: tuple[In, ...] = (IN,), capacity: int = 7) -> set[Fault]:
    return {violation.fault for violation in validate(problem(capacity), Plan(outs, ins))}


def test_a_sound_plan_has_no_violation():
    assert faults() == set()
    assert faults((Out(A, 2, 2, 0),), (In(A, 2, 2, 2, 1, 4),)) == set()
    assert faults((Out(A, 0, 2, 0), Out(A, 2, 2, 1)), (In(A, 0, 4, 2, 2, 4),), capacity=9) == set()
    assert faults((), (), capacity=9) == set()


PLANTED = {
    "no such variable": ((Out(4, 0, 1, 0),), (), Misfit.UNKNOWN_VARIABLE),
    "negative variable": ((OUT,), (IN._replace(variable=-1),), Misfit.UNKNOWN_VARIABLE),
    "too many chunks": ((OUT._replace(chunk_count=5),), (IN,), Misfit.BAD_CHUNK_RANGE),
    "no chunks": ((OUT._replace(chunk_count=0),), (IN,), Misfit.BAD_CHUNK_RANGE),
    "negative chunk": ((OUT,), (IN._replace(first_chunk=-1),), Misfit.BAD_CHUNK_RANGE),
    "no such function": ((OUT._replace(after_function=5),), (IN,), Misfit.BAD_FUNCTION),
    "before the start": ((OUT._replace(after_function=-2),), (IN,), Misfit.BAD_FUNCTION),
    "needed before it may start": ((OUT,), (IN._replace(before_function=2),), Misfit.BAD_FUNCTION),
    "needed after the end": ((OUT,), (IN._replace(before_function=6),), Misfit.BAD_FUNCTION),
    "too many outs": ((OUT,), (IN._replace(after_outs=2),), Misfit.BAD_OUT_COUNT),
    "negative outs": ((OUT,), (IN._replace(after_outs=-1),), Misfit.BAD_OUT_COUNT),
    "dead already": ((OUT, Out(C, 0, 4, 1)), (IN,), Fault.NOT_LIVE),
    "not born yet": ((Out(D, 0, 1, 1), OUT), (IN._replace(after_outs=2),), Fault.NOT_LIVE),
    "in of the dead": ((OUT,), (IN, In(C, 0, 1, 3, 1, 4)), Fault.NOT_LIVE),
    "used next": ((OUT, Out(A, 0, 4, 3)), (IN,), Fault.OUT_WHILE_PINNED),
    "used before its turn": (
        (OUT, Out(X, 0, 1, 3), Out(X, 0, 1, 0)),
        (In(X, 0, 1, -1, 0, 0), IN),
        Fault.OUT_TOO_LATE,
    ),
    "out twice": ((OUT, Out(A, 1, 1, 1)), (IN._replace(after_outs=2),), Fault.OUT_OF_ABSENT),
    "in twice": ((OUT,), (IN, IN._replace(after_function=3)), Fault.IN_OF_RESIDENT),
    "in without out": ((OUT,), (In(X, 0, 1, 0, 0, 3), IN), Fault.IN_OF_RESIDENT),
    "in overtakes out": ((OUT,), (IN._replace(after_outs=0),), Fault.IN_BEFORE_OUT),
    "in for too late": ((OUT,), (IN._replace(before_function=5),), Fault.IN_TOO_LATE),
    "in lost": ((OUT,), (), Fault.USE_OF_ABSENT),
    "in of one chunk lost": ((OUT,), (IN._replace(first_chunk=1, chunk_count=3),), Fault.USE_OF_ABSENT),
    "out lost": ((), (), Fault.OVER_CAPACITY),
    "out too small": ((OUT._replace(chunk_count=1),), (IN._replace(chunk_count=1),), Fault.OVER_CAPACITY),
    "out too late": ((OUT._replace(after_function=1),), (IN,), Fault.OVER_CAPACITY),
    "in too early": ((OUT,), (IN._replace(after_function=0),), Fault.OVER_CAPACITY),
    "out behind a later one": (
        (Out(X, 0, 1, 1), OUT),
        (In(X, 0, 1, 2, 2, 3), IN._replace(after_outs=2)),
        Fault.DEADLOCK,
    ),
    "in behind a later one": (
        (OUT, Out(X, 0, 1, 0)),
        (IN._replace(after_function=3, after_outs=2), In(X, 0, 1, 0, 2, 3)),
        Fault.DEADLOCK,
    ),
}


PLANTED_WRITE_BACKS = {
    "no such variable": (Out(4, 0, 1, 0), Misfit.UNKNOWN_VARIABLE),
    "too many chunks": (Out(A, 1, 4, 0), Misfit.BAD_CHUNK_RANGE),
    "no such function": (Out(A, 0, 4, 5), Misfit.BAD_FUNCTION),
    "dead already": (Out(C, 0, 4, 1), Fault.NOT_LIVE),
    "used next": (Out(X, 0, 1, 2), Fault.OUT_WHILE_PINNED),
    "has left": (Out(A, 0, 4, 1), Fault.OUT_OF_ABSENT),
}


@pytest.mark.parametrize("name", PLANTED_WRITE_BACKS)
def test_each_planted_bug_of_a_write_back_is_found(name):
    move, fault = PLANTED_WRITE_BACKS[name]
    assert fault in {v.fault for v in validate(problem(), replace(SOUND, write_backs=(move,)))}


def test_a_write_back_changes_nothing_else():
    assert validate(problem(), replace(SOUND, write_backs=(Out(X, 0, 1, 0),))) == []
    found = validate(problem(), Plan((), (), (Out(A, 0, 4, 0),)))  # it makes no room
    assert {violation.fault for violation in found} == {Fault.OVER_CAPACITY}


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_bug_is_found(name):
    outs, ins, fault = PLANTED[name]
    assert fault in faults(outs, ins)


def test_every_fault_is_planted():
    assert {fault for _, _, fault in PLANTED.values()} == {*Fault, *Misfit}


def test_a_violation_names_the_place():
    found = validate(problem(), Plan((OUT._replace(after_function=1),), (IN,)))
    assert found == [Violation(Fault.OVER_CAPACITY, function=1)]
    assert str(found[0]) == "more chunks than the capacity are resident when a function starts (function 1)"
    found = validate(problem(), Plan((OUT,), ()))
    assert found == [Violation(Fault.USE_OF_ABSENT, function=4, variable=A)]


def test_moves_across_the_end_of_the_iteration():
    b = Builder()
    weight = b.entry(4)
    b.call("f0", [], [2])
    b.free(1)
    b.call("f1", [weight])
    b.call("f2", [], [2])
    b.free(2)
    wrapping = Problem.from_trace(b.trace(chunk_bytes=1), 4)
    late = In(weight, 0, 4, 0, 0, 1)
    assert validate(wrapping, Plan((Out(weight, 0, 4, 1),), (late,))) == []
    early = Plan((Out(weight, 0, 4, 1),), (In(weight, 0, 4, 2, 1, 3),))
    assert validate(wrapping, early) == [Violation(Fault.OVER_CAPACITY, function=0)]
    roomy = replace(wrapping, capacity_chunks=6)
    assert validate(roomy, early) == []
    assert {v.fault for v in validate(wrapping, Plan((), (late,)))} == {Fault.IN_OF_RESIDENT, Fault.OVER_CAPACITY}
    assert {v.fault for v in validate(wrapping, Plan((Out(weight, 0, 4, 1),)))} >= {Fault.USE_OF_ABSENT}


def test_an_inherited_storage_is_one_storage():
    b = Builder()
    old = b.entry(3, survives=False)
    b.call("f0", [], [3])
    b.free(1)
    b.call("f1", [old])
    b.free(old)
    (new,) = b.call("f2", [], [3])
    b.call("f3", [])
    b.previous[old] = new
    inherited = Problem.from_trace(b.trace(chunk_bytes=1), 5)
    plan = Plan((Out(new, 0, 1, 2),), (In(old, 0, 1, 0, 0, 1),))
    assert validate(inherited, plan) == []
    assert {v.fault for v in validate(inherited, Plan((), plan.ins))} >= {Fault.IN_OF_RESIDENT}


def mutated(plan: Plan, r: random.Random) -> Plan:
    """The plan with one thing changed."""
    outs, ins = list(plan.outs), list(plan.ins)
    moves: list = r.choice([m for m in (outs, ins) if m])
    index = r.randrange(len(moves))
    kind = r.choice(["drop", "repeat", "swap", "change"])
    if kind == "drop":
        del moves[index]
    elif kind == "repeat":
        moves.insert(r.randrange(len(moves) + 1), moves[index])
    elif kind == "swap":
        other = r.randrange(len(moves))
        moves[index], moves[other] = moves[other], moves[index]
    else:
        field = r.choice([name for name in moves[index]._fields if name != "variable"])
        value = getattr(moves[index], field) + r.choice([-2, -1, 1, 2, 3])
        moves[index] = moves[index]._replace(**{field: value})
    return replace(plan, outs=tuple(outs), ins=tuple(ins))


@pytest.mark.parametrize("part", range(6))
@pytest.mark.medium
def test_what_passes_runs_without_demand_at_any_speed(part):
    r = random.Random(part)
    passed = failed = 0
    for seed in range(40 * part, 40 * part + 40):
        trace = random_trace(seed)
        least = Problem.from_trace(trace, 0).min_budget_bytes
        random_problem = Problem.from_trace(trace, least + 100 * r.randrange(10))
        plan = get(r.choice(["idle", "window"]))(random_problem, 700)
        for _ in range(4 if plan else 0):
            changed = mutated(plan, r)
            if validate(random_problem, changed):
                failed += 1
                continue
            passed += 1
            for rates in ((1e3, 1e7), (1e7, 1e3), (1e2, 1e2)):
                timeline = simulate(replace(random_problem, machine=Machine(*rates)), changed, 3)
                assert (timeline.demand_in_count, timeline.demand_out_count) == (0, 0), (seed, rates, changed)
                assert timeline.peak_chunks <= random_problem.capacity_chunks
    assert failed > passed > 0
