"""`swapd compare`: the same figures as a simulation of each policy alone, and limits that are limits."""

import json
import re
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
from swapd.progress import note
from swapd.simulation.simulator import simulate
from swapd.tiers.three_tiers import DISK_LATENCY_SECONDS, LowerTiers, plan_tiers, run_tiers
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
    assert rows["in-core"]["peak_bytes"] == facts["fit_budget_bytes"]
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
    assert [line.split()[-2:] for line in out.splitlines() if line.startswith("idle  ")] == [["needs", "250000"]]
    problem = Problem.from_trace(passes(8), 200_000)
    found = smallest_budget(problem, "idle")
    assert found is not None and 250_000 <= found <= 250_000 + problem.fit_budget_bytes / comparison.PRECISION + 1000
    monkeypatch.setattr(analysis, "make_plan", refusing(1 << 40))
    assert smallest_budget(problem, "idle") is None
    monkeypatch.setattr(analysis, "make_plan", refusing(500_000))
    found = smallest_budget(problem, "idle")  # more than what everything takes
    assert found is not None and problem.fit_budget_bytes == 400_000 < 500_000 <= found <= 510_000


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


DISK = ("--host-budget", "100000", "--disk-read", "300000B/s", "--disk-write", "200000B/s")


def test_a_disk_under_the_host(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    policies = "in-core,demand,auto,zero_infinity,lms"
    facts = facts_of(capsys, paths[2], "--budget", "40%", *DISK, "--policies", policies)
    problem = Problem.from_trace(passes(8), facts["budget_bytes"])
    lower = LowerTiers(100_000, Machine(200_000.0, 300_000.0, DISK_LATENCY_SECONDS))
    rows = {row["policy"]: row for row in facts["policies"]}
    tiers = plan_tiers(problem, lower)
    ours, demand = rows["auto"], rows["demand"]
    assert ours["seconds"] == tiers.seconds and ours["ratio_to_lower_bound"] == tiers.seconds / lower.bound(problem)
    assert demand["seconds"] == run_tiers(problem, Plan(), lower, None).seconds > ours["seconds"]
    assert (ours["disk_write_bytes"], ours["disk_read_bytes"]) == (
        tiers.result.second.out_bytes,
        tiers.result.second.in_bytes,
    )
    assert ours["disk_read_bytes"] > 0 and ours["host_peak_bytes"] <= ours["host_budget_bytes"] == 100_000
    waits = ours["link_stall_seconds"] + ours["disk_stall_seconds"]
    assert waits == pytest.approx(ours["stall_seconds"]) and ours["disk_stall_seconds"] > 0
    assert rows["zero_infinity"]["seconds"] == plan_tiers(problem, lower, "zero_infinity").seconds
    assert "disk_read_bytes" not in rows["in-core"]
    assert main(["compare", paths[2], "--budget", "40%", *DISK, "--policies", policies]) == 0
    text = capsys.readouterr().out
    assert "for disk" in text and "host peak" in text


def test_sweeps_with_a_disk(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    lower = LowerTiers(100_000, Machine(200_000.0, 300_000.0, DISK_LATENCY_SECONDS))
    facts = facts_of(capsys, paths[2], "--budgets", "40%,100%", *DISK, "--policies", "auto")
    problem = Problem.from_trace(passes(8), 160_000)
    assert facts["policies"][0]["seconds"] == pytest.approx([plan_tiers(problem, lower).seconds, 0.24])
    assert facts["lower_bound_seconds"][0] == lower.bound(problem)
    facts = facts_of(capsys, *paths, "--budget", "160000", *DISK, "--policies", "auto")
    assert facts["policies"][0]["seconds"][1] == plan_tiers(problem, lower).seconds


def test_host_memory_that_is_too_small_is_said(capsys: pytest.CaptureFixture[str], paths: list[str]) -> None:
    small = ("--host-budget", "4000", "--disk-read", "1MB/s")
    wanted = (paths[2], "--budget", "99%", *small, "--policies", "auto,zero_infinity")
    assert main(["compare", "--json", *wanted]) == 1
    for row in json.loads(capsys.readouterr().out)["policies"]:
        assert not row["can_run"] and row["least_budget_bytes"] is None
        assert "bytes of host memory at once, the host budget is 4000 bytes" in row["why"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host-budget", "1GiB"), "a disk needs both --host-budget and --disk-read"),
        (("--disk-read", "1GB/s"), "a disk needs both --host-budget and --disk-read"),
        (("--host-budget", "1GiB", "--disk-write", "1GB/s"), "a disk needs both"),
        (("--host-budget", "1GiB", "--disk-read", "unlimited"), "a plan needs a speed"),
    ],
)
def test_half_a_disk_is_refused(
    capsys: pytest.CaptureFixture[str], paths: list[str], options: tuple[str, ...], said: str
) -> None:
    assert main(["compare", paths[2], "--budget", "40%", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_long_command_adds_a_line_for_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(4).save(tmp_path / "a.trace")
    command = ["compare", str(tmp_path / "a.trace"), "--budget", "70%", "--policies", "demand,auto"]
    file = tmp_path / "seen" / "progress.txt"
    monkeypatch.delenv("OOC_PROGRESS", raising=False)
    assert main(command) == 0 and not file.parent.exists()
    monkeypatch.setenv("OOC_PROGRESS", str(file))
    assert main(command) == 0
    lines = file.read_text().splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S+: \S.*, \d+ of \d+", line) for line in lines)
    note("one\nstep")
    assert file.read_text().splitlines()[:-1] == lines and file.read_text().endswith(": one step\n")
    monkeypatch.setenv("OOC_PROGRESS", str(tmp_path))  # no file can be there: nothing depends on it
    note("another")
