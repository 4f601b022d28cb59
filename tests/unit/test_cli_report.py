"""`swapd report`: what is drawn is what was simulated; files are whole; names from a trace stay names."""

import re
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from planning_traces import Builder

from swapd.cli import main
from swapd.observing.charts import LEFT, RIGHT, WIDTH, merged, picture, scene_chart, starts_chart
from swapd.observing.recording import Predicted
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Events, Held, Run, Stall
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Machine, Trace

HOSTILE = "</td><script>alert(1)</script> $x_{"
SVG = "{http://www.w3.org/2000/svg}"


def passes(layers: int = 6) -> Trace:
    b = Builder()
    made = [b.call(HOSTILE, [], [40_000], seconds=0.01)[0] for _ in range(layers)]
    for v in reversed(made):
        b.call("backward", [v], seconds=0.02)
        b.free(v)
    return b.trace(chunk_bytes=1000, machine=Machine(1e6, 1e6))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a$b_.trace"
    passes().save(path)
    return path


def five() -> tuple[Problem, Events]:
    """As in test_events: f0 0-1, out 1-3, f1 waits until 3, f2 4-5, in 5-9, f3 5-6, f4 waits until 9."""
    b = Builder()
    b.call("f0", [], [4], seconds=1.0)
    b.call("f1", [], [4], seconds=1.0)
    b.free(1)
    b.call("f2", [], [4], seconds=1.0)
    b.free(2)
    b.call("f3", [], seconds=1.0)
    b.call("f4", [0], seconds=1.0)
    b.free(0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), 6)
    return problem, simulate_events(problem, Plan((Out(0, 0, 4, 0),), (In(0, 0, 4, 2, 1, 4),)))[1]


def boxes(chart: str) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of the boxes of each look, in tenths of an iteration."""
    found: dict[str, list[tuple[float, float]]] = {}
    width = (WIDTH - LEFT - RIGHT) / 10
    for box in xml.etree.ElementTree.fromstring(picture(chart, "title")).iter(f"{SVG}rect"):
        left, wide = float(box.attrib["x"]) - LEFT, float(box.attrib["width"])
        found.setdefault(box.attrib["class"], []).append((round(left / width, 2), round((left + wide) / width, 2)))
    return found


def test_the_picture_shows_the_simulation() -> None:
    problem, events = five()
    scene = Predicted(problem, events, Plan()).scene()
    assert scene.live == [(0, 4), (3, 8), (4, 8), (5, 4), (9, 4)]
    shown = boxes(scene_chart(scene))
    assert shown["run"] == [(0, 1), (3, 6), (9, 10)]
    assert shown["out"] == [(1, 3)] and shown["in"] == [(5, 9)]
    assert shown["stall"] == shown["stall faint"] == [(1, 3), (6, 9)]
    assert "demand" not in shown
    assert [text for text in re.findall(r">([^<>]+)</text>", scene_chart(scene)) if not text[0].isdigit()] == [
        "device memory in B", "budget 6 B", "compute", "link out", "link in", "waiting", "s",
    ]  # fmt: skip


def test_what_is_not_planned_looks_different() -> None:
    problem, _ = five()
    events = Events(10.0, (Run(0, 0, 1),), (Stall(1, -1, 1, 2),), (Copy(False, 0, 4, False, 1, 2),), (Held(0, 4),))
    shown = boxes(scene_chart(Predicted(problem, events, Plan()).scene()))
    assert shown["demand"] == [(1, 2)] and "in" not in shown


def test_spans_that_nearly_touch_are_drawn_as_one() -> None:
    spans = [Run(0, -1, 1), Run(1, 1.0000001, 2), Run(2, 3, 4), Run(3, 9, 12)]
    assert merged(spans, 10) == [(0, 2), (3, 1), (9, 1)]
    assert len(merged([Run(i, i, i + 0.5) for i in range(1_000_000)], 1e6)) < 5000


def test_measured_against_simulated() -> None:
    chart = starts_chart([0.0, 0.25, 0.5], [0.0, 0.5, 0.75])
    words = re.findall(r"<title>(.+?)</title>", chart)
    assert words[1] == "function 1: simulated 250 ms, measured 500 ms" and len(words) == 3
    points = [(float(x), float(y)) for x, y in re.findall(r'class="run" x="([\d.]+)" y="([\d.]+)"', chart)]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert (x2 - x0) == pytest.approx(2 * (x1 - x0), abs=0.3) and (y0 - y2) == pytest.approx(1.5 * (y0 - y1), abs=0.3)
    assert "simulated start in ms" in chart and "measured start in ms" in chart


def test_pictures_are_whole_and_repeatable(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.svg", "b.SVG"):
        assert main(["report", str(path), "--budget", "50%", "-o", str(tmp_path / name)]) == 0
    text = (tmp_path / "a.svg").read_bytes()
    assert xml.etree.ElementTree.fromstring(text).tag == f"{SVG}svg"
    assert text == (tmp_path / "b.SVG").read_bytes()
    assert "auto: 240000 needed in-core, a budget of 117 KiB" in capsys.readouterr().out
    assert b"auto: 240000 needed in-core, a budget of 117 KiB" in text


def test_a_page_needs_nothing_else(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.html"
    arguments = ["--budget", "50%", "--policy", "demand", "--measured", str(path), "-o", str(target)]
    assert main(["report", str(path), *arguments]) == 0
    text = target.read_text()
    assert text.count("<svg ") == 2
    assert not re.search(r"(src|href)=[\"'](?!data:)", text) and "url(" not in text
    assert "<script" not in text and "&lt;script&gt;" in text
    for words in ("two-phase bound", "functions that wait longest", "policy auto saves", "a$b_.trace"):
        assert words in text
    for tag in ("table", "tr", "td", "h2", "ul"):
        assert text.count(f"<{tag}>") == text.count(f"</{tag}>") > 0


def test_measured_starts_are_of_the_same_functions(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.trace"
    passes(5).save(other)
    target = tmp_path / "a.svg"
    arguments = ["report", str(path), "--budget", "50%", "-o", str(target), "--measured"]
    assert main([*arguments, str(path)]) == 0
    assert "measured against simulated starts" not in target.read_text() and "last function:" in target.read_text()
    assert main([*arguments, str(other)]) == 1
    assert "does not have the same functions" in capsys.readouterr().err
    fields = {name: getattr(passes(), name) for name in Trace.__dataclass_fields__}
    Trace(**{**fields, "function_start": np.zeros(12)}).save(other)
    assert main([*arguments, str(other)]) == 1
    assert "carries no measured starts" in capsys.readouterr().err


def test_user_errors(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path), "--budget", "50%", "-o", "x.jpg"]) == 2
    assert "'x.jpg' does not end in .svg, .html" in capsys.readouterr().err
    assert main(["report", str(path), "--budget", "50%", "-o", "/nowhere/x.svg"]) == 1
    assert "cannot write /nowhere/x.svg" in capsys.readouterr().err


def test_an_empty_iteration_can_be_drawn() -> None:
    problem = Problem.from_trace(Builder().trace(), 1)
    _, events = simulate_events(problem, Plan())
    text = picture(scene_chart(Predicted(problem, events, Plan()).scene()), '<&"')
    assert xml.etree.ElementTree.fromstring(text).tag == f"{SVG}svg"
