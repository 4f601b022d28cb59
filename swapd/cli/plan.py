"""`swapd plan`: make a plan for a trace and say what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swapd.cli.output import Failure, console, json_option, pairs_table, print_json
from swapd.cli.problems import link_options, load_trace, machine_of, parsed, trace_argument
from swapd.planning.lower_bound import lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, PolicyInfeasibleError, Problem
from swapd.policies import available, make_plan
from swapd.settings import parse_window
from swapd.simulation.simulator import SimulationResult, simulate
from swapd.units import (
    exact_bytes,
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_amount,
)


@click.command("plan")
@trace_argument
@click.option(
    "--budget",
    required=True,
    metavar="BYTES|%",
    callback=parsed(parse_amount),
    help="Device bytes to plan for; a percentage is of the trace's live peak.",
)
@click.option("--policy", default="auto", show_default=True, type=click.Choice(available()), help="Scheduling policy.")
@click.option("--window", metavar="BYTES|auto", callback=parsed(parse_window), help="Schedule window [auto].")
@link_options
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan there.")
@json_option
def command(
    trace_path: Path,
    budget: Any,
    policy: str,
    window: int | None,
    chunk_size: int | None,
    bandwidth: Any,
    device: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Make a plan for TRACE, and show what moves and how long a step takes.

    Three times are shown: the computation alone, the lower bound that no schedule beats, and the plan's, as simulated;
    beside them the time without a plan (demand mode).

    \b
    swapd plan gpt.trace --budget 8GiB --bandwidth 12GiB/s
    """
    trace = load_trace(trace_path)
    peak = int(trace.live_bytes.max(initial=0))
    machine = machine_of(bandwidth, device)
    try:
        problem = Problem.from_trace(trace, budget.resolve(peak), chunk_bytes=chunk_size, machine=machine)
        with console(stderr=True).status("planning"):
            plan = make_plan(problem, policy=policy, window_bytes=window)
            timeline, demand = simulate(problem, plan), simulate(problem, Plan())
    except PolicyInfeasibleError as error:
        raise Failure(f"{error}; other policies need less, {problem.min_budget_bytes} bytes at the least") from None
    except InfeasibleError as error:
        raise Failure(
            f"{error.function_name} (function {error.function}) needs {format_bytes(error.need_bytes)} at once, the "
            f"budget is {format_bytes(error.budget_bytes)}; --budget {exact_bytes(error.min_budget_bytes)} would do"
        ) from None
    except ValueError as error:
        raise Failure(str(error)) from None
    if output is not None:
        try:
            plan.save(output)
        except OSError as error:
            raise Failure(f"cannot write {output}: {error.strerror}") from None
    facts = plan_facts(problem, plan, lower_bound(problem), timeline, demand)
    if as_json:
        print_json(facts)
    else:
        console().print(pairs_table(f"plan for {trace_path}", plan_rows(facts)))
    return 0


def plan_facts(
    problem: Problem, plan: Plan, bound_seconds: float, timeline: SimulationResult, demand: SimulationResult
) -> dict[str, Any]:
    """What a plan is, moves and costs; the keys of ``swapd plan --json``."""
    return {
        "policy": plan.policy,
        "window_bytes": plan.window_bytes,
        "budget_bytes": problem.budget_bytes,
        "min_budget_bytes": problem.min_budget_bytes,
        "live_peak_bytes": problem.live_peak_chunks * problem.chunk_bytes,
        "chunk_bytes": problem.chunk_bytes,
        "out_bytes_per_second": problem.machine.out_bytes_per_second,
        "in_bytes_per_second": problem.machine.in_bytes_per_second,
        "planned_outs": len(plan.outs),
        "planned_ins": len(plan.ins),
        "out_bytes": timeline.out_bytes,
        "in_bytes": timeline.in_bytes,
        "dropped_bytes": timeline.dropped_bytes,
        "write_back_bytes": timeline.write_back_bytes,
        "demand_in_count": timeline.demand_in_count,
        "compute_seconds": problem.compute_seconds,
        "bound_seconds": bound_seconds,
        "predicted_seconds": timeline.seconds,
        "stall_seconds": timeline.stall_seconds,
        "demand_mode_seconds": demand.seconds,
    }


def plan_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts of `plan_facts`, for people."""

    def times(key: str) -> str:
        ratio = facts[key] / facts["bound_seconds"] if facts["bound_seconds"] > 0 else 1.0
        return f"{format_duration(facts[key])}, {ratio:.2f} times the bound"

    window = f", window {format_bytes(facts['window_bytes'])}" if facts["window_bytes"] else ""
    over = facts["live_peak_bytes"] / facts["budget_bytes"]
    rows = [
        ("policy", facts["policy"] + window),
        ("budget", f"{format_bytes(facts['budget_bytes'])}; the least that would do {_bytes(facts, 'min_budget')}"),
        ("live peak", f"{_bytes(facts, 'live_peak')}, {over:.2f} times the budget"),
        ("link", f"out {format_bandwidth(facts['out_bytes_per_second'])}, "
                 f"in {format_bandwidth(facts['in_bytes_per_second'])}"),
        ("moves", f"{facts['planned_outs']} out, {facts['planned_ins']} in; {facts['demand_in_count']} more on demand"),
        ("bytes", f"out {_bytes(facts, 'out')}, in {_bytes(facts, 'in')}, dropped clean {_bytes(facts, 'dropped')}"),
        ("compute", format_duration(facts["compute_seconds"])),
        ("bound", format_duration(facts["bound_seconds"])),
        ("planned step", f"{times('predicted_seconds')}; stalls {format_duration(facts['stall_seconds'])}"),
        ("demand mode", times("demand_mode_seconds")),
    ]  # fmt: skip
    if not facts["planned_outs"] and not facts["planned_ins"]:
        rows.insert(0, ("", "everything fits: nothing needs to move"))
    return rows


def _bytes(facts: dict[str, Any], key: str) -> str:
    return format_bytes(facts[f"{key}_bytes"])
