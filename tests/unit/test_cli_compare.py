"""`swapd compare`: the same figures as a simulation of each policy alone, and limits that are limits."""

import json
from pathlib import Path
from typing import Any

import pytest
from planning_traces import Builder

from swapd.cli import main
from swapd.observing import analysis, comparison
from swapd.observing.comparison import arms, attempt, needs_more, smallest_budget
from swapd.planning.lower_bound import bound, lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import available, make_plan
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

LINK = Machine(1e6, 1e6)


def passes(layers: int, size: int = 40_000) -> Trace:
    """Forward: each layer reads a weight and makes an activation. Backward: the reverse order reads them again."""
    b = Builder()
    weights = [b.entry(10_000) for _ in range(layers)]
    made = [b.call(f"forward{i}", [w], [size], seconds=0.01)[0] for i, w in enumerate(weights)]
    for i in reversed(range(layers)):
        b.call(f"backward{i}", [made[i]], writes=[weights[i]], seconds=0.02)
        b.free(made[i])
    return b.trace(chunk_bytes=1000, machine=LINK)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = []
    for layers in (12, 4, 8):
        path = tmp_path / f"b{layers}.trace"
        passes(layers).save(path)
        found.append(str(path))
    return found


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["compare", "--json", *arguments]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_every_policy_has_its_own_figures(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    facts = facts_of(capsys, paths[2], "--budget", "60%")
    problem = Problem.from_trace(passes(8), facts["budget_bytes"])
    rows = {row["policy"]: row for row in facts["policies"]}
    assert tuple(rows) == arms() and set(available()) < set(rows)
    assert rows["demand"]["seconds"] == simulate(problem, Plan()).seconds
    assert rows["demand"]["demand_in_count"] > 0
    assert rows["in-core"]["seconds"] == pytest.approx(problem.compute_seconds)
    assert (rows["in-core"]["can_run"], rows["in-core"]["out_bytes"]) == (False, 0)
    assert rows["in-core"]["peak_bytes"] == facts["fit_budget_bytes"] == facts["live_peak_bytes"]
    for policy in ("auto", "idle", "window"):
        row = rows[policy]
        assert row["seconds"] == make_plan(problem, policy).predicted_seconds
        assert row["ratio_to_lower_bound"] == row["seconds"] / lower_bound(problem) >= 1 - 1e-9
        assert row["ratio_to_two_phase_bound"] == row["seconds"] / bound(problem).seconds
        assert row["planning_seconds"] > 0 and row["can_run"] and row["peak_bytes"] <= facts["budget_bytes"]
    assert rows["auto"]["seconds"] <= rows["demand"]["seconds"]


def test_the_table_names_every_policy(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    assert main(["compare", paths[0], "--budget", "50%"]) == 0
    text = capsys.readouterr().out
    for name in (*arms(), "x lower", "x 2-phase", "stall", "demand", "average", "planning", "needs"):
        assert name in text


def refusing(limit: int) -> Any:
    """A stand-in for a policy that needs more than the largest function does."""

    def plan(problem: Problem, policy: str, window_bytes: int | None = None) -> Plan:
        if policy == "idle" and problem.budget_bytes < limit:
            raise InfeasibleError(3, "backward", limit, problem.budget_bytes, limit)
        return make_plan(problem, policy, window_bytes)

    return plan


def test_a_policy_that_cannot_run_says_why(
    capsys: pytest.CaptureFixture[str], paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "make_plan", refusing(250_000))
    facts = facts_of(capsys, paths[2], "--budget", "200000", "--policies", "idle,window")
    assert [row["can_run"] for row in facts["policies"]] == [False, True]
    assert "needs 250000 bytes at once" in facts["policies"][0]["why"]
    assert main(["compare", paths[2], "--budget", "200000", "--policies", "idle,window"]) == 0
    out = capsys.readouterr().out
    assert "\nidle cannot run: function 3 (backward) needs 250000 bytes at once" in out
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith("idle  ")] == [["244", "KiB"]]
    problem = Problem.from_trace(passes(8), 200_000)
    found = smallest_budget(problem, "idle")
    assert found is not None and 250_000 <= found <= 250_000 + analysis.fit_bytes(problem) / comparison.PRECISION + 1000
    monkeypatch.setattr(analysis, "make_plan", refusing(1 << 40))
    assert smallest_budget(problem, "idle") is None
    monkeypatch.setattr(analysis, "make_plan", refusing(500_000))
    found = smallest_budget(problem, "idle")  # more than what everything takes
    assert found is not None and analysis.fit_bytes(problem) == 400_000 < 500_000 <= found <= 510_000


def test_a_budget_for_nobody(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    assert main(["compare", paths[0], "--budget", "20000"]) == 1
    out, err = capsys.readouterr()
    assert "no policy can run" in err and "forward0" in out


def test_a_sweep_of_budgets(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    facts = facts_of(capsys, paths[2], "--budgets", "5%,40%,70%,100%", "--policies", "in-core,demand,auto,window")
    assert facts["budgets_bytes"] == [20_000, 160_000, 280_000, 400_000]
    rows = {row["policy"]: row for row in facts["policies"]}
    for policy in ("demand", "auto", "window"):
        first, *others = rows[policy]["seconds"]
        assert first is None
        assert others == sorted(others, reverse=True)
        for budget, seconds in zip(facts["budgets_bytes"][1:], others):
            assert seconds == analysis.run_policy(Problem.from_trace(passes(8), budget), policy).timeline.seconds
        least = rows[policy]["smallest_budget_bytes"]
        assert isinstance(attempt(Problem.from_trace(passes(8), least), policy), analysis.Outcome)
        assert isinstance(attempt(Problem.from_trace(passes(8), least - 1), policy), InfeasibleError)
    assert rows["in-core"]["seconds"] == [None] * 3 + [pytest.approx(0.24)]
    assert rows["in-core"]["smallest_budget_bytes"] == 400_000
    assert facts["lower_bound_seconds"][0] is None
    for at in (1, 2, 3):
        fastest = min(rows[policy]["seconds"][at] for policy in ("demand", "auto", "window"))
        assert facts["lower_bound_seconds"][at] <= fastest + 1e-9
    assert main(["compare", paths[2], "--budgets", "5%,40%", "--policies", "auto"]) == 0
    words = capsys.readouterr().out
    assert "smallest budget" in words and "156 KiB" in words


def test_a_sweep_of_traces(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    facts = facts_of(capsys, *paths, "--budget", "210000", "--policies", "in-core,auto")
    assert [trace["name"] for trace in facts["traces"]] == ["b4", "b8", "b12"]
    in_core, auto = facts["policies"]
    assert (in_core["largest"], auto["largest"]) == ("b4", "b12")
    assert in_core["kept"] == [pytest.approx(1), None, None]
    for trace, kept, seconds in zip(facts["traces"], auto["kept"], auto["seconds"]):
        assert kept == trace["compute_seconds"] / seconds <= trace["most_possible"] * (1 + 1e-9)
    assert auto["kept"][0] == pytest.approx(1) and auto["kept"][1] < 1
    assert main(["compare", *paths, "--budget", "210000", "--policies", "in-core,auto"]) == 0
    out = capsys.readouterr().out
    assert "most possible" in out and "largest that runs" in out and "b12" in out


def test_in_core_needs_room_for_everything() -> None:
    assert needs_more(Problem.from_trace(passes(8), 399_999), "in-core")
    assert not needs_more(Problem.from_trace(passes(8), 400_000), "in-core")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{0}"], "give either --budget or --budgets"),
        (["{0}", "--budget", "1MiB", "--budgets", "1MiB"], "give either --budget or --budgets"),
        (["{0}", "{1}", "--budgets", "1MiB"], "--budgets is for one trace"),
        (["{0}", "{0}", "--budget", "1MiB"], "the same trace is given twice"),
        (["{0}", "--budgets", "1MiB,much"], "does not start with a number"),
        (["{0}", "--budget", "1MiB", "--policies", "auto,best"], "'best' is no policy; there are in-core, demand"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], paths: list[str], arguments: list[str], text: str
) -> None:
    assert main(["compare", *(argument.format(*paths) for argument in arguments)]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
