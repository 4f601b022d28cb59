"""`swapd compare`: every policy on one trace; over several budgets; or on several traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swapd.cli.output import Failure, console, json_option, print_json, progress_bar
from swapd.cli.problems import (
    FILE,
    link_options,
    live_peak_bytes,
    load_trace,
    machine_of,
    make_problem,
    parse_budgets,
    parsed,
)
from swapd.observing.analysis import printable
from swapd.observing.comparison import (
    BudgetSweep,
    TraceSweep,
    arms,
    compare,
    facts_of_rows,
    sweep_budgets,
    sweep_traces,
)
from swapd.planning.problem import Problem
from swapd.units import Amount, format_bytes, format_duration, parse_amount

NOTHING = "-"


def parse_policies(text: str) -> list[str]:
    """Reads names that are separated by commas. Raises ValueError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in arms():
            raise ValueError(f"{name!r} is no policy; there are {', '.join(arms())}")
    return list(dict.fromkeys(names))


@click.command("compare")
@click.argument("trace_paths", metavar="TRACE...", nargs=-1, required=True, type=FILE)
@click.option(
    "--budget",
    metavar="BYTES|%",
    callback=parsed(parse_amount),
    help="Device bytes; a percentage is of the trace's live peak.",
)
@click.option(
    "--budgets",
    metavar="BYTES|%,...",
    callback=parsed(parse_budgets),
    help="Several budgets: a step's time in each, and the smallest that each policy can run in.",
)
@click.option(
    "--policies",
    metavar="NAME,...",
    callback=parsed(parse_policies),
    help="Those to compare [in-core, demand mode and all policies].",
)
@link_options
@json_option
def command(
    trace_paths: tuple[Path, ...],
    budget: Amount | None,
    budgets: list[Amount] | None,
    policies: list[str] | None,
    chunk_size: int | None,
    bandwidth: Any,
    device: str | None,
    as_json: bool,
) -> int:
    """Compare scheduling policies by simulation, on equal terms.

    With one TRACE and --budget: all figures of each policy. With one TRACE and --budgets: a step's time by budget. With
    several traces, of several batch sizes for example, and --budget: the share of the in-core throughput that is kept
    on each, and the largest trace that each policy can run.

    \b
    swapd compare gpt.trace --budget 8GiB
    swapd compare gpt.trace --budgets 25%,50%,75% --policies auto,window
    swapd compare b64.trace b128.trace b256.trace --budget 16GiB
    """
    if (budget is None) == (budgets is None):
        raise click.UsageError("give either --budget or --budgets")
    if budgets is not None and len(trace_paths) > 1:
        raise click.UsageError("--budgets is for one trace; give several traces one --budget")
    machine, names = machine_of(bandwidth, device), policies or list(arms())
    problems = {}
    for name, path in zip(_short(trace_paths), trace_paths):
        trace = load_trace(path)
        peak = live_peak_bytes(trace)
        sizes = [amount.resolve(peak) for amount in budgets or ([] if budget is None else [budget])]
        problems[name] = make_problem(trace, sizes[0], chunk_size, machine)
    with progress_bar() as report:
        if len(problems) > 1:
            traces = sweep_traces(dict(sorted(problems.items(), key=lambda row: _peak(row[1]))), names, report)
            facts, tables = trace_facts(traces), [trace_table(traces)]
        elif budgets is not None:
            sweep = sweep_budgets(problems.popitem()[1], sizes, names, report)
            facts, tables = budget_facts(sweep), [budget_table(sweep, trace_paths[0])]
        else:
            problem = problems.popitem()[1]
            facts = facts_of_rows(problem, compare(problem, names, report))
            tables = [policy_table(facts, problem, trace_paths[0])]
    if as_json:
        print_json(facts)
    else:
        for table in tables:
            wide().print(table)
        for row in facts["policies"]:
            if row.get("why"):
                console().print(Text(f"{row['policy']} cannot run: {printable(row['why'], 400)}"), soft_wrap=True)
    if not any(_can_run(facts)):
        raise Failure("no policy can run in this budget")
    return 0


def _can_run(facts: dict[str, Any]) -> list[bool]:
    return [row.get("can_run", True) for row in facts["policies"]]


def _peak(problem: Problem) -> int:
    return problem.live_peak_chunks * problem.chunk_bytes


def _short(paths: Sequence[Path]) -> list[str]:
    """Names that tell the traces apart: file names, or whole paths where those are not enough."""
    names = [path.stem for path in paths]
    if len(set(names)) == len(names):
        return names
    if len(set(paths)) < len(paths):
        raise click.UsageError("the same trace is given twice")
    return [os.fspath(path) for path in paths]


def wide() -> Console:
    """Standard output with room for a table. Where it is no terminal, it has no width of its own and is given one."""
    screen = console()
    return screen if screen.is_terminal else Console(width=140, highlight=False)


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, header_style="cyan")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "" else "right")
    return table


def _time(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_duration(seconds)


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def policy_table(facts: dict[str, Any], problem: Problem, path: Path) -> Table:
    """All figures of each policy. A policy that cannot run shows what it needs."""
    columns = ["step", "x lower", "x 2-phase", "stall", "out", "in", "demand", "peak", "average", "planning", ""]
    title = (
        f"{path}: live peak {format_bytes(facts['live_peak_bytes'])}, budget {format_bytes(problem.budget_bytes)}, "
        f"computation {format_duration(facts['compute_seconds'])}"
    )
    table = _table(title, "policy", columns)
    for row in facts["policies"]:
        if "seconds" not in row:
            least = row["least_budget_bytes"]
            why = "finds no plan" if least is None else f"needs {format_bytes(least)}"
            table.add_row(row["policy"], *[NOTHING] * 10, why)
            continue
        sizes = [format_bytes(row[f"{key}_bytes"]) for key in ("out", "in", "peak", "average")]
        note = "" if row["can_run"] else f"needs {format_bytes(facts['fit_budget_bytes'])}"
        table.add_row(
            row["policy"],
            _time(row["seconds"]),
            _ratio(row["ratio_to_lower_bound"]),
            _ratio(row["ratio_to_two_phase_bound"]),
            _time(row["stall_seconds"]),
            *sizes[:2],
            str(row["demand_in_count"] + row["demand_out_count"]),
            *sizes[2:],
            _time(row["planning_seconds"]),
            note,
        )
    return table


def budget_table(sweep: BudgetSweep, path: Path) -> Table:
    """A step's time by policy and budget."""
    columns = [*(format_bytes(budget) for budget in sweep.budgets), "smallest budget"]
    table = _table(f"{path}: time of a step by budget", "policy", columns)
    table.add_row("lower bound", *map(_time, sweep.lower_bounds), "")
    for policy, seconds in sweep.seconds.items():
        smallest = sweep.smallest[policy]
        table.add_row(policy, *map(_time, seconds), "none found" if smallest is None else format_bytes(smallest))
    return table


def budget_facts(sweep: BudgetSweep) -> dict[str, Any]:
    """The keys of ``swapd compare --budgets --json``; null means that the policy cannot run."""
    return {
        "budgets_bytes": list(sweep.budgets),
        "compute_seconds": sweep.compute_seconds,
        "lower_bound_seconds": list(sweep.lower_bounds),
        "policies": [
            {"policy": policy, "seconds": list(seconds), "smallest_budget_bytes": sweep.smallest[policy]}
            for policy, seconds in sweep.seconds.items()
        ],
    }


def trace_table(sweep: TraceSweep) -> Table:
    """The throughput kept by policy and trace."""
    table = _table("throughput kept, in-core being 1", "policy", [*sweep.names, "largest that runs"])
    table.add_row("live peak", *(format_bytes(_peak(problem)) for problem in sweep.problems), "")
    table.add_row("budget", *(format_bytes(problem.budget_bytes) for problem in sweep.problems), "")
    table.add_row("most possible", *map(_ratio, sweep.bounds), "")
    for policy, kept in sweep.kept.items():
        table.add_row(policy, *map(_ratio, kept), Text(sweep.largest[policy] or "none"))
    return table


def trace_facts(sweep: TraceSweep) -> dict[str, Any]:
    """The keys of ``swapd compare --json`` for several traces; null means that the policy cannot run."""
    return {
        "traces": [
            {
                "name": name,
                "budget_bytes": problem.budget_bytes,
                "live_peak_bytes": _peak(problem),
                "compute_seconds": problem.compute_seconds,
                "most_possible": most,
            }
            for name, problem, most in zip(sweep.names, sweep.problems, sweep.bounds)
        ],
        "policies": [
            {
                "policy": policy,
                "kept": list(kept),
                "seconds": list(sweep.seconds[policy]),
                "largest": sweep.largest[policy],
            }
            for policy, kept in sweep.kept.items()
        ],
    }
