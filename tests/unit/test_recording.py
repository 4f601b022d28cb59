"""Recordings: the ring's events as iterations, pictures and a Perfetto trace beside what was predicted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from planning_traces import Builder
from recordings import event, function, iteration, recording, two_iterations

from ooc_alloc import timeline as kinds
from swapd.observing.perfetto import IN, MEASURED, OUT, SIMULATED, encoded, measured_to_perfetto
from swapd.observing.recording import Bar, Predicted, _without
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Machine, Trace


def trace_of(fingerprint: int = 7) -> Trace:
    b = Builder()
    b.call("make", [], [4000], seconds=2.0)
    b.call("use", [0], seconds=2.5)
    b.free(0)
    made = b.trace(chunk_bytes=1000, machine=Machine(1e3, 1e3))
    fields = {name: getattr(made, name) for name in Trace.__dataclass_fields__}
    return Trace(**{**fields, "fingerprint": fingerprint, "places": ("train.py:7 in <b>",), "variable_place": [0]})


def predicted_of(trace: Trace) -> Predicted:
    problem = Problem.from_trace(trace, 10_000)
    return Predicted(problem, simulate_events(problem, Plan())[1], Plan(policy="auto"))


def test_the_last_planned_iteration_is_the_one_to_show() -> None:
    found = recording(two_iterations())
    assert [(span.number, span.planned, span.end - span.start) for span in found.spans] == [
        (1, False, 10),
        (2, True, 8),
    ]
    assert found.span_of().number == 2  # type: ignore[union-attr]
    assert found.span_of(8) is None
    assert recording([]).span_of() is None


def test_an_iteration_that_began_before_the_ring_is_left_out() -> None:
    assert [span.number for span in recording(two_iterations()[5:]).spans] == [
        1,
        2,
    ]  # the first one began with the core
    assert [span.number for span in recording(two_iterations()[5:], lost=5).spans] == [2]
    assert recording([function(25.0, 26.0, 0, 0, 3), iteration(3, 20.0, 28.0)]).spans == []


def test_a_scene_is_in_its_own_time() -> None:
    scene = recording(two_iterations()).scene(20.0, 28.0)
    assert scene.seconds == 8.0
    assert scene.memory == [(0.0, 4000), (2.0, 9000)]
    assert scene.live == [(0.0, 4000), (2.0, 12000), (7.5, 8000)]
    assert scene.runs == [Bar(0.0, 2.0), Bar(4.5, 7.0)]
    assert scene.ins == [Bar(2.0, 4.5)]
    assert scene.outs == []
    assert scene.stalls == [Bar(3.5, 4.5)]


def test_functions_do_not_run_while_they_wait() -> None:
    scene = recording(two_iterations()).scene(10.0, 20.0)
    assert scene.runs[:2] == [Bar(0.0, 2.0), Bar(4.0, 6.0)]  # the second waited from 2 to 4
    assert scene.outs == [Bar(2.0, 4.0, False)]
    holes = [Bar(1.0, 2.0), Bar(3.0, 5.0)]
    assert _without([Bar(0.0, 4.0), Bar(4.5, 6.0)], holes) == [Bar(0.0, 1.0), Bar(2.0, 3.0), Bar(5.0, 6.0)]
    assert _without([Bar(1.2, 1.8)], holes) == []


def test_what_waited_is_added_up_by_function_and_variable() -> None:
    found = recording(two_iterations())
    rows = found.waits(found.spans)
    assert [(row.function, row.place, row.variable, row.seconds, row.times) for row in rows] == [
        ("use", 1, -1, 2.0, 1),
        ("use", 1, 0, 1.0, 1),
    ]
    assert [row.variable for row in found.waits(found.spans[1:])] == [0]
    assert found.waits([]) == []


def test_bytes_and_seconds_of_an_iteration() -> None:
    found = recording(two_iterations())
    first, second = found.spans
    assert found.moved_bytes(first, is_out=True) == found.moved_bytes(second, is_out=False) == 4000
    assert found.moved_bytes(first, is_out=False) == found.moved_bytes(second, is_out=True) == 0
    assert (found.stall_seconds(first), found.stall_seconds(second)) == (2.0, 1.0)


def test_what_is_not_over_lasts_until_now() -> None:
    found = recording([event(kinds.FUNCTION, 10.0, -1.0, function=0, thread=1)], now=15.0)
    assert found.scene(10.0, 15.0).runs == [Bar(0.0, 5.0)]
    (run,) = [e for e in loaded(found)["traceEvents"] if e["name"] == "make"]
    assert run["dur"] == 5e6
    assert run["args"]["still_runs"]


def loaded(*arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(measured_to_perfetto(*arguments))
    return found


def test_perfetto_shows_measured_and_predicted_on_one_axis() -> None:
    trace = trace_of()
    events = loaded(recording(two_iterations()), predicted_of(trace), trace)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    measured = {(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in spans if e["pid"] == MEASURED}
    assert ("use", 14.5, 2.5) in measured  # the axis begins with the first event, at 10
    assert ("variable 0 (demand)", 2.0, 2.0) in measured
    assert ("iteration 2", 10.0, 8.0) in measured
    predicted = {(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in spans if e["pid"] == SIMULATED}
    assert ("make", 10.0, 2.0) in predicted  # from the start of the second iteration
    assert ("use", 12.0, 2.5) in predicted
    counters = {
        (e["name"], e["ts"] / 1e6): e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == MEASURED
    }
    assert counters["used bytes", 12.0] == 9000
    assert counters["live bytes", 17.5] == 8000
    assert counters["budget bytes", 0.0] == 10_000


def test_perfetto_calls_the_rows_of_copies_by_where_they_go() -> None:
    trace = trace_of()
    for disk_budget, names, facts in (
        (0, ("out link", "in link"), {"swapped_to": "host memory"}),
        (5000, ("to the disk", "from the disk"), {"swapped_to": "disk", "disk_budget_bytes": 5000}),
    ):
        found = loaded(recording(two_iterations(), disk_budget_bytes=disk_budget), predicted_of(trace), trace)
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
        for process in (MEASURED, SIMULATED):
            assert (rows[process, OUT], rows[process, IN]) == names
        assert facts.items() <= found["otherData"].items()
        assert ("disk_budget_bytes" in found["otherData"]) == (disk_budget > 0)


def test_perfetto_says_where_a_variable_was_allocated() -> None:
    trace = trace_of()
    spans = [e for e in loaded(recording(two_iterations()), None, trace)["traceEvents"] if e["ph"] == "X"]
    (copy,) = [e for e in spans if e["name"] == "variable 0"]
    assert copy["args"]["allocated_at"] == "train.py:7 in <b>"
    assert copy["args"]["of_bytes"] == 4000
    assert not [e for e in spans if e["pid"] == SIMULATED]
    other = [e for e in loaded(recording(two_iterations()), None, trace_of(8))["traceEvents"] if e["ph"] == "X"]
    assert not any("allocated_at" in e["args"] for e in other)  # the numbers of another sequence


def test_every_row_of_a_perfetto_file_has_a_name() -> None:
    rows = [*two_iterations(), function(29.0, 30.0, 0, -1, 3, thread=2)]
    trace = trace_of()
    events = loaded(recording(rows), predicted_of(trace), trace)["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= named
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_names_obey_nobody() -> None:
    names = {0: "\x1b[31m\u202e" + "x" * 500, 1: "use"}
    text = measured_to_perfetto(recording(two_iterations(), names=names))
    assert "\\u001b" not in text
    assert "\\u202e" not in text
    assert "x" * 100 not in text


def test_an_empty_recording_is_a_file_too() -> None:
    assert loaded(recording([]))["otherData"]["events"] == 0


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_the_file_is_compressed_where_its_name_says_so(name: str) -> None:
    content = encoded('{"a": 1}', Path(name))
    assert (gzip.decompress(content) if name.endswith(".gz") else content) == b'{"a": 1}'
