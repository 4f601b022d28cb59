"""What is computed again, side by side with the policies: in `swapd compare`, in advice, and in what a run shows."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_recompute_run import BUDGET, CHUNK, chosen, dropping, network
from test_report import SUMMARY, so_far

from swapd.cli import main
from swapd.cli.output import console
from swapd.cli.summary import summary_table
from swapd.observing.advice import Advisor
from swapd.observing.analysis import run_policy
from swapd.observing.recomputing import RECOMPUTING, run_recomputing
from swapd.observing.report_facts import comparison, happened
from swapd.planning.lower_bound import bound, lower_bound
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.recompute.bound import recompute_bound
from swapd.recompute.candidates import find_candidates
from swapd.recompute.choice import SEGMENTS
from swapd.recompute.history import History
from swapd.recompute.published import checkpointed, swap_then_recompute
from swapd.recompute.rewriting import rewrite
from swapd.recompute.schedule import AGAIN
from swapd.trace.trace import Machine, Trace
from swapd.units import format_duration

Capture = pytest.CaptureFixture[str]
NAMES = ",".join(("in-core", "auto", *RECOMPUTING))


def facts_of(capsys: Capture, *arguments: object) -> dict[str, Any]:
    assert main(["compare", "--json", *map(str, arguments)]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    network().save(tmp_path / "a.trace")
    return tmp_path / "a.trace"


@pytest.mark.medium
def test_ours_is_what_a_run_chooses_and_others_what_they_publish(capsys: Capture, path: Path) -> None:
    facts = facts_of(capsys, path, "--budget", BUDGET, "--policies", NAMES)
    rows = {row["policy"]: row for row in facts["policies"]}
    make = partial(Problem.from_trace, budget_bytes=BUDGET)
    problem, history = make(network()), History(network(), without_statistics=True)
    assert rows["recompute"]["seconds"] == chosen().seconds < rows["auto"]["seconds"]
    rewritten = chosen().rewritten
    assert rewritten is not None and rows["recompute"]["drop_count"] == rewritten.drop_count > 0
    assert rows["recompute"]["repeat_seconds"] == rewritten.repeated_seconds > 0
    over = problem.live > problem.capacity_chunks
    found = find_candidates(history, least_bytes=CHUNK, during=over)
    (capuchin,) = [make_plan(make(rewrite(history, swap_then_recompute(problem, found)).trace))]
    assert rows["swap_then_recompute"]["seconds"] == capuchin.predicted_seconds
    best = min(
        make_plan(make(rewrite(history, checkpointed(problem, found, count)).trace)).predicted_seconds or 0.0
        for count in SEGMENTS
    )
    assert rows["checkpointed"]["seconds"] == best
    least = recompute_bound(problem, history, find_candidates(history, final=True))
    for way in RECOMPUTING:
        row = rows[way]
        assert row["can_run"] and row["peak_bytes"] <= BUDGET and row["planning_seconds"] > 0
        assert row["lower_bound_seconds"] == least <= row["seconds"]
        assert row["ratio_to_in_core"] == row["seconds"] / facts["compute_seconds"]
    assert "repeat_seconds" not in rows["auto"]


def test_the_table_says_how_long_is_computed_again(capsys: Capture, path: Path) -> None:
    assert main(["compare", str(path), "--budget", str(BUDGET), "--policies", NAMES]) == 0
    out = capsys.readouterr().out
    assert "again" in out and all(way in out for way in RECOMPUTING)
    assert main(["compare", str(path), "--budget", str(BUDGET), "--policies", "auto"]) == 0
    assert "again" not in capsys.readouterr().out


@pytest.mark.medium
def test_over_budgets_and_on_several_traces(capsys: Capture, path: Path, tmp_path: Path) -> None:
    facts = facts_of(capsys, path, "--budgets", f"{CHUNK},{BUDGET},100%", "--policies", "auto,recompute,checkpointed")
    rows = {row["policy"]: row for row in facts["policies"]}
    assert rows["recompute"]["seconds"][:2] == [None, chosen().seconds]
    assert rows["recompute"]["seconds"][2] == rows["auto"]["seconds"][2] == pytest.approx(facts["compute_seconds"])
    assert rows["recompute"]["seconds"][1] < facts["lower_bound_seconds"][1], "of swapping alone"
    for way in ("recompute", "checkpointed"):
        assert rows[way]["smallest_budget_bytes"] == Problem.from_trace(network(), BUDGET).min_budget_bytes
    other = replace(network(), machine=Machine(1e15, 1e15))
    other.save(tmp_path / "b.trace")
    side = facts_of(capsys, path, tmp_path / "b.trace", "--budget", BUDGET, "--policies", "auto,recompute")
    auto, ours = (row["seconds"] for row in side["policies"])
    assert sorted(ours) == sorted([chosen().seconds, min(auto)])


def test_with_a_disk_nothing_is_computed_again(capsys: Capture, path: Path) -> None:
    disk = ("--budget", "90%", "--host-budget", "1GiB", "--disk-read", "1GB/s")
    assert main(["compare", str(path), *disk, "--policies", "auto,recompute"]) == 2
    assert "recompute: nothing is computed again where there is a disk" in capsys.readouterr().err
    names = {row["policy"] for row in facts_of(capsys, path, *disk)["policies"]}
    assert "auto" in names and not names & set(RECOMPUTING)


def test_what_has_drops_already_is_left_as_it_is() -> None:
    problem = Problem.from_trace(dropping(), BUDGET)
    for way in RECOMPUTING:
        found = run_recomputing(problem, way, dropping())
        assert found.seconds == make_plan(problem).predicted_seconds
        assert found.recomputed is not None and found.recomputed.drop_count == 0


def advice_on(trace: Trace, **settings: Any) -> dict[str, str]:
    outcome = run_policy(Problem.from_trace(trace, BUDGET), "auto")
    return {found.kind: found.text for found in Advisor(outcome, trace, **settings).advise()}


def test_advice_says_what_computing_again_would_save() -> None:
    saved = 1 - chosen().seconds / chosen().swap_only_seconds
    assert saved > 0.1
    rewritten = chosen().rewritten
    assert rewritten is not None
    count = rewritten.drop_count
    expected = f"dropping {count} tensors instead of moving them (OOC_RECOMPUTE=exact, in PyTorch) saves"
    assert advice_on(network())["recompute"] == f"{expected} {100 * saved:.0f}%"
    assert "recompute" not in advice_on(network(), recompute=False)
    assert "recompute" not in advice_on(network(), is_fixed=True)
    assert "recompute" not in advice_on(dropping())
    assert "recompute" not in advice_on(replace(network(), machine=Machine(1e15, 1e15)))


DID = {
    "recompute_drop_count": 40,
    "recompute_drop_bytes": 3 << 30,
    "recompute_function_count": 55,
    "recompute_seconds": 1.5,
    "recompute_refused_count": 2,
}


def test_a_run_says_what_it_computed_again(capsys: Capture) -> None:
    assert not any("once more" in text for text in happened(so_far()))
    (text,) = [text for text in happened(so_far(summary={**SUMMARY, **DID})) if "once more" in text]
    assert text.startswith("3.00 GiB left without a copy") and "55 functions" in text and "1.50 s" in text
    console().print(summary_table(DID))
    words = " ".join(capsys.readouterr().out.split())
    assert "3.00 GiB dropped in 40 variables, 55 functions run again in 1.50 s; 2 drops refused by their" in words
    console().print(summary_table({**DID, "recompute_drop_count": 0}))
    assert "recomputed 2 drops refused" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    console().print(summary_table(SUMMARY))
    assert "recomputed" not in capsys.readouterr().out


def test_the_bound_beside_what_was_measured_is_that_of_the_plan_where_it_has_drops() -> None:
    run = so_far()
    assert run.trace is not None and run.predicted is not None
    planned = replace(run.predicted, plan=replace(run.predicted.plan, bound_seconds=0.125))
    dropping = replace(run.trace, function_names=tuple(name + AGAIN for name in run.trace.function_names))
    for trace, shown in ((run.trace, format_duration(lower_bound(planned.problem))), (dropping, "125 ms")):
        rows = {name: predicted for name, predicted, _ in comparison(so_far(trace=trace, predicted=planned))}
        assert rows["lower bound of all plans"] == shown


def test_the_two_phase_bound_is_of_what_is_left() -> None:
    problem = Problem.from_trace(network(), BUDGET)
    found = run_recomputing(problem, "recompute", network())
    assert found.facts()["two_phase_bound_seconds"] == bound(found.problem).seconds
    assert found.problem.names == chosen().problem.names
