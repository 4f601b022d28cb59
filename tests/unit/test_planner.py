"""What the daemon believes of the link before and after it has seen transfers, and where a function's uses begin."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, Future
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_traces import resnet50

from ooc_alloc import Core, Iteration, OocError
from swapd import plan_making
from swapd.planner import Planner, offsets_of
from swapd.planning.problem import InfeasibleError, Problem
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

MIB = 1 << 20
PROBED = Machine(out_bytes_per_second=3e9, in_bytes_per_second=5e9, latency_seconds=2e-5)


class Counters:
    """A core that only counts."""

    def __init__(self, **moved: float) -> None:
        names = ("swap_out_bytes", "swap_in_bytes", "copy_out_seconds", "copy_in_seconds")
        names += ("swap_out_count", "swap_in_count")
        names += ("map_seconds", "unmap_seconds", "driver_calls_map", "unmapped_bytes")
        self.figures = {name: moved.get(name, 0.0) for name in names} | {"chunk_bytes": 2 * MIB}

    def stats(self) -> dict[str, Any]:
        return self.figures


def link(expected: Machine | None = None, machine: Machine | None = None, **moved: float) -> Machine:
    return Planner(cast(Core, Counters(**moved)), machine=machine, expected=expected).link()


def test_before_any_transfer_the_link_is_as_probed() -> None:
    assert link(PROBED) == PROBED
    assert link().out_bytes_per_second == link().in_bytes_per_second > 0


def test_the_process_own_transfers_count_more() -> None:
    found = link(PROBED, swap_out_bytes=100 * MIB, copy_out_seconds=0.1)
    assert found.out_bytes_per_second == 1000 * MIB
    assert found.in_bytes_per_second == PROBED.in_bytes_per_second
    assert found.latency_seconds == PROBED.latency_seconds


def test_latency_is_no_part_of_the_measured_speed() -> None:
    copies = {"swap_in_bytes": 100 * MIB, "swap_in_count": 1000, "copy_in_seconds": 0.1 + 1000 * PROBED.latency_seconds}
    assert link(PROBED, **copies).in_bytes_per_second == pytest.approx(1000 * MIB)
    late = replace(PROBED, latency_seconds=1.0)  # more than all of them took: no such copy was made
    assert link(late, **copies).in_bytes_per_second == pytest.approx(100 * MIB / 0.06)


def test_a_few_small_copies_are_no_measurement() -> None:
    assert link(PROBED, swap_in_bytes=MIB, copy_in_seconds=1.0) == PROBED


def test_memory_calls_cost_what_they_took_by_the_chunk() -> None:
    calls = {"map_seconds": 0.5, "driver_calls_map": 10, "unmap_seconds": 0.4, "unmapped_bytes": 20 * MIB}
    assert link(PROBED, **calls) == replace(PROBED, map_seconds=0.05, unmap_seconds=0.04)
    # Where functions run on streams, addresses are unmapped when they are wanted again: ahead of the next map.
    on_streams = Planner(cast(Core, Counters(**calls)), expected=PROBED, asynchronous=True)
    assert on_streams.link() == replace(PROBED, map_seconds=0.05 + 0.04, unmap_seconds=0.0)
    expected = replace(PROBED, map_seconds=1e-3, unmap_seconds=2e-3)
    assert link(expected, map_seconds=0.5, driver_calls_map=2) == expected  # too few to tell


def test_a_given_machine_is_not_measured() -> None:
    assert link(PROBED, machine=Machine(1e9, 1e9), swap_out_bytes=100 * MIB, copy_out_seconds=0.1) == Machine(1e9, 1e9)


class Loop(Counters):
    """A core whose iterations are all alike, and move data."""

    def __init__(self) -> None:
        super().__init__(budget_bytes=MIB)
        self.figures["budget_bytes"] = MIB
        self.ended = 0

    def boundary(self) -> Iteration:
        self.ended += 1
        counts = {field.name: 0 for field in fields(Iteration)}
        seen = {"fingerprint": 7, "functions": 1, "swapped_bytes": MIB, "seen_count": self.ended}
        return Iteration(**(counts | seen))  # type: ignore[arg-type]

    def stop_daemon(self) -> None:
        """It has none."""


def test_a_sequence_without_a_plan_is_tried_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def infeasible(*_: object, **__: object) -> None:
        tried.append(7)
        raise InfeasibleError(0, "f", 2 * MIB, MIB, 2 * MIB)

    monkeypatch.setattr(plan_making, "make_plan", infeasible)
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: resnet50(1)))
    made = Planner(cast(Core, Loop()))
    for _ in range(4):
        made.boundary()
    assert tried == [7]
    assert made.unplannable_sequences == 1


@pytest.mark.parametrize(
    ("asynchronous", "steps"),
    [(False, (2, 3, 4, 5, 6, 6, 6, 6, 10, 10)), (True, (2, 3, 4, 5, 5, 5, 5, 5, 5, 5))],  # planned by the second step
)
@pytest.mark.medium
def test_steps_under_the_last_plan_say_again_what_a_step_takes(
    monkeypatch: pytest.MonkeyPatch, asynchronous: bool, steps: tuple[int, ...]
) -> None:
    """The first three do, and then ever fewer; on streams none, as nothing is timed there any more."""
    trace = replace(resnet50(1), fingerprint=7)
    budget = Problem.from_trace(trace, 1 << 40).min_budget_bytes * 3 // 2
    installed = []

    class Slower(Loop):
        """Each step takes longer than the one before it."""

        def boundary(self) -> Iteration:
            return replace(super().boundary(), planned=self.ended > 1, followed_plan=self.ended > 1)

        def install_plan(self, *plan: Any) -> None:
            installed.append(plan)

    def traced(step: int) -> Trace:
        return replace(
            trace, function_start=trace.function_start * step, function_seconds=trace.function_seconds * step
        )

    core = Slower()
    core.figures["budget_bytes"] = budget
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: traced(core.ended)))
    monkeypatch.setattr(plan_making, "recorded_plan", lambda plan, trace: plan)
    made = Planner(cast(Core, core), asynchronous=asynchronous)
    predicted, plans = [], []
    for _ in range(11):
        made.boundary()
        assert made.last_plan is not None
        predicted.append(made.last_plan.predicted_seconds)
        plans.append((made.last_plan.outs, made.last_plan.ins))
    plan = made.last_plan
    assert predicted[1:] == [simulate(Problem.from_trace(traced(step), budget), plan).seconds for step in steps]
    assert len(installed) == 2 and plans[1] == plans[-1]


class Later(Executor):
    """Works when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future[Any], Any]] = []
        self.ended = False

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((future, lambda: function(*args, **kwargs)))
        return future

    def work(self) -> None:
        future, call = self.asked[-1]
        future.set_result(call())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ended = True


def test_the_program_goes_on_while_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = replace(resnet50(1), fingerprint=7)
    core, executor = Loop(), Later()
    core.figures["budget_bytes"] = Problem.from_trace(trace, 1 << 40).min_budget_bytes * 3 // 2
    installed: list[Any] = []
    core.install_plan = lambda *plan: installed.append(plan)  # type: ignore[attr-defined]
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: trace))
    monkeypatch.setattr(plan_making, "recorded_plan", lambda plan, trace: plan)
    made = Planner(cast(Core, core), executor=executor)
    for _ in range(3):
        made.boundary()
    assert len(executor.asked) == 1 and not installed and made.last_plan is None
    executor.work()
    assert not installed  # plans change where an iteration ends
    made.boundary()
    assert len(installed) == 1 and made.last_plan is not None and made.last_plan.predicted_seconds
    assert len(executor.asked) == 1  # the iteration that ended there could not have the plan yet
    made.boundary()
    assert len(executor.asked) == 2
    executor.asked[-1][0].set_exception(MemoryError("there"))
    with pytest.raises(MemoryError, match="there"):
        made.boundary()
    made.close()
    assert executor.ended


def test_who_waits_for_another_sequences_plan_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan is made at a time: the iterations of the second sequence have none as the first one's takes long."""

    class Two(Loop):
        def boundary(self) -> Iteration:
            return replace(super().boundary(), fingerprint=7 if self.ended <= 2 else 8)

    executor = Later()
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: resnet50(1)))
    made = Planner(cast(Core, Two()), executor=executor)
    for _ in range(8):
        made.boundary()
    assert len(executor.asked) == 1
    said = made.no_plan_reason(1.0)
    assert said is not None and said.startswith("7 iterations ran while plans were being made")


def test_who_departs_from_a_plan_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two phases in turns: the first one's sequence is being planned, and the other one's has a plan."""

    class Turns(Loop):
        def boundary(self) -> Iteration:
            ended = super().boundary()
            return ended if self.ended % 2 else replace(ended, fingerprint=8, planned=True)

    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: resnet50(1)))
    made = Planner(cast(Core, Turns()), executor=Later())
    for _ in range(8):
        made.boundary()
    said = made.no_plan_reason(1.0)
    assert said is not None and "different phases follow each other" in said


def test_a_plan_that_no_longer_belongs_to_what_is_kept_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it was made, the same functions ran again, but freed less of what was there before."""
    trace = replace(resnet50(1), fingerprint=7)
    core, executor = Loop(), Later()
    core.figures["budget_bytes"] = Problem.from_trace(trace, 1 << 40).min_budget_bytes * 3 // 2
    installed: list[Any] = []

    def install(*plan: Any) -> None:
        installed.append(plan)
        if len(installed) == 1:
            raise OocError("the plan does not belong to a trace that is kept, or names variables beyond it")

    core.install_plan = install  # type: ignore[attr-defined]
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: trace))
    monkeypatch.setattr(plan_making, "recorded_plan", lambda plan, trace: plan)
    made = Planner(cast(Core, core), executor=executor)
    made.boundary()
    executor.work()
    made.boundary()
    assert len(installed) == 1 and made.last_plan is None and made.policy != "none"
    made.boundary()
    assert len(executor.asked) == 2
    executor.work()
    made.boundary()
    assert len(installed) == 2 and made.last_plan is not None


def test_a_plan_that_cannot_be_made_elsewhere_is_counted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = Loop(), Later()
    core.figures["budget_bytes"] = MIB
    monkeypatch.setattr(Planner, "recorded", lambda self, ended: SimpleNamespace(cut=lambda: resnet50(1)))
    made = Planner(cast(Core, core), executor=executor)
    made.boundary()
    executor.work()
    for _ in range(3):
        made.boundary()
    assert made.unplannable_sequences == 1 and len(executor.asked) == 1


def test_the_trace_that_is_kept_is_of_what_took_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    traces = {1: resnet50(1), 2: resnet50(2)}

    class Setup(Loop):
        """Begins with one sequence, repeats another one, and ends with the first again."""

        def boundary(self) -> Iteration:
            fingerprint = 1 if self.ended in (0, 4) else 2
            return replace(super().boundary(), fingerprint=fingerprint, seconds=1.0)

    monkeypatch.setattr(Planner, "trace", lambda self, ended: traces[ended.fingerprint])
    made = Planner(cast(Core, Setup()), policy="none", trace_path=tmp_path / "kept.trace")
    for _ in range(5):
        made.boundary()
    made.close()
    assert Trace.load(tmp_path / "kept.trace").variable_bytes.tolist() == traces[2].variable_bytes.tolist()


@given(st.lists(st.integers(0, 9)).map(sorted), st.integers(0, 3))
def test_offsets_of_uses_are_counted_ones(uses: list[int], unused: int) -> None:
    """Functions without any use, at the beginning, in the middle and at the end, are among them."""
    functions, counts = max(uses, default=-1) + 1 + unused, Counter(uses)
    expected = [0, *accumulate(counts[function] for function in range(functions))]
    found = offsets_of(np.array(uses, np.uint32), functions)
    assert found.dtype == np.int64 and found.tolist() == expected
