"""The report's page: whole, alone, escaped; its sentences follow from the figures."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree
from dataclasses import replace
from typing import Any

import pytest
from planning_traces import Builder
from recordings import recording, two_iterations
from test_recording import predicted_of, trace_of

from ooc_alloc import timeline as kinds
from swapd.observing.charts import scene_chart, steps_chart, ticks
from swapd.observing.recording import Bar, Predicted, Scene
from swapd.observing.report_facts import RunSoFar, _disk_advice, _place_advice, _run_advice, comparison, wait_rows
from swapd.observing.report_page import page
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import simulate_events
from swapd.step_times import Step
from swapd.trace.trace import Machine, Trace

HOSTILE = "</title></td><script>alert(1)</script><img src=x onerror=alert(1)>'\"&"
SUMMARY: dict[str, Any] = {
    "pid": 4711, "device": "emulated", "budget_bytes": 10_000, "live_peak_bytes": 20_000, "oversubscription": 2.0,
    "device_peak_bytes": 10_000, "swap_out_bytes": 5000, "swap_in_bytes": 4000, "demand_swap_in_bytes": 100,
    "clean_drop_bytes": 10, "policy": "auto", "plan_count": 1, "divergence_count": 0,
    "driver_failure_count": 0, "min_budget_bytes": 9000,
}  # fmt: skip
ON_DISK = {
    **SUMMARY, "disk_budget_bytes": 1 << 20, "disk_peak_bytes": 300 << 10, "disk_written_bytes": 7 << 20,
    "disk_read_bytes": 5 << 20, "disk_failure_count": 0, "peak_rss_bytes": 250 << 20,
}  # fmt: skip
STEPS = [Step(2.0, 1.0, False), Step(1.0, 0.25, True)]


def so_far(**changes: Any) -> RunSoFar:
    """A run of two iterations, of which the second one is under a plan."""
    trace = trace_of()
    made = RunSoFar(["train.py"], SUMMARY, STEPS, recording(two_iterations()), trace, predicted_of(trace), "auto")
    return replace(made, **changes)


def all_in_demand_mode(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "flags": kinds.ON_DEMAND} if row["kind"] == kinds.ITERATION else row for row in rows]


def shown(run: RunSoFar) -> str:
    return page(run, advise=False)


class Balanced(html.parser.HTMLParser):
    """Raises where tags do not match, and collects the addresses that a browser would ask for."""

    void = ("meta", "br", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wanted: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.wanted += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Balanced:
    reader = Balanced()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_no_other_file() -> None:
    text = shown(so_far())
    found = parsed(text)
    assert found.wanted == []
    assert not found.tags & {"script", "img", "link", "iframe", "object", "embed"}
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_has_what_a_person_looks_for() -> None:
    text = shown(so_far(recording=recording(all_in_demand_mode(two_iterations()))))
    for heading in ("What happened", "What to change", "Memory over time", "predicted", "What waited longest"):
        assert heading in text
    assert "train.py:7 in &lt;b&gt;" in text  # where the variable was allocated
    assert "<code>use (function 1)</code>" in text
    assert "room for its result" in text


def test_nothing_of_a_program_becomes_markup() -> None:
    names = {number: HOSTILE for number in (0, 1)}
    fields = {name: getattr(trace_of(), name) for name in Trace.__dataclass_fields__}
    trace = Trace(**{**fields, "places": (HOSTILE,), "function_names": (HOSTILE, HOSTILE)})
    text = shown(
        so_far(
            arguments=[HOSTILE],
            recording=recording(two_iterations(), names=names),
            trace=trace,
            predicted=predicted_of(trace),
            summary={**SUMMARY, "device": HOSTILE, "policy": HOSTILE},
        )
    )
    found = parsed(text)
    assert not found.tags & {"script", "img"}
    assert found.wanted == []
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6  # the title twice, the device, a function, a place, who allocated


def test_a_run_without_iterations_or_prediction_is_a_page_too() -> None:
    text = shown(so_far(recording=recording([], now=0.0), trace=None, predicted=None, steps=[]))
    parsed(text)
    assert "Nothing was found that would help" in text
    assert "No function waited" in text


def test_predicted_stands_beside_measured() -> None:
    rows = {name: (predicted, measured) for name, predicted, measured in comparison(so_far())}
    assert rows["an iteration"] == ("4.50 s", "8.00 s")
    assert rows["of it, functions waiting"] == ("0 ns", "1.00 s")
    assert rows["moved in"] == ("0 B", "3.91 KiB")


def test_a_wait_names_function_variable_and_place() -> None:
    found = recording(all_in_demand_mode(two_iterations()))
    room, variable = wait_rows(so_far(recording=found))
    assert (room.seconds, room.function, room.waited_for) == (1.0, "use (function 1)", "room for its result")
    assert room.place == ""  # the function allocates nothing that is known
    assert variable.seconds == 0.5  # of two iterations
    assert variable.waited_for == "variable 0 of 3.91 KiB"
    assert variable.place == "train.py:7 in <b>"
    assert variable.allocated_by == "make (function 0)"


def test_one_place_that_most_waiting_is_for_is_named() -> None:
    found = recording(all_in_demand_mode(two_iterations()))
    (advice,) = _place_advice(so_far(recording=found))
    assert "33% of the waiting" in advice
    assert "train.py:7 in <b>" in advice
    assert list(_place_advice(so_far(recording=recording([])))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan_count": 0}, "No plan was made"),
        ({"divergence_count": 9}, "departed from its plan 9 times"),
        ({"driver_failure_count": 2}, "swapd doctor"),
        ({"demand_swap_in_bytes": 4000}, "the run was short"),
    ],
)
def test_advice_follows_from_the_figures(changes: dict[str, int], words: str) -> None:
    assert list(_run_advice(so_far())) == []
    (text,) = _run_advice(so_far(summary={**SUMMARY, **changes}))
    assert words in text


def test_a_disk_is_shown_in_the_place_of_host_memory() -> None:
    text = shown(so_far(summary=ON_DISK, recording=recording(two_iterations(), disk_budget_bytes=1 << 20)))
    for words in (
        "Swapped data were on the disk: 300 KiB of the 1.00 MiB that they may take",
        "7.00 MiB were written and 5.00 MiB read",
        "The process had 250 MiB of the machine&#x27;s memory at most",
        "left without a copy, as the disk had them still",
        "this machine&#x27;s memory",
        "disk out",
        "disk in",
    ):
        assert words in text, words
    assert "link out" not in text and "emulated device" not in text and "about a GPU" not in text
    without = shown(so_far())
    assert "disk" not in without and "link out" in without and "as the host had them still" in without


def predicted_with(machine: Machine) -> Predicted:
    """Four variables of 4000 bytes that a budget of 10000 cannot hold at once; the functions take a second each."""
    b = Builder()
    for index in range(4):
        b.call(f"make {index}", [], [4000], seconds=1.0)
    for index in range(4):
        b.call(f"use {index}", [index], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1000, machine=machine), 10_000)
    plan = make_plan(problem)
    return Predicted(problem, simulate_events(problem, plan)[1], plan)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(200.0, 1e6), "the disk is written to for"),
        (Machine(1e6, 200.0), "the disk is read from for"),
        (Machine(1e6, 1e6), None),
    ],
)
def test_a_plan_that_the_disk_is_the_limit_of_says_so(machine: Machine, words: str | None) -> None:
    predicted = predicted_with(machine)
    assert predicted.events.copies
    assert list(_disk_advice(so_far(predicted=predicted))) == []  # without a disk it is the link's matter
    found = list(_disk_advice(so_far(predicted=predicted, summary=ON_DISK)))
    assert len(found) == (words is not None)
    assert words is None or (found[0].startswith("The disk is the limit: ") and words in found[0])
    assert words is None or "its functions run 8.00 s" in found[0]


def test_a_disk_that_fails_is_told_of() -> None:
    (text,) = _disk_advice(so_far(summary={**ON_DISK, "disk_failure_count": 3}))
    assert text.startswith("3 reads or writes of the disk failed")


def boxes(svg: str, kind: str) -> list[tuple[float, float]]:
    """(left, width) of the rectangles of a class."""
    root = xml.etree.ElementTree.fromstring(svg)
    return [(float(r.get("x", 0)), float(r.get("width", 0))) for r in root.iter("rect") if r.get("class") == kind]


def test_bars_lie_where_their_times_are() -> None:
    scene = Scene(
        10.0, 1000, [(0.0, 500), (5.0, 900)], [], [Bar(2.0, 4.0)], [Bar(5.0, 6.0, False)], [], [Bar(8.0, 9.0)]
    )
    svg = scene_chart(scene)
    (run,), (demand,) = boxes(svg, "run"), boxes(svg, "demand")
    (stall,), (band,) = boxes(svg, "stall"), boxes(svg, "stall faint")
    second = run[1] / 2
    assert demand[0] - run[0] == pytest.approx(3 * second, abs=0.2)
    assert stall == band
    assert stall[0] - run[0] == pytest.approx(6 * second, abs=0.2)
    half = scene_chart(scene, seconds=20.0)
    assert boxes(half, "run")[0][1] == pytest.approx(run[1] / 2, abs=0.2)


def test_memory_is_drawn_against_the_budget() -> None:
    scene = Scene(10.0, 1000, [(0.0, 500)], [], [], [], [], [])
    svg = scene_chart(scene, lanes=False)
    (used,) = re.findall(r'class="used" d="M[\d.]+ ([\d.]+)', svg)
    (budget,) = re.findall(r'class="budget" x1="[\d.]+" y1="([\d.]+)"', svg)
    (zero,) = re.findall(r'class="used" d="[^"]*V([\d.]+) H[\d.]+ Z"', svg)
    assert (float(zero) - float(used)) * 2 == pytest.approx(float(zero) - float(budget), abs=0.3)
    assert "budget 1000 B" in svg


def test_many_steps_share_bars_and_many_points_are_thinned() -> None:
    assert len(boxes(steps_chart([Step(1.0, 0.5, True)] * 30), "run")) == 30
    assert len(boxes(steps_chart([Step(1.0, 0.5, True)] * 5000), "run")) <= 400
    points = [(float(n), 1000 if n == 5001 else n % 7) for n in range(10_000)]
    svg = scene_chart(Scene(1e4, 1000, points, [], [], [], [], []), lanes=False)
    assert len(svg) < 120_000
    (path,) = re.findall(r'class="used" d="([^"]*) V', svg)
    heights = [float(y) for y in re.findall(r"V([\d.]+)", path)]
    assert sum(height < 40 for height in heights) == 1  # the one peak is still there


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(10, [0, 5, 10]), (1, [0, 0.5, 1]), (0.8, [0, 0.2, 0.4, 0.6, 0.8]), (0, [0]), (float("inf"), [0])],
)
def test_ticks_are_round(highest: float, expected: list[float]) -> None:
    assert ticks(highest, 4) == pytest.approx(expected)
