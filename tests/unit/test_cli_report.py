"""`swapd report`: what is drawn is what was simulated; files are whole; names from a trace stay names."""

import re
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planning_traces import Builder

from swapd.cli import main
from swapd.observing.pictures import measured_figure, merged, rendered, timeline_figure
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Events, Held, Run, Stall
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Machine, Trace

pytest.importorskip("matplotlib")

HOSTILE = "</td><script>alert(1)</script> $x_{"
PNG = b"\x89PNG\r\n\x1a\n"


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


def bars(axes: Any) -> list[tuple[float, float, float]]:
    """(start, end, row) of every bar."""
    found = []
    for collection in axes.collections:
        for bar in collection.get_paths():
            box = bar.get_extents()
            found.append((box.x0, box.x1, round((box.y0 + box.y1) / 2)))
    return sorted(found, key=lambda bar: (bar[2], bar[0]))


def test_the_picture_shows_the_simulation() -> None:
    problem, events = five()
    memory, rows = timeline_figure(problem, events, "title").axes
    live, budget = memory.lines
    assert live.get_xdata().tolist() == [0, 0, 3, 5, 10]  # of the functions at which it changes
    assert live.get_ydata().tolist() == [4, 4, 8, 4, 4]
    assert set(budget.get_ydata()) == {6}
    resident = memory.collections[0].get_paths()[0].vertices
    assert resident[:, 1].max() == 4 and resident[:, 0].max() == 10
    stalls = [patch.get_x() for patch in memory.patches]
    assert stalls == [1, 6]
    assert bars(rows) == [(0, 1, 0), (3, 6, 0), (9, 10, 0), (1, 3, 1), (5, 9, 2), (1, 3, 3), (6, 9, 3)]
    assert [label.get_text() for label in rows.get_yticklabels()] == ["compute", "out link", "in link", "stalls"]


def test_what_is_not_planned_is_black() -> None:
    problem, _ = five()
    events = Events(2.0, (Run(0, 0, 1),), (Stall(1, -1, 1, 2),), (Copy(False, 0, 4, False, 1, 2),), (Held(0, 4),))
    rows = timeline_figure(problem, events, "title").axes[1]
    black = [c for c in rows.collections if len(c.get_paths()) and c.get_facecolor()[0].tolist() == [0, 0, 0, 1]]
    assert len(black) == 1
    assert rows.get_legend().get_texts()[0].get_text() == "on demand"


def test_spans_that_nearly_touch_are_drawn_as_one() -> None:
    spans = [Run(0, -1, 1), Run(1, 1.0000001, 2), Run(2, 3, 4), Run(3, 9, 12)]
    assert merged(spans, 10) == [(0, 2), (3, 1), (9, 1)]
    assert len(merged([Run(i, i, i + 0.5) for i in range(1_000_000)], 1e6)) < 5000


def test_measured_against_simulated() -> None:
    (axes,) = measured_figure(np.array([0.0, 0.25, 0.5]), np.array([0.0, 0.5, 0.75]), "title").axes
    same, functions = axes.lines
    assert list(same.get_xdata()) == list(same.get_ydata()) == [0, 750]
    assert functions.get_xdata().tolist() == [0, 250, 500]
    assert functions.get_ydata().tolist() == [0, 500, 750]
    assert axes.get_xlabel() == "simulated start in ms"


def test_pictures_are_whole_and_repeatable(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.png", "a.svg", "b.SVG"):
        assert main(["report", str(path), "--budget", "50%", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    text = (tmp_path / "a.svg").read_bytes()
    assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg")
    assert text == (tmp_path / "b.SVG").read_bytes()
    assert "auto: live peak 234 KiB in 117 KiB" in capsys.readouterr().out


def test_a_page_needs_nothing_else(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.html"
    arguments = ["--budget", "50%", "--policy", "demand", "--measured", str(path), "-o", str(target)]
    assert main(["report", str(path), *arguments]) == 0
    text = target.read_text()
    assert text.count('src="data:image/png;base64,iVBORw0KGgo') == 2
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
    target = tmp_path / "a.png"
    arguments = ["report", str(path), "--budget", "50%", "-o", str(target), "--measured"]
    assert main([*arguments, str(path)]) == 0
    assert target.read_bytes().startswith(PNG)
    assert main([*arguments, str(other)]) == 1
    assert "does not have the same functions" in capsys.readouterr().err
    fields = {name: getattr(passes(), name) for name in Trace.__dataclass_fields__}
    Trace(**{**fields, "function_start": np.zeros(12)}).save(other)
    assert main([*arguments, str(other)]) == 1
    assert "carries no measured starts" in capsys.readouterr().err


def test_without_matplotlib(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(path), "--budget", "50%", "-o", "x.png"]) == 1
    assert "pip install 'ooc-alloc[report]'" in capsys.readouterr().err


def test_user_errors(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path), "--budget", "50%", "-o", "x.jpg"]) == 2
    assert "'x.jpg' does not end in .png, .svg, .html" in capsys.readouterr().err
    assert main(["report", str(path), "--budget", "50%", "-o", "/nowhere/x.png"]) == 1
    assert "cannot write /nowhere/x.png" in capsys.readouterr().err


def test_an_empty_iteration_can_be_drawn() -> None:
    problem = Problem.from_trace(Builder().trace(), 1)
    _, events = simulate_events(problem, Plan())
    assert rendered(timeline_figure(problem, events, r"$\bad{$"), "png").startswith(PNG)
