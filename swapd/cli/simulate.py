"""`swapd simulate`: what a policy, or a plan, makes of a trace; what it waits for, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from swapd.cli.output import Failure, console, json_option, pairs_table, print_json, progress_bar
from swapd.cli.problems import (
    FILE,
    budget_for,
    budget_unless_planned,
    infeasible,
    link_options,
    load_plan,
    load_trace,
    machine_of,
    make_problem,
    parsed,
    trace_argument,
)
from swapd.observing.advice import Advice, Advisor
from swapd.observing.analysis import (
    DEMAND,
    IN_CORE,
    Outcome,
    fit_bytes,
    run_plan,
    run_policy,
    stalls_by_function,
    stalls_by_variable,
)
from swapd.observing.perfetto import to_perfetto
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.planning.violations import malformed
from swapd.policies import available
from swapd.settings import parse_window
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Machine, Trace
from swapd.units import Amount, format_bandwidth, format_bytes, format_duration


@click.command("simulate")
@trace_argument
@budget_unless_planned
@click.option(
    "--policy",
    default="auto",
    show_default=True,
    type=click.Choice([*available(), DEMAND, IN_CORE]),
    help="Scheduling policy; demand: no plan; in-core: enough memory.",
)
@click.option("--plan", "plan_path", metavar="FILE", type=FILE, help="Simulate this plan, of `swapd plan -o`.")
@click.option("--window", metavar="BYTES|auto", callback=parsed(parse_window), help="Schedule window [auto].")
@link_options
@click.option("--advice/--no-advice", default=True, help="Look for what would help, by simulating it [yes].")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=0), help="Rows of the tables of stalls.")
@click.option(
    "--trace-out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the timeline as JSON for ui.perfetto.dev or chrome://tracing.",
)
@json_option
def command(
    trace_path: Path,
    budget: Amount | None,
    policy: str,
    plan_path: Path | None,
    window: int | None,
    chunk_size: int | None,
    bandwidth: Any,
    device: str | None,
    advice: bool,
    top: int,
    trace_out: Path | None,
    as_json: bool,
) -> int:
    """Simulate a policy, or a plan, on TRACE: step time, stalls, memory, transfers, and advice.

    The step is one iteration in the steady state. It is shown beside the lower bound, which no schedule beats, and the
    two-phase bound, which none beats that writes data once and reads it once.

    \b
    swapd simulate gpt.trace --budget 8GiB --bandwidth 12GiB/s
    swapd simulate gpt.trace --plan gpt.plan --trace-out gpt.json
    """
    trace, machine = load_trace(trace_path), machine_of(bandwidth, device)
    plan = None if plan_path is None else load_plan(plan_path, trace, chunk_size)
    chunk = chunk_size if plan is None else plan.chunk_bytes
    problem = make_problem(trace, budget_for(trace, budget, plan), chunk, machine)
    outcome = simulated(problem, policy, window, plan)
    found = advice_for(outcome, trace, machine, window, plan is not None) if advice else []
    if trace_out is not None:
        _write_perfetto(trace_out, outcome, trace)
    facts = simulate_facts(outcome, top, found)
    if as_json:
        print_json(facts)
    else:
        show(trace_path, facts)
    return 0


def simulated(problem: Problem, policy: str, window: int | None, plan: Plan | None = None) -> Outcome:
    """Simulate one policy, or a given plan. Raises Failure."""
    try:
        if plan is None:
            with console(stderr=True).status("planning"):
                return run_policy(problem, policy, window)
        wrong = malformed(problem, plan)
        if wrong:
            raise Failure(f"the plan does not belong to this trace: {wrong[0]}")
        return run_plan(problem, plan, plan.policy)
    except InfeasibleError as error:
        raise Failure(infeasible(error)) from None
    except ValueError as error:
        raise Failure(str(error)) from None


def advice_for(
    outcome: Outcome, trace: Trace, machine: Machine | None, window: int | None, is_fixed: bool
) -> list[Advice]:
    """Advice on an outcome on `trace`. `is_fixed` says that the plan was given."""

    def with_chunks(size: int) -> Problem | None:
        try:
            return make_problem(trace, outcome.problem.budget_bytes, size, machine)
        except Failure:
            return None  # more chunks than a problem may have

    with progress_bar() as report:
        return Advisor(outcome, with_chunks, window, is_fixed).advise(report)


def _write_perfetto(path: Path, outcome: Outcome, trace: Trace) -> None:
    if outcome.policy == IN_CORE:
        raise click.UsageError("--trace-out shows what moves; in-core nothing does")
    _, events = simulate_events(outcome.problem, outcome.plan)
    try:
        path.write_text(to_perfetto(outcome.problem, events, trace), encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None


def simulate_facts(outcome: Outcome, top: int, found: list[Advice]) -> dict[str, Any]:
    """The keys of ``swapd simulate --json``."""
    problem = outcome.problem
    return {
        "budget_bytes": problem.budget_bytes,
        "min_budget_bytes": problem.min_budget_bytes,
        "fit_budget_bytes": fit_bytes(problem),
        "live_peak_bytes": problem.live_peak_chunks * problem.chunk_bytes,
        "chunk_bytes": problem.chunk_bytes,
        "out_bytes_per_second": problem.machine.out_bytes_per_second,
        "in_bytes_per_second": problem.machine.in_bytes_per_second,
        **outcome.facts(),
        "stalls_by_function": stalls_by_function(outcome, top),
        "stalls_by_variable": stalls_by_variable(outcome, top),
        "advice": [vars(advice) for advice in found],
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
    over = facts["live_peak_bytes"] / facts["budget_bytes"]
    return [
        ("policy", facts["policy"] + window),
        ("budget", f"{size('budget')}; the least that would do {size('min_budget')}"),
        ("live peak", f"{size('live_peak')}, {over:.2f} times the budget"),
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


def stall_tables(facts: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[Any]]]:
    """The tables of stalls: title, column names, rows."""
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
    tables: list[tuple[str, tuple[str, ...], list[Any]]] = []
    if functions:
        tables.append(("functions that wait longest", ("function", "number", "stall", "of the step"), functions))
    if variables:
        names = ("waited for", "size", "allocated by", "stall", "of the step")
        tables.append(("what they wait for", names, variables))
    return tables


def show(trace_path: Path, facts: dict[str, Any]) -> None:
    """Print all facts as tables on standard output."""
    screen = console()
    screen.print(pairs_table(f"{facts['policy']} on {trace_path}", simulate_rows(facts)))
    for title, columns, rows in stall_tables(facts):
        table = Table(title=Text(f"\n{title}"), title_justify="left", box=None, pad_edge=False, header_style="cyan")
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place == 0 or column == "allocated by" else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        screen.print(table)
    if facts["advice"]:
        screen.print(Text("\nadvice, each as simulated"))
        for advice in facts["advice"]:
            screen.print(Text(f"- {advice['text']}"), soft_wrap=True)


