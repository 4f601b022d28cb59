"""Parts beyond the planner: the daemon plans for them and installs what the core knows; reports name both rightly."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from part_cases import Ranged, cut, layers_in_parts, random_ranges
from recordings import event, function, iteration, recording

from ooc_alloc import Core, Iteration, TraceArrays
from ooc_alloc import timeline as kinds
from swapd.observing.analysis import run_policy, stalls_by_variable
from swapd.observing.observer import Observer
from swapd.observing.perfetto import measured_to_perfetto, to_perfetto
from swapd.observing.recording import Predicted
from swapd.observing.report_facts import RunSoFar, wait_rows
from swapd.plan_making import Request, answer
from swapd.planner import Planner
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.simulator import simulate_events
from swapd.trace.ranged import RangedTrace, plan_in_parts
from swapd.trace.trace import Machine, Trace

SLOW = Machine(2e5, 2e5)


class RecordedCore:
    """A core that recorded one sequence, and keeps the plan that it is given."""

    def __init__(self, case: Ranged, budget: int) -> None:
        self.case, self.budget = case, budget
        self.installed: tuple[Any, ...] = ()
        self.ended: dict[str, Any] = {}  # what is different about the iteration that ends next

    def boundary(self) -> Iteration:
        trace = self.case.trace
        counts = (trace.functions, trace.variables, len(trace.use_variables))
        ended = Iteration(trace.fingerprint, *counts, False, False, False, True, 1, 0, 0, 100, 1.0, 0.5)
        return dataclasses.replace(ended, **self.ended)

    functions = 0

    def stats(self) -> dict[str, Any]:
        names = ("swap_out_bytes", "swap_in_bytes", "swap_out_count", "swap_in_count")
        names += ("copy_out_seconds", "copy_in_seconds")
        return {
            **dict.fromkeys(names, 0),
            "budget_bytes": self.budget,
            "chunk_bytes": self.case.trace.chunk_bytes,
            "functions": self.functions,
        }

    def trace_arrays(self, ended: Iteration) -> TraceArrays:
        trace = self.case.trace
        names = sorted(set(trace.function_names))
        return TraceArrays(
            function_name=np.array([names.index(name) for name in trace.function_names], np.uint32),
            function_start=trace.function_start,
            function_seconds=trace.function_seconds,
            variable_bytes=trace.variable_bytes.astype(np.uint64),
            variable_born=trace.born,
            variable_died=trace.died,
            variable_previous=trace.previous,
            use_function=np.repeat(np.arange(trace.functions), np.diff(trace.use_offsets)).astype(np.uint32),
            use_variable=trace.use_variables.astype(np.uint32),
            use_access=trace.use_flags.astype(np.uint32),
            use_first_chunk=self.case.first,
            use_chunk_count=self.case.count,
        )

    def function_name(self, number: int) -> str:
        return sorted(set(self.case.trace.function_names))[number]

    def trace_places(self, fingerprint: int, variables: int) -> NDArray[np.uint32]:
        return np.arange(variables, dtype=np.uint32)

    def place_text(self, number: int) -> str:
        return f"place of {number}"

    def install_plan(self, fingerprint: int, *moves: Any) -> None:
        self.installed = moves


def planner_of(case: Ranged, budget: int) -> tuple[Planner, RecordedCore]:
    core = RecordedCore(case, budget)
    return Planner(cast(Core, core), machine=SLOW), core


def test_the_daemon_installs_a_plan_for_the_cores_variables() -> None:
    case = layers_in_parts(layers=3, parts=4, weight_chunks=8, activation_chunks=4)
    planner, core = planner_of(case, 14 * case.trace.chunk_bytes)  # a weight is 8 chunks, its parts are 2
    planner.boundary()
    plan = planner.last_plan
    assert plan is not None and len(plan.ins) > 8
    ins = np.array(core.installed[1])
    assert ins.shape == (6, len(plan.ins))
    weights = ins[:, (ins[0] >= 1) & (ins[0] <= 3)]
    assert set(weights[0].tolist()) == {1, 2, 3}
    assert weights[1].max() >= 6
    # Each part comes in for the function that reads it, which is the part of the layer.
    for variable, first, count, _, _, before in weights.T.tolist():
        assert before % 12 == (variable - 1) * 4 + first // 2
        assert first // 2 == (first + count - 1) // 2


@pytest.mark.parametrize("seed", range(40))
def test_installed_moves_are_within_their_variables(seed: int) -> None:
    case = random_ranges(seed)
    least = Problem.from_trace(cut(case.trace, case.first, case.count), 0).min_budget_bytes
    planner, core = planner_of(case, least + 200)
    ended = planner.boundary()
    assert planner.unplannable_sequences == 0
    for columns in core.installed:
        for variable, first, count, *_ in np.array(columns).T.tolist():
            assert 0 <= first < first + count <= case.chunks(variable)
    again = planner.trace(ended)
    assert planner.last_plan is not None
    kept = plan_in_parts(planner.made[ended.fingerprint].known, again)
    assert (kept.outs, kept.ins, kept.write_backs) == (
        planner.last_plan.outs,
        planner.last_plan.ins,
        planner.last_plan.write_backs,
    )


def test_a_chunk_that_a_slab_has_in_part_is_counted() -> None:
    case = layers_in_parts(layers=1, parts=2)
    planner, core = planner_of(case, 1 << 20)
    for slab_bytes, chunks in ((0, 0), (1, 1), (case.trace.chunk_bytes, 1), (case.trace.chunk_bytes + 1, 2)):
        core.ended = {"slab_peak_bytes": slab_bytes}
        assert planner.trace(planner.boundary()).slab_chunks_peak == chunks


def test_the_time_beside_a_prediction_is_that_of_the_planned_sequence() -> None:
    case = layers_in_parts(layers=3, parts=4, weight_chunks=8, activation_chunks=4)
    planner, core = planner_of(case, 14 * case.trace.chunk_bytes)
    planner.boundary()
    under_plan = {"planned": True, "followed_plan": True, "seen_count": 2}
    core.ended = under_plan | {"fingerprint": case.trace.fingerprint + 1, "seconds": 7.0, "contains_first": True}
    planner.boundary()
    assert planner.planned_step_seconds is None
    core.ended = under_plan | {"seconds": 5.0, "contains_first": True}
    planner.boundary()
    assert planner.planned_step_seconds == 5.0


def test_a_plan_is_timed_for_an_iteration_whose_parts_have_other_numbers() -> None:
    """A part that has no bytes is no variable; whether it has some depends on the iteration before."""
    timed = 0
    for seed in range(200):
        case = random_ranges(seed)
        alone = dataclasses.replace(case.trace, previous=np.full_like(case.trace.previous, -1))
        first, second = (RangedTrace(trace, case.first, case.count) for trace in (case.trace, alone))
        traces = first.cut(), second.cut()
        if traces[0].variables == traces[1].variables:
            continue
        least = max(Problem.from_trace(trace, 0).min_budget_bytes for trace in traces)
        made = answer(Request(first, least, "auto", None)).made
        got = answer(Request(second, least, "auto", None, under=made))
        assert made is None or (got.predicted_seconds is not None and got.predicted_seconds > 0)
        timed += made is not None and bool(made.plan)
    assert timed > 10


def test_places_are_those_of_the_recorded_variables() -> None:
    case = layers_in_parts(layers=1, parts=2)
    planner, _ = planner_of(case, 1 << 20)
    trace = planner.trace(planner.boundary())
    assert [trace.place(v) for v in range(trace.variables)] == ["", *["place of 1"] * 2, *["place of 2"] * 2]


def shown() -> tuple[Trace, Predicted]:
    case = layers_in_parts(layers=2, parts=2, weight_chunks=8, activation_chunks=2, machine=SLOW)
    places = {"places": ("train.py:7",), "variable_place": [-1, 0, -1, -1, -1]}
    whole = Trace(**{**vars(case.trace), **places, "fingerprint": 7})
    trace = cut(whole, case.first, case.count)
    problem = Problem.from_trace(trace, 10 * trace.chunk_bytes)
    plan = Plan(policy="demand")
    return trace, Predicted(problem, simulate_events(problem, plan)[1], plan)


def test_measured_events_find_their_variable() -> None:
    trace, predicted = shown()
    rows = [
        function(20.0, 22.0, 0, 0, iteration=2),
        event(kinds.COPY_IN, 22.0, 24.5, bytes=400, variable=1, region=0, index=1, iteration=2),
        event(kinds.COPY_IN, 24.5, 25.0, bytes=200, variable=3, region=0, index=1, iteration=2),
        iteration(2, 20.0, 28.0),
    ]
    found = json.loads(measured_to_perfetto(recording(rows), predicted, trace))["traceEvents"]
    copies = {row["name"]: row["args"] for row in found if row["pid"] == 3 and row["name"].startswith("variable")}
    # By number the trace's variable 3 would be a part of another weight.
    assert copies["variable 1"]["of_bytes"] == 800 and copies["variable 1"]["in_parts"] == 2
    assert copies["variable 1"]["allocated_at"] == "train.py:7"
    assert copies["variable 3"]["of_bytes"] == 200
    simulated = {row["name"] for row in found if row["pid"] == 1}
    assert "variable 1, chunks 4..7 (demand)" in simulated


def test_the_report_names_whole_variables_and_places() -> None:
    trace, predicted = shown()
    rows = [
        function(20.0, 22.0, 0, 0, iteration=2),
        event(kinds.STALL_SWAP_IN, 23.5, 24.5, function=1, index=1, variable=1, region=0, iteration=2, thread=1),
        event(kinds.STALL_SWAP_IN, 24.5, 25.0, function=1, index=1, variable=2, region=0, iteration=2, thread=1),
        event(kinds.STALL_SWAP_IN, 25.0, 25.5, function=1, index=1, variable=99, region=0, iteration=2, thread=1),
        iteration(2, 20.0, 28.0),
    ]
    found = recording(rows)
    table = list(wait_rows(RunSoFar([], {}, [], found, trace, predicted, "auto")))
    assert (table[0].waited_for, table[0].place) == ("variable 1 of 800 B", "train.py:7")
    # By number the trace's variable 2 would be a part of variable 1.
    others = {row.waited_for: row.place for row in table[1:]}
    assert others == {"variable 2 of 800 B": "", "variable 99": ""}


def test_simulated_tables_name_parts() -> None:
    trace, predicted = shown()
    labels = [row["label"] for row in stalls_by_variable(run_policy(predicted.problem, "idle"), 9)]
    assert "variable 2, chunks 0..3" in labels
    names = {row["name"] for row in json.loads(to_perfetto(predicted.problem, predicted.events, trace))["traceEvents"]}
    assert "variable 2, chunks 4..7 (demand)" in names
    assert "v3 (variable 2, chunks 0..3) 400 bytes" in trace.describe()


def test_the_prediction_of_a_run_is_made_with_its_plan() -> None:
    case = layers_in_parts(layers=3, parts=4)
    planner, core = planner_of(case, 14 * case.trace.chunk_bytes)
    ended = planner.boundary()
    observer = Observer(
        cast(Any, core), planner, timeline=None, report=None, summary=dict, record_places=lambda on: None
    )
    predicted = observer.predicted(planner.trace(ended))
    assert predicted is not None and planner.last_plan is not None
    assert predicted.plan.ins == planner.last_plan.ins
    assert predicted.events.seconds == pytest.approx(planner.last_plan.predicted_seconds)
