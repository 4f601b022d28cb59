"""`swapd simulate`: every figure against the simulator's own, advice against a simulation of what it says."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning_traces import Builder, random_trace, resnet50

from swapd.cli import main
from swapd.observing.advice import Advisor
from swapd.observing.analysis import allocated_by, printable, run_policy, stalls_by_variable, with_budget
from swapd.observing.perfetto import to_perfetto
from swapd.planning.lower_bound import bound, lower_bound
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import simulate, simulate_events
from swapd.tiers.three_tiers import DISK_LATENCY_SECONDS, LowerTiers, plan_tiers, run_tiers
from swapd.trace.trace import Machine, Trace
from swapd.units import MIB

LINK = Machine(2e9, 1e9)
BUDGET = 96 * MIB
HOSTILE = "add\x1b[31m\n[red]<b>&$x_"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.trace"
    network().save(path)
    return path


def network() -> Trace:
    trace = resnet50(2)
    fields = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    return Trace(**{**fields, "machine": LINK, "function_names": (HOSTILE, *trace.function_names[1:])})


def facts_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["simulate", "--json", *map(str, arguments)]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def test_figures_are_the_simulators(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    facts = facts_of(capsys, path, "--budget", BUDGET, "--no-advice", "--policy", "window", "--window", "40MiB")
    problem = Problem.from_trace(network(), BUDGET)
    plan = make_plan(problem, "window", 40 * MIB)
    timeline = simulate(problem, plan)
    assert facts["policy"] == "window" and facts["window_bytes"] == 40 * MIB
    assert facts["seconds"] == timeline.seconds == plan.predicted_seconds
    assert facts["stall_seconds"] == timeline.stall_seconds > 0
    assert facts["two_phase_bound_seconds"] == bound(problem).seconds
    assert facts["lower_bound_seconds"] == lower_bound(problem)
    assert facts["ratio_to_lower_bound"] == timeline.seconds / lower_bound(problem)
    assert (facts["out_bytes"], facts["in_bytes"]) == (timeline.out_bytes, timeline.in_bytes)
    assert facts["dropped_bytes"] == timeline.dropped_bytes > 0
    assert facts["peak_bytes"] == timeline.peak_chunks * problem.chunk_bytes
    assert facts["average_bytes"] == pytest.approx(timeline.average_chunks * problem.chunk_bytes)
    worst = max(timeline.stall_by_function, key=lambda f: timeline.stall_by_function[f])
    first = facts["stalls_by_function"][0]
    assert (first["function"], first["seconds"]) == (worst, timeline.stall_by_function[worst])
    assert first["name"] == printable(problem.names[worst])
    assert len(facts["stalls_by_function"]) == 5 and facts["advice"] == []


def test_for_people(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    assert main(["simulate", str(path), "--budget", "50%", "--top", "1000", "--policy", "demand"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for part in ("lower bound", "two-phase bound", "dropped clean", "functions that wait longest", "they wait for"):
        assert part in words
    assert "\x1b[31m" not in text and "add?[31m?[red]" in text, "a name from the file reached the terminal as it is"
    assert "- policy auto saves " in words


def test_what_was_waited_for_is_named() -> None:
    b = Builder()
    weight = b.entry(4)
    b.call("make", [], [4], seconds=1.0)
    b.call("fill", [], [4], seconds=1.0)
    b.free(2)
    b.call("use", [1, weight], seconds=1.0)
    b.free(1)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), 8)
    rows = stalls_by_variable(run_policy(problem, "demand"), 9)
    assert {row["allocated_by"] for row in rows} >= {"lives across iterations, first used by use"}
    assert allocated_by(problem, 1) == "make (function 0)"
    assert sum(row["seconds"] for row in rows) == pytest.approx(run_policy(problem, "demand").timeline.stall_seconds)


def test_a_storage_handed_on_is_named_by_who_allocated_it() -> None:
    b = Builder()
    old = b.entry(3, survives=False)
    stranger = b.entry(3, survives=False)
    b.call("f0", [old, stranger])
    b.free(old)
    (new,) = b.call("f1", [], [3])
    b.previous[old] = new
    problem = Problem.from_trace(b.trace(chunk_bytes=1), 10)
    assert allocated_by(problem, old) == "f1 (function 1 of the iteration before)"
    assert allocated_by(problem, stranger) == "there before the iteration, first used by f0"


def test_a_plans_file(capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.plan"
    assert main(["plan", str(path), "--budget", str(BUDGET), "-o", str(target)]) == 0
    capsys.readouterr()
    plan = Plan.load(target)
    facts = facts_of(capsys, path, "--plan", target, "--no-advice")
    assert (facts["seconds"], facts["budget_bytes"]) == (plan.predicted_seconds, BUDGET)
    assert facts["planned_out_count"] == len(plan.outs) > 0
    other = tmp_path / "other.plan"
    replace(plan, fingerprint=7).save(other)
    assert main(["simulate", str(path), "--plan", str(other)]) == 1
    assert "is a plan for the sequence 0000000000000007, the trace has 0000000000005eed" in capsys.readouterr().err
    replace(plan, outs=(plan.outs[0]._replace(chunk_count=1 << 30),)).save(other)
    assert main(["simulate", str(path), "--plan", str(other)]) == 1
    assert "the chunks are not all the variable's" in capsys.readouterr().err
    replace(plan, chunk_bytes=0).save(other)
    assert main(["simulate", str(path), "--plan", str(other)]) == 1
    assert "does not say what a chunk is" in capsys.readouterr().err
    assert main(["simulate", str(path), "--plan", str(target), "--chunk-size", "1MiB"]) == 1
    assert "is in chunks of 2097152 bytes, --chunk-size says 1048576" in capsys.readouterr().err
    assert main(["simulate", str(path)]) == 2
    assert "Missing option '--budget'" in capsys.readouterr().err


def test_a_budget_that_is_too_small(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    for policy in ("auto", "demand"):
        assert main(["simulate", str(path), "--budget", "4MiB", "--policy", policy]) == 1
        assert "would do" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_holds(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    found = facts_of(capsys, path, "--budget", BUDGET)
    kinds = {advice["kind"] for advice in found["advice"]}
    assert kinds >= {"budget", "fits", "link"}
    for advice in found["advice"]:
        assert advice["saved"] == pytest.approx(1 - advice["seconds"] / found["seconds"])
        if advice["budget_bytes"] is not None:
            again = facts_of(capsys, path, "--budget", advice["budget_bytes"], "--no-advice")
            assert again["seconds"] == pytest.approx(advice["seconds"])
        if advice["kind"] == "fits":
            assert again["stall_seconds"] == pytest.approx(0, abs=1e-9) and again["out_bytes"] == 0
            assert main(["simulate", str(path), "--budget", str(advice["budget_bytes"] - 1), "--no-advice"]) == 0
            assert " 0 out, 0 in; on demand 0 out, 0 in" not in " ".join(capsys.readouterr().out.split())


def test_advice_on_a_link_names_the_slow_direction() -> None:
    b = Builder()
    for v in [b.entry(1 << 20) for _ in range(8)]:
        b.call(f"f{v}", [v], seconds=1e-4)  # to bring its variable in takes 1 ms
    trace = b.trace(chunk_bytes=1 << 20, machine=Machine(1e12, 1e9))
    slow_in = run_policy(Problem.from_trace(trace, 4 << 20), "auto")
    text = {advice.kind: advice.text for advice in Advisor(slow_in, link="disk").advise()}
    assert text["link"].startswith("a disk twice as fast on the way in")
    text = {advice.kind: advice.text for advice in Advisor(slow_in).advise()}
    assert "on the way in (1.86 GiB/s) saves" in text["link"]


@pytest.mark.medium
def test_advice_on_less_memory_costs_a_hundredth_at_most() -> None:
    problem = Problem.from_trace(network(), 1 << 40, machine=Machine(40e9, 40e9))  # where time rises slowly
    (none, less) = Advisor(run_policy(problem, "auto")).advise()
    assert (none.kind, less.kind) == ("none", "less")
    assert less.budget_bytes is not None and less.budget_bytes < 1 << 39
    timeline = run_policy(with_budget(problem, less.budget_bytes), "auto").timeline
    assert timeline.seconds <= 1.01 * problem.compute_seconds


def test_advice_on_chunks() -> None:
    b = Builder()
    for _ in range(8):
        b.entry(1100)  # two chunks of 1000, of which nearly half is wasted
    for v in range(8):
        b.call(f"f{v}", [v], seconds=1.0)
    trace = b.trace(chunk_bytes=1000, machine=Machine(800.0, 800.0))
    found = Advisor(run_policy(Problem.from_trace(trace, 8000), "auto"), trace).advise()
    chunks = [advice for advice in found if advice.kind == "chunk"]
    assert chunks and all(advice.saved > 0.01 for advice in chunks)


def test_perfetto(capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    facts = facts_of(capsys, path, "--budget", BUDGET, "--no-advice", "--trace-out", target)
    found = json.loads(target.read_text())["traceEvents"]
    spans = [event for event in found if event["ph"] == "X" and event["pid"] == 1]
    rows = {tid: [event for event in spans if event["tid"] == tid] for tid in (1, 2, 3, 4)}
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 1}
    assert names == {1: "compute", 2: "out link", 3: "in link", 4: "stalls"}
    trace = network()
    assert len(rows[1]) == trace.functions
    assert sum(event["dur"] for event in rows[1]) == pytest.approx(1e6 * facts["compute_seconds"])
    assert sum(event["dur"] for event in rows[4]) == pytest.approx(1e6 * facts["stall_seconds"])
    assert sum(event["args"]["bytes"] for event in rows[3] if event["ts"] > 0) == facts["in_bytes"]
    for events in rows.values():
        for one, other in itertools.pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3, "two at a time in one row"
    memory = [event["args"]["bytes"] for event in found if event["name"] == "resident bytes"]
    assert max(memory) == facts["peak_bytes"]
    assert {event["args"]["bytes"] for event in found if event["name"] == "budget bytes"} == {BUDGET}
    assert len([event for event in found if event["ph"] == "X" and event["pid"] == 2]) == trace.functions
    assert all(event.get("dur", 0) >= 0 and event.get("ts", 0) >= 0 for event in found)
    assert main(["simulate", str(path), "--budget", "50%", "--no-advice", "--trace-out", "/nowhere/x.json"]) == 1
    assert "cannot write /nowhere/x.json" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(12))
def test_perfetto_of_random_programs(seed: int) -> None:
    trace = random_trace(seed)
    problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes)
    _, events = simulate_events(problem, Plan((), ()), 3)
    found = json.loads(to_perfetto(problem, events, trace))["traceEvents"]
    assert len([event for event in found if event["ph"] == "X" and event["pid"] == 1]) == len(events.runs) + len(
        events.copies
    ) + len(events.stalls)


def test_demand_moves_are_marked_in_the_timeline() -> None:
    b = Builder()
    for _ in range(3):
        b.entry(2)
    for v in range(3):
        b.call(f"f{v}", [v], seconds=1.0)
    trace = b.trace(chunk_bytes=1, machine=Machine(1.0, 1.0))
    problem = Problem.from_trace(trace, 4)
    text = to_perfetto(problem, simulate_events(problem, Plan())[1], trace)
    assert "(demand)" in text
    plan = Plan((Out(0, 0, 2, 0), Out(1, 0, 2, 1), Out(2, 0, 2, 2)), (In(2, 0, 2, 0, 1, 2), In(0, 0, 2, 1, 2, 3)))
    planned = simulate_events(problem, plan)[1]
    assert any(copy.is_planned for copy in planned.copies)


@pytest.mark.slow
def test_a_disk_under_the_host(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    disk = ("--host-budget", 24 * MIB, "--disk-read", "500MB/s")
    plain = facts_of(capsys, path, "--budget", BUDGET, "--no-advice")
    facts = facts_of(capsys, path, "--budget", BUDGET, *disk, "--no-advice")
    problem = Problem.from_trace(network(), BUDGET)
    lower = LowerTiers(24 * MIB, Machine(5e8, 5e8, DISK_LATENCY_SECONDS))
    tiers = plan_tiers(problem, lower)
    assert facts["seconds"] == tiers.seconds > plain["seconds"]
    assert facts["lower_bound_seconds"] == lower.bound(problem)
    assert facts["disk_read_bytes"] == tiers.result.second.in_bytes > 0
    assert {*facts} - {*plain} == {
        *("host_budget_bytes", "host_peak_bytes", "disk_write_bytes_per_second", "disk_read_bytes_per_second"),
        *("disk_write_bytes", "disk_read_bytes", "link_stall_seconds", "disk_stall_seconds"),
    }
    assert main(["simulate", str(path), "--budget", str(BUDGET), *map(str, disk), "--no-advice"]) == 0
    text = capsys.readouterr().out
    assert "stalls by tier" in text and "of 24.0 MiB" in text and "477 MiB/s" in text
    assert main(["simulate", str(path), "--budget", str(BUDGET), *map(str, disk), "--trace-out", "x.json"]) == 2
    assert "--trace-out shows device and host, not the disk" in capsys.readouterr().err
    assert main(["simulate", str(path), "--budget", str(BUDGET), "--host-budget", "4096", "--disk-read", "1GB/s"]) == 1
    assert "bytes of host memory at once, the host budget is 4096 bytes" in capsys.readouterr().err


@pytest.mark.slow
def test_advice_with_a_disk_under_the_host(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    """Each piece of advice is planned and simulated on both levels: some 40 s."""
    facts = facts_of(capsys, path, "--budget", BUDGET, "--host-budget", 24 * MIB, "--disk-read", "500MB/s")
    problem = Problem.from_trace(network(), BUDGET)
    told = {advice["kind"]: advice for advice in facts["advice"]}
    assert told["fits"]["saved"] == pytest.approx(1 - problem.compute_seconds / facts["seconds"])


@pytest.mark.medium
def test_a_given_plan_over_a_disk(capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path) -> None:
    assert main(["plan", str(path), "--budget", str(BUDGET), "--policy", "window", "-o", str(tmp_path / "a.plan")]) == 0
    capsys.readouterr()
    disk = ("--host-budget", 64 * MIB, "--disk-read", "500MB/s")
    facts = facts_of(capsys, path, "--plan", tmp_path / "a.plan", *disk, "--no-advice")
    problem = Problem.from_trace(network(), BUDGET)
    lower = LowerTiers(64 * MIB, Machine(5e8, 5e8, DISK_LATENCY_SECONDS))
    assert facts["seconds"] == run_tiers(problem, make_plan(problem, "window"), lower, "auto").seconds
