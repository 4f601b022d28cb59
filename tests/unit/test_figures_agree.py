"""Every command says the same of a trace: a figure under one name, and in which budgets nothing moves."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_cases import cut, layers_in_parts
from planning_traces import Builder

from ooc.prometheus.catalogue import CATALOGUE
from swapd import planner, summary
from swapd.cli import main
from swapd.recompute import account
from swapd.trace.trace import Machine, Trace
from swapd.units import format_need

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1 << 16
POLICIES = ("auto", "demand", "idle", "window")  # whose memory is in chunks, without fragments


def slabs_trace(slab_chunks: int = 10) -> Trace:
    """Layers forward and backward, beside small tensors; the host is busy in between."""
    b = Builder()
    weights = [b.entry(CHUNK // 2) for _ in range(6)]
    made = [b.call(f"forward{i}", [w], [3.5 * CHUNK], seconds=0.01)[0] for i, w in enumerate(weights)]
    for i in reversed(range(6)):
        b.call(f"backward{i}", [made[i]], writes=[weights[i]], seconds=0.02)
        b.free(made[i])
    trace = b.trace(CHUNK, Machine(1e7, 1e7))
    busy = np.arange(trace.functions) * 5e-4
    return replace(trace, slab_chunks_peak=slab_chunks, function_start=trace.function_start + busy)


def ranges_trace() -> Trace:
    """Layers whose functions use parts of variables."""
    case = layers_in_parts(3, 4, 8, 8, chunk_bytes=CHUNK, machine=Machine(1e8, 1e8), training=True)
    return cut(case.trace, case.first, case.count)


@pytest.fixture(params=[slabs_trace, ranges_trace], ids=["slabs", "ranges"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    trace: Trace = request.param()
    trace.save(tmp_path / "a.trace")
    return tmp_path / "a.trace"


Capture = pytest.CaptureFixture[str]


def facts_of(capsys: Capture, *arguments: object, status: int = 0) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == status
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def printed(capsys: Capture, *arguments: object, status: int = 0) -> str:
    assert main([*map(str, arguments)]) == status
    return " ".join("".join(capsys.readouterr()).split())


def recorded(capfd: pytest.CaptureFixture[str], path: Path) -> tuple[dict[str, Any], str]:
    """What `swapd record` says of the trace, as JSON and for people."""
    copy, program = path.with_name("copy.trace"), path.with_name("program.py")
    program.write_text(f"import os, shutil; shutil.copy({str(path)!r}, os.environ['OOC_TRACE'])")
    assert main(["record", "--json", "-o", str(copy), str(program)]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert main(["record", "-o", str(copy), str(program)]) == 0
    return facts, " ".join(capfd.readouterr().out.split())


def test_a_figure_has_one_value_under_its_name(path: Path, tmp_path: Path, capfd: Capture) -> None:
    other = tmp_path / "other.trace"
    replace(Trace.load(path), slab_chunks_peak=0).save(other)
    record, words = recorded(capfd, path)
    plan = facts_of(capfd, "plan", path, "--budget", "70%", "-o", tmp_path / "a.plan")
    auto, *arms = (facts_of(capfd, "simulate", path, "--budget", "70%", "--policy", arm) for arm in POLICIES)
    given = facts_of(capfd, "simulate", path, "--plan", tmp_path / "a.plan")
    compared = facts_of(capfd, "compare", path, "--budget", "70%", "--policies", ",".join(POLICIES))
    rows = {row["policy"]: row for row in compared["policies"]}
    swept = facts_of(capfd, "compare", path, "--budgets", "70%,100%", "--policies", "auto")
    side = facts_of(capfd, "compare", path, other, "--budget", "70%", "--policies", "auto")
    (of_two,) = (row for row in side["traces"] if row["name"] == "a")
    assert swept["policies"][0]["seconds"][0] == side["policies"][0]["seconds"][side["traces"].index(of_two)]

    under_auto = {"seconds": swept["policies"][0]["seconds"][0], "lower_bound_seconds": swept["lower_bound_seconds"][0]}
    swept_too = {"budget_bytes": swept["budgets_bytes"][0], **under_auto}
    alike = {"lower_bound_seconds": plan["bound_seconds"], "seconds": plan["predicted_seconds"]}
    same = defaultdict(list)
    for facts in (record, plan, auto, compared, rows["auto"], swept, swept_too, of_two, alike):
        for key, value in facts.items():
            if isinstance(value, int | float | None) and key != "planning_seconds":
                same[key].append(value)
    for key, values in same.items():
        assert all(value == values[0] for value in values), key
    for key in ("fit_budget_bytes", "min_budget_bytes", "compute_seconds", "chunk_bytes"):
        assert len(same[key]) == 6, key
    assert len(same["seconds"]) == 5 and plan["stall_seconds"] > 0 and plan["out_bytes"] > 0
    own = {"budget_bytes": 0, "planning_seconds": 0.0, "advice": []}  # whole chunks; as given; of a fixed plan
    assert {**given, **own} == {**auto, **own, "policy": plan["policy"]}
    for arm in arms:
        both = (rows[arm["policy"]].keys() & arm.keys()) - {"planning_seconds"}
        assert {key: arm[key] for key in both} == {key: rows[arm["policy"]][key] for key in both}

    fit, least = format_need(plan["fit_budget_bytes"]), format_need(plan["min_budget_bytes"])
    times = "1.43 times the budget"  # of 70% of it
    assert f"needed in-core {fit} " in words and f"least budget {least} " in words
    for command in ("plan", "simulate"):
        text = printed(capfd, command, path, "--budget", "70%")
        assert f"the least that would do {least} needed in-core {fit}, {times}" in text
    assert f"needed in-core {fit}, budget" in printed(capfd, "compare", path, "--budget", "70%", "--policies", "auto")
    page = tmp_path / "a.html"
    assert f"auto: {fit} needed in-core, a budget of" in printed(capfd, "report", path, "--budget", "70%", "-o", page)
    assert f"<td>{fit}, {times}</td>" in page.read_text()


def moved(facts: dict[str, Any]) -> int:
    return int(facts["out_bytes"] + facts["in_bytes"] + facts["dropped_bytes"])


@pytest.mark.parametrize("chunk", [CHUNK, 3 * CHUNK // 2])
@pytest.mark.medium
def test_what_is_needed_in_core_fits_everywhere_and_less_nowhere(path: Path, chunk: int, capsys: Capture) -> None:
    sizes = ("--chunk-size", chunk)
    fit = facts_of(capsys, "plan", path, "--budget", "100%", *sizes)["fit_budget_bytes"]
    assert fit % chunk == 0
    for budget, fits in (("100%", True), (fit, True), (fit - 1, False), (fit - chunk, False)):
        case = (path, "--budget", budget, *sizes)
        plan = facts_of(capsys, "plan", *case)
        assert plan["budget_bytes"] == (fit if budget == "100%" else budget)
        words = printed(capsys, "plan", *case)
        assert ("everything fits" in words) == (" 1.00 times the budget" in words) == fits
        assert (plan["planned_out_count"] == 0) == fits
        for policy in POLICIES:
            facts = facts_of(capsys, "simulate", *case, "--policy", policy)
            assert (moved(facts) == 0) == fits, policy
            found = [advice["budget_bytes"] for advice in facts["advice"] if advice["kind"] == "fits"]
            assert found == ([] if fits else [fit])
            if fits:
                assert facts["seconds"] == pytest.approx(facts["compute_seconds"])
        compared = facts_of(capsys, "compare", *case, "--policies", "in-core,auto")
        in_core, auto = compared["policies"]
        assert in_core["can_run"] == (moved(auto) == 0) == fits and in_core["peak_bytes"] == fit
        swept = facts_of(capsys, "compare", path, "--budgets", budget, *sizes, "--policies", "in-core,auto")
        assert (swept["policies"][0]["seconds"][0] is not None) == fits
        assert swept["policies"][0]["smallest_budget_bytes"] == fit


def test_the_smallest_budget_does_in_every_command_and_less_in_none(path: Path, capsys: Capture) -> None:
    least = facts_of(capsys, "plan", path, "--budget", "100%")["min_budget_bytes"]
    swept = facts_of(capsys, "compare", path, "--budgets", f"{least},{least - 1}", "--policies", "demand,auto")
    assert swept["lower_bound_seconds"][0] is not None is swept["lower_bound_seconds"][1]
    for row in swept["policies"]:
        assert row["seconds"][0] is not None is row["seconds"][1] and row["smallest_budget_bytes"] == least
    for command in (["plan"], ["simulate"], ["report", "-o", path.with_name("a.svg")]):
        printed(capsys, *command, path, "--budget", least)
        text = printed(capsys, *command, path, "--budget", least - 1, status=1)
        (needed,) = re.findall(r"--budget (\S+) would do", text)
        printed(capsys, *command, path, "--budget", needed)
    refused = facts_of(capsys, "compare", path, "--budget", least - 1, "--policies", "demand,auto", status=1)
    assert [row["least_budget_bytes"] for row in refused["policies"]] == [least] * 2


def test_small_tensors_need_twice_what_they_take_everywhere(tmp_path: Path, capsys: Capture) -> None:
    """They get at most half of a budget: where they take more than all else, that is needed in-core, and the least."""
    path = tmp_path / "a.trace"
    slabs_trace(41).save(path)
    facts = facts_of(capsys, "plan", path, "--budget", "100%")
    assert facts["min_budget_bytes"] == facts["fit_budget_bytes"] == facts["budget_bytes"] == 2 * 41 * CHUNK
    assert facts["planned_out_count"] == 0
    for command in (["plan"], ["simulate"], ["report", "-o", path.with_name("a.svg")]):
        text = printed(capsys, *command, path, "--budget", 2 * 41 * CHUNK - 1, status=1)
        assert "small tensors need 2.56 MiB and get at most half" in text and "--budget 5248KiB would do" in text


@pytest.mark.parametrize("size", [CHUNK, 3 * CHUNK // 2], ids=["its own chunks", "larger chunks"])
def test_a_plan_brings_the_budget_that_it_was_made_for(size: int, tmp_path: Path, capsys: Capture) -> None:
    trace, plan = tmp_path / "a.trace", tmp_path / "a.plan"
    slabs_trace().save(trace)
    fit = facts_of(capsys, "plan", trace, "--budget", "10MiB", "--chunk-size", size)["fit_budget_bytes"]
    made = facts_of(capsys, "plan", trace, "--budget", fit - size, "--chunk-size", size, "-o", plan)
    simulated = facts_of(capsys, "simulate", trace, "--plan", plan)
    assert simulated["budget_bytes"] == made["budget_bytes"] == fit - size
    assert simulated["seconds"] == made["predicted_seconds"]


def test_the_page_of_figures_names_what_there_is(capsys: Capture, tmp_path: Path) -> None:
    slabs_trace().save(tmp_path / "a.trace")
    case = (tmp_path / "a.trace", "--budget", "70%")
    keys = set(facts_of(capsys, "plan", *case)) | {"smallest_budget_bytes", "least_budget_bytes"}
    keys |= set(facts_of(capsys, "simulate", *case, "--host-budget", "10MiB", "--disk-read", "1GB/s"))
    keys |= set(facts_of(capsys, "compare", *case, "--policies", "recompute")["policies"][0])
    metrics = {metric.name for metric in CATALOGUE}
    source = "".join(inspect.getsource(module) for module in (summary, planner, account))
    lines = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 15
    for name, in_summary, in_metrics, in_commands, _, meaning, where in rows:
        assert name and meaning.endswith(".")
        assert all(re.search(rf"\b{key}\b", source) for key in re.findall(r"`(\w+)`", in_summary)), name
        assert set(re.findall(r"`(\w+)`", in_metrics)) <= metrics, name
        assert set(re.findall(r"`(\w+)`", in_commands)) <= keys, name
        file, _, noun = where.strip("`").partition(":")
        assert re.search(rf"\b{noun}\b", (ROOT / file).read_text(encoding="utf-8")), name
