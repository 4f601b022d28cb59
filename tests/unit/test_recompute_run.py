"""Recomputation in a run: what is asked for, when it is followed, and when it is given up, by a program that plays."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, cast

import numpy as np
import pytest
from planning_traces import Builder
from test_planner import Counters, Later

from ooc_alloc import Core, Iteration
from swapd.plan_making import Answer, Request, answer
from swapd.planner import Planner
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.recompute.account import Account
from swapd.recompute.bound import recompute_bound
from swapd.recompute.candidates import Drop, find_candidates
from swapd.recompute.choice import Choice, choose
from swapd.recompute.history import History
from swapd.recompute.rewriting import rewrite
from swapd.recompute.schedule import (
    AGAIN,
    RemakeFigures,
    Schedule,
    ScheduledDrop,
    ScheduledLinger,
    runs_again,
    schedule_of,
)
from swapd.tiers.three_tiers import LowerTiers
from swapd.trace.ranged import RangedTrace
from swapd.trace.trace import Machine, Trace

ALONE, DROPPING = 7, 8  # fingerprints
KEYS = ("drop_count", "drop_bytes", "function_count", "seconds", "refused_count")
CHUNK = 1 << 20
SLOW = Machine(100 * CHUNK, 100 * CHUNK)  # a chunk takes as long as a function


@cache
def network() -> Trace:
    """Layers of a product and a GELU, whose backward needs what both made."""
    b = Builder()
    data, weights = b.entry(8 * CHUNK), [b.entry(CHUNK) for _ in range(12)]
    made, x = [], data
    for weight in weights:
        (y,) = b.call("aten::addmm", [x, weight], [8 * CHUNK], seconds=0.01)
        (z,) = b.call("aten::gelu", [y], [8 * CHUNK], seconds=0.001)
        made.append((x, weight, y, z))
        x = z
    (gradient,) = b.call("loss", [x], [8 * CHUNK], seconds=0.01)
    for x, weight, y, z in reversed(made):
        b.free(z)
        (inner,) = b.call("gelu_backward", [gradient, y], [8 * CHUNK], seconds=0.01)
        b.free(gradient, y)
        (gradient,) = b.call("mm", [inner, weight, x], [8 * CHUNK], writes=[weight], seconds=0.01)
        b.free(inner)
    b.free(gradient)
    return replace(b.trace(CHUNK, SLOW), fingerprint=ALONE)


BUDGET = 60 * CHUNK


@cache
def chosen() -> Choice:
    found = choose(network(), partial(Problem.from_trace, budget_bytes=BUDGET), without_statistics=True)
    assert found.rewritten is not None
    return found


def recorded(trace: Trace) -> RangedTrace:
    uses = len(trace.use_variables)
    return RangedTrace(trace, np.zeros(uses, np.uint32), np.full(uses, 1 << 30, np.uint32))


@cache
def dropping() -> Trace:
    """What a core records of the program that drops."""
    rewritten = chosen().rewritten
    assert rewritten is not None
    names = [name + AGAIN * bool(again) for name, again in zip(rewritten.trace.function_names, rewritten.repeated)]
    return replace(rewritten.trace, function_names=tuple(names), fingerprint=DROPPING)


class Program(Counters):
    """A core whose program drops what it is told to, after two iterations of trial."""

    TRIALS = 2

    def __init__(self, alone: float = 4.0, dropping: float = 1.0, budget: int = BUDGET) -> None:
        super().__init__()
        self.figures["budget_bytes"] = budget
        self.seconds = {ALONE: alone, DROPPING: dropping}
        self.plans: set[int] = set()
        self.ran: list[int] = []
        self.seen: Counter[int] = Counter()
        self.schedule: Schedule | None = None
        self.tried = 0
        self.called: list[str] = []
        self.timed = True  # as the next iterations are, on streams

    def boundary(self) -> Iteration:
        now = DROPPING if self.is_dropping() else ALONE
        self.tried += self.schedule is not None
        self.ran.append(now)
        self.seen[now] += 1
        trial = self.schedule is not None and now == ALONE
        of = {"fingerprint": now, "functions": 1, "swapped_bytes": CHUNK, "seen_count": self.seen[now]}
        of["planned"] = of["followed_plan"] = now in self.plans
        of["timed"] = self.timed
        seconds = self.seconds[now] + 100 * trial
        return Iteration(**({field.name: 0 for field in fields(Iteration)} | of | {"seconds": seconds}))  # type: ignore[arg-type]

    def is_dropping(self) -> bool:
        return self.schedule is not None and self.tried >= self.TRIALS

    def install_plan(self, fingerprint: int, *moves: Any) -> None:
        self.plans.add(fingerprint)

    def stop_daemon(self) -> None:
        """It has none."""


class Fake:
    """Carries out one schedule."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def follow(self, schedule: Schedule) -> None:
        self.program.schedule, self.program.tried = schedule, 0
        self.program.called.append("follow")

    def unfollow(self, fingerprint: int) -> None:
        assert self.program.schedule is not None and self.program.schedule.fingerprint == fingerprint
        self.program.schedule = None
        self.program.called.append("unfollow")

    def forget(self) -> None:
        self.program.schedule = None
        self.program.called.append("forget")

    def ended(self) -> int | None:
        schedule = self.program.schedule
        return schedule.fingerprint if schedule is not None and self.program.is_dropping() else None

    def figures(self) -> RemakeFigures:
        again = self.program.ran.count(DROPPING)
        return RemakeFigures(again, again * CHUNK, 2 * again, 0.5 * again, 3 * bool(again))


@pytest.fixture(autouse=True)
def sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = {ALONE: network(), DROPPING: dropping()}
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: recorded(traces[ended.fingerprint]))


def planner_of(program: Program, remaker: bool = True, **settings: Any) -> Planner:
    made = Planner(cast(Core, program), machine=SLOW, **{"recompute": True} | settings)
    if remaker:
        made.remaker = Fake(program)
    return made


def run(planner: Planner, iterations: int) -> None:
    for _ in range(iterations):
        planner.boundary()


def test_a_schedule_names_variables_by_who_allocates_them() -> None:
    b = Builder()
    data = b.entry(1)
    unused, first, second = b.call("aten::gelu", [data], [50, 100, 200])
    (later,) = b.call("aten::gelu", [first], [100])
    b.call("between", [data])
    b.call("backward", [first, second, later])
    b.free(unused, first, second, later)
    trace = replace(b.trace(10), fingerprint=3)
    history = History(trace)
    rewritten = rewrite(history, [Drop(later, 1), Drop(second, 0), Drop(first, 1)])
    found = schedule_of(trace, trace, rewritten)
    assert found.fingerprint == 3 and found.functions == trace.function_names
    assert found.drops == (ScheduledDrop(0, 2, 0), ScheduledDrop(0, 1, 1), ScheduledDrop(1, 0, 1))
    assert found.kept == (0, 1)
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_schedule_says_what_fleets() -> None:
    b = Builder()
    data = b.entry(1)
    (first,) = b.call("aten::gelu", [data], [100], seconds=1.0)
    (later,) = b.call("aten::gelu", [first], [100])
    b.call("between", [data])
    b.call("backward", [later])
    b.call("backward", [first])
    b.free(first, later)
    trace = b.trace(10)
    found = schedule_of(trace, trace, rewrite(History(trace), [Drop(later, 1, True), Drop(first, 1, True)]))
    assert found.drops == (ScheduledDrop(0, 0, 1, fleeting=True), ScheduledDrop(1, 0, 1)), "nothing is made of `later`"


def test_a_schedule_names_what_lingers_and_keeps_the_calls_that_make_it() -> None:
    b = Builder()
    data = b.entry(1)
    other, layer = b.call("aten::gelu", [data], [50, 100], seconds=1.0)
    (later,) = b.call("aten::gelu", [layer], [100])
    b.free(other, layer)
    b.call("between", [data, later])
    b.call("middle", [data])
    b.call("backward", [later])
    b.free(later)
    trace = b.trace(10)
    found = schedule_of(trace, trace, rewrite(History(trace, linger_rate=1e9), [Drop(later, 2)]))
    assert found.drops == (ScheduledDrop(1, 0, 2),) and found.lingers == (ScheduledLinger(0, 1, 4),)
    assert found.kept == (0, 1)


def test_numbers_are_those_of_the_recording_where_variables_have_parts() -> None:
    """Among what the function allocates are variables that are cut, and one that has no part at all."""
    b = Builder()
    data = b.entry(10)
    blank, halves, whole = b.call("aten::gelu", [data], [40, 40, 20])
    b.call("between", [data])
    b.call("reads half", [halves])
    b.call("backward", [whole])
    trace = b.trace(10)
    uses = trace.use_variables.tolist()
    first = [1 if v == blank else 0 for v in uses]
    count = [2 if v == halves else 0 if v == blank else 9 for v in uses]
    keep = [v != blank for v in uses]
    offsets = np.cumsum([0, *(sum(keep[a:z]) for a, z in zip(trace.use_offsets, trace.use_offsets[1:]))])
    trace = replace(
        trace, use_variables=trace.use_variables[keep], use_flags=trace.use_flags[keep], use_offsets=offsets
    )
    pick = np.flatnonzero(keep)
    ranged = RangedTrace(trace, np.array(first, np.uint32)[pick], np.array(count, np.uint32)[pick], most_chunks=3)
    cut = ranged.cut()
    (number,) = cut.parts_of(whole)
    assert number != whole and not cut.parts_of(blank)
    rewritten = rewrite(History(cut), [Drop(number, 0)])
    assert schedule_of(trace, cut, rewritten).drops == (ScheduledDrop(0, 2, 0),)


def test_what_no_function_allocates_is_in_no_schedule() -> None:
    trace = network()
    late = replace(trace, born=np.where(trace.born == 0, -1, trace.born))
    rewritten = rewrite(History(trace), [Drop(int(np.flatnonzero(trace.born == 0)[0]), 1)])
    with pytest.raises(ValueError, match="no function of the iteration allocated variable"):
        schedule_of(late, trace, rewritten)


def test_drops_are_in_the_answer_with_their_bound() -> None:
    assert runs_again(dropping()) and not runs_again(network())
    made = answer(Request(recorded(network()), BUDGET, "auto", None)).made
    request = Request(recorded(network()), BUDGET, "auto", None, under=made, recompute=True)
    got: Answer = answer(pickle.loads(pickle.dumps(request)))
    got = pickle.loads(pickle.dumps(got))
    rewritten = chosen().rewritten
    assert rewritten is not None and got.schedule == schedule_of(network(), network(), rewritten)
    assert got.made is None and got.predicted_seconds == pytest.approx(chosen().swap_only_seconds, rel=0.01)
    problem, history = Problem.from_trace(network(), BUDGET), History(network(), without_statistics=True)
    assert got.recompute_bound_seconds == recompute_bound(problem, history, find_candidates(history, final=True))
    assert got.recompute_bound_seconds <= chosen().seconds < chosen().swap_only_seconds
    for asked in (
        replace(request, recompute=False),
        replace(request, recorded=recorded(dropping())),
        replace(request, recorded=recorded(replace(network(), machine=Machine(1e15, 1e15)))),
    ):
        under = answer(replace(asked, under=None, recompute=False)).made
        got = answer(replace(asked, under=under))
        assert got.predicted_seconds and got.schedule is None and got.recompute_bound_seconds is None


def test_it_is_followed_once_swapping_alone_was_timed_and_kept_as_it_is_faster() -> None:
    program = Program(alone=4.0, dropping=1.0)
    planner = planner_of(program)
    run(planner, 2)  # recorded and planned; planned again
    assert program.ran == [ALONE] * 2 and program.plans == {ALONE} and not program.called
    run(planner, 2)
    assert not program.called
    run(planner, 1)  # the third step under the last plan
    assert program.called == ["follow"]
    assert program.schedule is not None and program.schedule.drops
    run(planner, 2 + 8)
    assert program.ran == [ALONE] * 7 + [DROPPING] * 8
    assert program.plans == {ALONE, DROPPING} and program.called == ["follow"]
    shown = planner.figures()
    assert [shown[f"recompute_{key}"] for key in KEYS] == [8, 8 * CHUNK, 16, 4.0, 3]
    planner.close()
    assert program.called == ["follow", "forget"]
    program.ran.append(DROPPING)
    assert planner.figures() == shown  # as it ended


def test_what_is_slower_is_given_up_and_not_chosen_again() -> None:
    program = Program(alone=1.0, dropping=1.01)
    run(planner_of(program), 30)
    assert program.called == ["follow", "unfollow"]
    # Without a plan, under the first one, and six times under the last.
    assert program.ran == [ALONE] * 7 + [DROPPING] * 8 + [ALONE] * 15


def test_what_else_the_machine_does_gives_nothing_up() -> None:
    """One of six steps with drops is faster than all three without."""

    class Disturbed(Program):
        def boundary(self) -> Iteration:
            ended = super().boundary()
            slow = ended.fingerprint == DROPPING and self.seen[DROPPING] != 7
            return replace(ended, seconds=ended.seconds + slow)

    program = Disturbed(alone=1.0, dropping=0.9)
    run(planner_of(program), 30)
    assert program.called == ["follow"] and program.ran == [ALONE] * 7 + [DROPPING] * 23


def test_drops_are_chosen_with_the_least_times_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of swapping alone is disturbed in another place; so are those before, which do not count."""
    least = network().function_seconds

    def disturbed(planner: Planner, ended: Iteration) -> RangedTrace:
        if ended.fingerprint != ALONE:
            return recorded(dropping())
        count = ended.seen_count
        times = 0 * least if count < 3 else least * np.where(np.arange(len(least)) % 3 == count % 3, 1.0, 5.0)
        return recorded(replace(network(), function_seconds=times))

    monkeypatch.setattr(Planner, "recorded", disturbed)
    asked: list[Request] = []

    def spy(request: Request) -> Answer:
        asked.append(request)
        return answer(request)

    monkeypatch.setattr("swapd.planner.answer", spy)
    run(planner_of(Program()), 5)
    (request,) = [one for one in asked if one.recompute]
    assert request.recorded.whole.function_seconds.tolist() == least.tolist()


def test_iterations_whose_functions_were_not_timed_say_nothing_of_what_to_drop() -> None:
    program = Program()
    planner = planner_of(program)
    program.timed = False
    run(planner, 12)
    assert program.plans == {ALONE} and program.schedule is None
    program.timed = True
    run(planner, 3)
    assert program.schedule is not None


def test_more_sequences_than_are_kept_are_each_asked_about_once() -> None:
    """The oldest one's schedule is given up for the newest, and not chosen again when that one comes back."""
    account, program = Account(), Program()
    account.remaker = told = Fake(program)
    told.unfollow = lambda fingerprint: program.called.append(f"unfollow {fingerprint}")  # type: ignore[method-assign]
    ended = Iteration(**{field.name: 0 for field in fields(Iteration)})  # type: ignore[arg-type]
    for fingerprint in range(100, 165):
        for _ in range(3):
            times = account.time_alone(replace(ended, fingerprint=fingerprint), np.ones(2))
        assert times is not None and not account.is_timed(fingerprint)
        account.asked(fingerprint)
        account.follow(Schedule(fingerprint, ("a", "b"), (), ()), None)
    assert program.called == [*["follow"] * 64, "unfollow 100", "follow"]
    assert account.is_timed(100)
    account.forget()
    assert not account.is_timed(100)


def test_what_never_has_a_plan_is_given_up_if_it_is_slower() -> None:
    class Departs(Program):
        def boundary(self) -> Iteration:
            ended = super().boundary()
            return replace(ended, followed_plan=False) if ended.fingerprint == DROPPING else ended

    for alone, called in ((1.0, ["follow", "unfollow"]), (9.0, ["follow"])):
        program = Departs(alone=alone, dropping=2.0)
        run(planner_of(program), 120)
        assert program.called == called
        assert program.ran.count(DROPPING) == (50 if len(called) == 2 else 113)


def test_what_fits_with_drops_needs_no_plan() -> None:
    class Fits(Program):
        def boundary(self) -> Iteration:
            ended = super().boundary()
            return replace(ended, swapped_bytes=0) if ended.fingerprint == DROPPING else ended

    program = Fits(alone=1.0, dropping=2.0)
    run(planner_of(program), 20)
    assert program.plans == {ALONE} and program.called == ["follow", "unfollow"]
    assert program.ran == [ALONE] * 7 + [DROPPING] * 6 + [ALONE] * 7


def test_a_sequence_with_drops_that_has_no_plan_is_given_up() -> None:
    program = Program()
    planner = planner_of(program)
    run(planner, 7)
    program.figures["chunk_bytes"] = CHUNK
    planner.recorded = lambda ended: recorded(replace(dropping(), slab_chunks_peak=40))  # type: ignore[method-assign]
    run(planner, 3)
    assert program.called == ["follow", "unfollow"] and planner.unplannable_sequences == 1
    assert program.ran[-2:] == [ALONE, ALONE]


@pytest.mark.parametrize(
    ("remaker", "settings"),
    [
        (False, {}),
        (True, {"recompute": False}),
        (True, {"disk": Machine(1e9, 1e9)}),
        (True, {"policy": "none"}),
    ],
)
def test_nothing_is_asked_for_where_it_cannot_be_done(
    monkeypatch: pytest.MonkeyPatch, remaker: bool, settings: dict[str, Any]
) -> None:
    lower = LowerTiers(1 << 40, Machine(1e12, 1e12))
    monkeypatch.setattr(Planner, "lower", lambda self: lower if self.disk is not None else None)
    program = Program()
    program.install_plan = lambda fingerprint, *moves, **below: program.plans.add(fingerprint)  # type: ignore[method-assign]
    planner = planner_of(program, remaker, **settings)
    run(planner, 12)
    assert program.ran == [ALONE] * 12 and not program.called
    assert program.plans == (set() if settings.get("policy") == "none" else {ALONE})
    shown = planner.figures()
    assert shown["recompute"] == ("exact" if settings.get("recompute", True) else "off")
    assert [shown[f"recompute_{key}"] for key in KEYS] == [0] * 5


def test_another_budget_ends_all_and_begins_anew() -> None:
    program = Program()
    planner = planner_of(program)
    run(planner, 12)
    assert program.ran[-1] == DROPPING
    program.figures["budget_bytes"] = BUDGET - 4 * CHUNK
    program.plans.clear()  # as who lowers it has the core do
    run(planner, 1)
    assert program.called == ["follow", "forget"]
    run(planner, 6)
    assert program.called == ["follow", "forget", "follow"] and program.ran[-6:] == [ALONE] * 6


@pytest.mark.parametrize("less", [0, CHUNK])
def test_an_answer_for_another_budget_drops_nothing(less: int) -> None:
    program, executor = Program(), Later()
    planner = planner_of(program, executor=executor)
    run(planner, 1)
    while planner._asked is None or not planner._asked[1].recompute:
        if planner._asked is not None:
            executor.work()
        run(planner, 1)
    assert len(program.ran) < 20
    program.figures["budget_bytes"] = BUDGET - less  # while it is chosen what to drop
    executor.work()
    run(planner, 1)
    assert program.called == (["forget"] if less else ["follow"])


def test_the_bound_that_is_shown_is_that_of_swapping_and_recomputing() -> None:
    program = Program(alone=4.0, dropping=1.0)
    planner = planner_of(program)
    run(planner, 12)
    alone = planner.figures()["bound_step_seconds"]
    assert alone == make_plan(Problem.from_trace(network(), BUDGET)).bound_seconds
    run(planner, 1000)
    history = History(network(), without_statistics=True)
    both = recompute_bound(Problem.from_trace(network(), BUDGET), history, find_candidates(history, final=True))
    figures = planner.figures()
    assert figures["bound_step_seconds"] == both < alone
    assert figures["predicted_step_seconds"] == pytest.approx(chosen().seconds, rel=0.05)
    assert figures["predicted_step_seconds"] >= both
    assert planner.no_plan_reason(CHUNK) is None


def test_a_planner_that_gives_up_drops_nothing_any_more() -> None:
    program = Program()
    planner = planner_of(program)
    run(planner, 12)
    planner.give_up()
    run(planner, 3)
    assert program.called == ["follow", "forget"] and program.ran[-3:] == [ALONE] * 3
