"""`swapd report`: what is drawn is what was simulated; files are whole; names from a trace stay names; of a
job's ranks each figure stands in its rank's column.
"""

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

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


# the ranks of a job

SUMMARY = {
    "version": 1, "final": True, "pid": 31055, "device": "emulated", "budget_bytes": 14680064,
    "live_peak_bytes": 41992252, "fit_budget_bytes": 42336256, "device_peak_bytes": 14680064,
    "swap_out_bytes": 342089728, "swap_in_bytes": 346394624, "stall_seconds": 1.1687140859976353,
    "min_budget_bytes": 12845056, "demand_swap_in_bytes": 216584192, "planned_iteration_count": 5,
    "budget_rank_count": 1, "steps": 8, "main_step_count": 6, "main_step_seconds": 0.685459,
    "policy": "idle", "no_plan_reason": None,
}  # fmt: skip
NO_PLAN = "3 iterations came before their sequences' plans"


def summaries(folder: Path, *changes: dict[str, Any], name: str = "summary") -> list[str]:
    """Writes a summary of each rank, with these changes, and returns their paths."""
    paths = [folder / f"{name}.rank{number}.json" for number in range(len(changes))]
    for path, change in zip(paths, changes, strict=True):
        path.write_text(json.dumps(SUMMARY | change, indent=1) + "\n")
    return [str(path) for path in paths]


def job(folder: Path) -> list[str]:
    (folder / "timeline.rank0.json").write_text('{"traceEvents": []}')
    (folder / "ds_config.json").write_text("not ours, and no JSON")
    return summaries(
        folder,
        {"main_step_seconds": 0.5, "stall_seconds": 0.25},
        {"main_step_seconds": 1.25, "stall_seconds": 3.0, "budget_bytes": 8 << 20, "device": "</td><script>\x1b[2J"},
        {"main_step_seconds": None, "no_plan_reason": NO_PLAN, "planned_iteration_count": 0},
    )


def test_ranks_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    lines = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["rank 0", "rank 1, slowest", "rank 2"]
    shown = {label: figures for label, *figures in lines[1:]}
    assert shown["device"] == ["emulated", "</td><script>?[2J", "emulated"]  # no terminal obeys it
    assert shown["budget"] == ["14.0 MiB", "8.00 MiB", "14.0 MiB"]
    assert shown["live peak"] == ["40.0 MiB"] * 3 and shown["smallest budget"] == ["12544KiB"] * 3
    assert shown["main step"] == ["500 ms", "1.25 s", "none"]
    assert shown["stalls"] == ["250 ms", "3.00 s", "1.17 s"]
    assert shown["steps under a plan"] == ["5", "5", "0"]
    assert [line for (line,) in lines[-3:]] == [
        "The slowest is rank 1: its main step takes 1.25 s, 2.50 times that of rank 0, the fastest.",
        "Functions waited longest for memory in rank 1: 3.00 s; rank 0 least: 250 ms.",
        f"rank 2: {NO_PLAN}.",
    ]


def test_ranks_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, page = job(tmp_path), tmp_path / "ranks.html"
    assert main(["report", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["slowest"] == "rank 1" and len(facts["notes"]) == 3
    assert [(rank["name"], rank["file"]) for rank in facts["ranks"]] == [(f"rank {n}", paths[n]) for n in range(3)]
    assert [rank["main_step_seconds"] for rank in facts["ranks"]] == [0.5, 1.25, None]
    assert [rank["no_plan_reason"] for rank in facts["ranks"]] == [None, None, NO_PLAN]
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"{page}: The slowest is rank 1")
    text = page.read_text()
    assert '<th class="number">rank 1, slowest</th>' in text and "<script" not in text and "&lt;script&gt;" in text
    assert '<td>main step</td><td class="number">500 ms</td><td class="number">1.25 s</td>' in text


def test_files_may_be_named_and_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = job(tmp_path)
    assert main(["report", paths[2], paths[0], "--json"]) == 0  # rank 1 is left out on purpose
    facts = json.loads(capsys.readouterr().out)
    assert [rank["name"] for rank in facts["ranks"]] == ["rank 2", "rank 0"] and facts["slowest"] is None
    (tmp_path / "after").mkdir()
    after = summaries(tmp_path / "after", {"main_step_seconds": 0.25})
    assert main(["report", paths[0], after[0], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [rank["name"] for rank in facts["ranks"]] == [paths[0], after[0]] and facts["slowest"] == paths[0]


def test_many_ranks_are_shown_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summaries(tmp_path, *({"main_step_seconds": 1 + n / 1000} for n in range(12)))
    child = tmp_path / "summary.rank1.31055.json"  # of a child of rank 1: its process number, not a rank on host 1
    child.write_text(json.dumps(SUMMARY))
    (tmp_path / "summary.rank1.0.json").write_text(json.dumps(SUMMARY | {"main_step_seconds": 1.0}))
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"rank [\d.]+\b", out.partition("None is")[0]) == [f"rank {n}" for n in (*range(12), "1.0")]
    assert out.count("live peak") == 2 and "…" not in out
    assert "None is the slowest: all main steps take about as long" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 1, "budget_by', "summary.rank1.json is damaged, no JSON: run the job again"),
        ("[" * 100_000, "summary.rank1.json is damaged"),
        ("[]", "summary.rank1.json is no summary of a run"),
        ('{"traceEvents": []}', "take what OOC_SUMMARY=FILE or `swapd run --json FILE` wrote"),
        (json.dumps(SUMMARY | {"version": 2}), "summary.rank1.json is no summary of a run (version 1)"),
        (json.dumps(SUMMARY | {"budget_bytes": None}), "summary.rank1.json is no summary"),
        (json.dumps(SUMMARY | {"min_budget_bytes": -1}), "summary.rank1.json is no summary"),
        (json.dumps(SUMMARY | {"stall_seconds": float("nan")}), "summary.rank1.json is no summary"),
        (json.dumps(SUMMARY | {"steps": "8"}), "summary.rank1.json is no summary"),
        (json.dumps(SUMMARY | {"no_plan_reason": ["why"]}), "summary.rank1.json is no summary"),
    ],
)
def test_a_file_that_is_no_summary(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = summaries(tmp_path, {}, {}, {})
    Path(paths[1]).write_text(content)
    for asked in ([str(tmp_path)], paths, [paths[1]]):
        assert main(["report", *asked]) == 1
        out, err = capsys.readouterr()
        assert out == "" and message in err and "Traceback" not in err


def test_a_folder_without_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> str:
        assert main(["report", str(tmp_path)]) == 1
        return capsys.readouterr().err

    assert f"start the job with OOC_SUMMARY={tmp_path}/summary.json" in refused()
    paths = summaries(tmp_path, {}, {}, {})
    Path(paths[1]).unlink()
    assert "has no summary of rank 1: it managed nothing, was killed, or wrote on another host" in refused()
    summaries(tmp_path, {"budget_rank_count": 4}, {}, {})  # the ranks of a device know how many they are
    assert "has no summary of rank 3: " in refused()
    summaries(tmp_path, {}, name="of_yesterday")
    assert "summaries of 2 runs: name the files of one of of_yesterday.rank*.json, summary.rank*.json" in refused()


def test_options_of_a_trace_are_not_for_ranks(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path)
    for arguments, message in (
        ([str(tmp_path), "--budget", "1GiB"], "--budget is for one TRACE, not for summaries of ranks"),
        ([str(tmp_path), "-o", "x.svg"], "'x.svg' does not end in .html"),
        ([str(path), "--budget", "50%"], "Missing option '--output'"),
        ([str(path), "--budget", "50%", "--json"], "--json is for summaries of ranks"),
        ([], "Missing option '--output'"),
        (["-o", "x.html"], "Missing argument 'TRACE'"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
