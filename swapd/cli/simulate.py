"""`swapd simulate`: what a policy, or a plan, makes of a trace; what it waits for, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.text import Text

from swapd.cli.output import (
    OUTPUT,
    console,
    json_option,
    pairs_table,
    print_json,
    progress_bar,
    text_table,
    write_file,
)
from swapd.cli.problems import (
    FILE,
    Case,
    budget_option,
    lower_tiers,
    plan_option,
    simulated,
    simulation_options,
    tier_options,
)
from swapd.observing.advice import Advice, Advisor
from swapd.observing.analysis import DEMAND, IN_CORE, Outcome, problem_facts, stalls_by_function, stalls_by_variable
from swapd.observing.perfetto import to_perfetto
from swapd.simulation.simulator import simulate_events
from swapd.units import format_bandwidth, format_bytes, format_duration, format_need


@click.command("simulate")
@click.argument("trace_path", metavar="TRACE", type=FILE)
@budget_option(" Needed unless --plan says it.")
@plan_option
@simulation_options(DEMAND, IN_CORE)
@tier_options
@click.option("--advice/--no-advice", default=True, help="Look for what would help, by simulating it [yes].")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=0), help="Rows of the tables of stalls.")
@click.option(
    "--trace-out",
    metavar="FILE",
    type=OUTPUT,
    help="Write the timeline as JSON for ui.perfetto.dev or chrome://tracing.",
)
@json_option
def command(
    trace_path: Path,
    advice: bool,
    top: int,
    trace_out: Path | None,
    as_json: bool,
    host_budget: int | None,
    disk_read: float | None,
    disk_write: float | None,
    **asked: Any,
) -> int:
    """Simulate a policy, or a plan, on TRACE: step time, stalls, memory, transfers, and advice.

    The step is one iteration in the steady state. It is shown beside the lower bound, which no schedule beats, and the
    two-phase bound, which none beats that writes data once and reads it once. With --host-budget and --disk-read, what
    does not fit into host memory lies on a disk.

    \b
    swapd simulate gpt.trace --budget 8GiB --bandwidth 12GiB/s
    swapd simulate gpt.trace --budget 80GiB --host-budget 64GiB --disk-read 7GB/s
    swapd simulate gpt.trace --plan gpt.plan --trace-out gpt.json
    """
    lower = lower_tiers(host_budget, disk_read, disk_write)
    if lower is not None and trace_out is not None:
        raise click.UsageError("--trace-out shows device and host, not the disk; leave one of them out")
    case = simulated(trace_path, lower=lower, **asked)
    found = advice_for(case) if advice else []
    if trace_out is not None:
        if case.outcome.policy == IN_CORE:
            raise click.UsageError("--trace-out shows what moves; in-core nothing does")
        _, events = simulate_events(case.outcome.problem, case.outcome.plan)
        write_file(trace_out, to_perfetto(case.outcome.problem, events, case.trace))
    facts = simulate_facts(case.outcome, top, found)
    if as_json:
        print_json(facts)
    else:
        show(trace_path, facts)
    return 0


def advice_for(case: Case) -> list[Advice]:
    """Advice on what was simulated."""
    with progress_bar() as report:
        return Advisor(case.outcome, case.trace, case.window_bytes, case.is_fixed).advise(report)


def simulate_facts(outcome: Outcome, top: int = 0, found: list[Advice] | None = None) -> dict[str, Any]:
    """The keys of ``swapd simulate --json``."""
    problem = outcome.problem
    return {
        **problem_facts(problem),
        "budget_bytes": problem.budget_bytes,
        "out_bytes_per_second": problem.machine.out_bytes_per_second,
        "in_bytes_per_second": problem.machine.in_bytes_per_second,
        **outcome.facts(),
        "stalls_by_function": stalls_by_function(outcome, top),
        "stalls_by_variable": stalls_by_variable(outcome, top),
        "advice": [vars(advice) for advice in found or ()],
    }


def simulate_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts for people, without stalls and advice."""

    def size(key: str) -> str:
        return format_bytes(facts[f"{key}_bytes"])

    def bound(key: str) -> str:
        ratio = facts[f"ratio_to_{key}"]
        times = "" if ratio is None else f"; the step takes {ratio:.3f} times that"
        return format_duration(facts[f"{key}_seconds"]) + times

    window = f", window {size('window')}" if facts["window_bytes"] else ""
    planned = facts["planned_out_count"], facts["planned_in_count"]
    demand = facts["demand_out_count"], facts["demand_in_count"]
    share = facts["stall_seconds"] / facts["seconds"] if facts["seconds"] > 0 else 0.0
    rates = format_bandwidth(facts["out_bytes_per_second"]), format_bandwidth(facts["in_bytes_per_second"])
    fit = facts["fit_budget_bytes"]
    over = -(-100 * fit // facts["budget_bytes"]) / 100  # rounded up: what does not fit is more than 1.00
    rows = [
        ("policy", facts["policy"] + window),
        ("budget", f"{size('budget')}; the least that would do {format_need(facts['min_budget_bytes'])}"),
        ("needed in-core", f"{format_need(fit)}, {over:.2f} times the budget"),
        ("link", f"out {rates[0]}, in {rates[1]}"),
        ("step", f"{format_duration(facts['seconds'])}, as simulated"),
        ("computation", format_duration(facts["compute_seconds"])),
        ("stalls", f"{format_duration(facts['stall_seconds'])}, {share:.1%} of the step"),
        ("lower bound", bound("lower_bound")),
        ("two-phase bound", bound("two_phase_bound")),
        ("memory", f"peak {size('peak')}, average {size('average')}"),
        ("transfers", f"out {size('out')}, in {size('in')}; dropped clean {size('dropped')}"),
        ("moves", f"planned {planned[0]} out, {planned[1]} in; on demand {demand[0]} out, {demand[1]} in"),
        ("planning", format_duration(facts["planning_seconds"])),
    ]
    if "host_budget_bytes" in facts:
        speeds = [format_bandwidth(facts[f"disk_{way}_bytes_per_second"]) for way in ("write", "read")]
        waits = [format_duration(facts[f"{link}_stall_seconds"]) for link in ("link", "disk")]
        rows[-1:-1] = [
            ("host memory", f"peak {size('host_peak')} of {size('host_budget')}"),
            ("disk", f"writes {size('disk_write')} at {speeds[0]}, reads {size('disk_read')} at {speeds[1]}"),
            ("stalls by tier", f"for the link {waits[0]}, for the disk {waits[1]}"),
        ]
    return rows


def stall_tables(facts: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[Any]]]:
    """The tables of stalls that have rows: title, column names, rows."""
    functions = [
        (row["name"], str(row["function"]), format_duration(row["seconds"]), f"{row['share']:.1%}")
        for row in facts["stalls_by_function"]
    ]
    variables = [
        (
            row["label"],
            "" if row["bytes"] is None else format_bytes(row["bytes"]),
            row["allocated_by"] or "for what the function allocates",
            format_duration(row["seconds"]),
            f"{row['share']:.1%}",
        )
        for row in facts["stalls_by_variable"]
    ]
    tables: list[tuple[str, tuple[str, ...], list[Any]]] = [
        ("functions that wait longest", ("function", "number", "stall", "of the step"), functions),
        ("what they wait for", ("waited for", "size", "allocated by", "stall", "of the step"), variables),
    ]
    return [table for table in tables if table[2]]


def show(trace_path: Path, facts: dict[str, Any]) -> None:
    """Print all facts as tables on standard output."""
    screen = console()
    screen.print(pairs_table(f"{facts['policy']} on {trace_path}", simulate_rows(facts)))
    for title, columns, rows in stall_tables(facts):
        screen.print(text_table(f"\n{title}", columns, rows, left=("allocated by",)))
    if facts["advice"]:
        screen.print(Text("\nadvice, each as simulated"))
        for advice in facts["advice"]:
            screen.print(Text(f"- {advice['text']}"), soft_wrap=True)
