"""`swapd compare`: every policy on one trace; over several budgets; or on several traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from swapd.cli.options import parsed
from swapd.cli.output import Failure, console, json_option, print_json, progress_bar, text_table
from swapd.cli.problems import (
    FILE,
    budget_option,
    link_options,
    load_trace,
    lower_tiers,
    machine_of,
    make_problem,
    tier_options,
    within,
)
from swapd.link import Link
from swapd.observing.advice import Report
from swapd.observing.analysis import printable, problem_facts
from swapd.observing.comparison import Seconds, Subject, arms, lower_bounds, policy_facts, smallest_budget, sweep
from swapd.observing.recomputing import RECOMPUTING
from swapd.planning.problem import Problem
from swapd.tiers.three_tiers import LowerTiers
from swapd.trace.trace import Trace
from swapd.units import Amount, format_bytes, format_duration, format_need, parse_amount

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {  # of one trace in one budget
    "step": ("seconds", format_duration),
    "x lower": ("ratio_to_lower_bound", "{:.3f}".format),
    "x 2-phase": ("ratio_to_two_phase_bound", "{:.3f}".format),
    "stall": ("stall_seconds", format_duration),
    "out": ("out_bytes", format_bytes),
    "in": ("in_bytes", format_bytes),
    "demand": ("demand_count", str),
    "peak": ("peak_bytes", format_bytes),
    "average": ("average_bytes", format_bytes),
    "planning": ("planning_seconds", format_duration),
}
_AGAIN: dict[str, tuple[str, Callable[[float], str]]] = {  # and more, where something is computed again
    "again": ("repeat_seconds", format_duration),
}

_WITH_DISK = ("step", "x lower", "out", "in", "demand", "planning")  # of these columns, those with a disk
_TIER_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {  # and more
    "for link": ("link_stall_seconds", format_duration),
    "for disk": ("disk_stall_seconds", format_duration),
    "written": ("disk_write_bytes", format_bytes),
    "read": ("disk_read_bytes", format_bytes),
    "host peak": ("host_peak_bytes", format_bytes),
}


def parse_budgets(text: str) -> list[Amount]:
    """Reads budgets that are separated by commas. Raises UnitError."""
    return [parse_amount(part) for part in text.split(",")]


def parse_policies(text: str) -> list[str]:
    """Reads names that are separated by commas. Raises ValueError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in arms():
            raise ValueError(f"{name!r} is no policy; there are {', '.join(arms())}")
    return list(dict.fromkeys(names))


@click.command("compare")
@click.argument("trace_paths", metavar="TRACE...", nargs=-1, required=True, type=FILE)
@budget_option()
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
    help="Those to compare [in-core, demand mode and all policies, recomputing ones too].",
)
@link_options
@tier_options
@json_option
def command(
    trace_paths: tuple[Path, ...],
    budget: Amount | None,
    budgets: list[Amount] | None,
    policies: list[str] | None,
    chunk_size: int | None,
    bandwidth: Link | None,
    device: str | None,
    host_budget: int | None,
    disk_read: float | None,
    disk_write: float | None,
    as_json: bool,
) -> int:
    """Compare scheduling policies by simulation, on equal terms.

    With one TRACE and --budget: all figures of each policy. With one TRACE and --budgets: a step's time by budget. With
    several traces, of several batch sizes for example, and --budget: the share of the in-core throughput that is kept
    on each, and the largest trace that each policy can run. With --host-budget and --disk-read, each policy also
    moves data between host memory and a disk, by the same rules; in demand mode nothing is planned on either level.

    Three of them also compute again instead of moving, and swap the rest by auto: recompute (ours, as OOC_RECOMPUTE
    has it), swap_then_recompute (Capuchin) and checkpointed (the best of 2 to 64 segments); not with a disk.

    \b
    swapd compare gpt.trace --budget 8GiB
    swapd compare gpt.trace --budgets 25%,50%,75% --policies auto,window
    swapd compare b64.trace b128.trace b256.trace --budget 16GiB
    swapd compare gpt.trace --budget 80GiB --host-budget 64GiB --disk-read 7GB/s --policies auto,zero_infinity
    """
    if (budget is None) == (budgets is None):
        raise click.UsageError("give either --budget or --budgets")
    if budgets is not None and len(trace_paths) > 1:
        raise click.UsageError("--budgets is for one trace; give several traces one --budget")
    machine, lower = machine_of(bandwidth, device), lower_tiers(host_budget, disk_read, disk_write)
    if lower is not None and (wrong := [name for name in policies or () if name in RECOMPUTING]):
        raise click.UsageError(f"{', '.join(wrong)}: nothing is computed again where there is a disk below host memory")
    names = policies or [name for name in arms() if lower is None or name not in RECOMPUTING]
    subjects = []
    for name, path in zip(_short(trace_paths), trace_paths):
        trace = load_trace(path)
        whole = make_problem(trace, 0, chunk_size, machine)
        subjects.append(Subject(name, whole if budgets is not None else within(whole, budget), trace))
    (path, *more), (subject, *_) = trace_paths, subjects
    with progress_bar() as report:
        if more:
            facts = trace_facts(subjects, names, report, lower)
            table = trace_table(facts)
        elif budgets is not None:
            problems = [within(subject.problem, size) for size in budgets]
            facts = budget_facts(problems, subject.trace, names, report, lower)
            table = budget_table(facts, path)
        else:
            facts = policies_facts(subject, names, report, lower)
            table = policies_table(facts, path)
    if as_json:
        print_json(facts)
    else:
        screen = console()
        screen.print(table)
        for row in facts["policies"]:
            if row.get("why"):
                screen.print(Text(f"{row['policy']} cannot run: {printable(row['why'], 400)}"), soft_wrap=True)
    if not any(row.get("can_run", True) for row in facts["policies"]):
        raise Failure("no policy can run in this budget")
    return 0


def _short(paths: Sequence[Path]) -> list[str]:
    """Names that tell the traces apart: file names, or whole paths where those are not enough."""
    names = [path.stem for path in paths]
    if len(set(names)) == len(names):
        return names
    if len(set(paths)) < len(paths):
        raise click.UsageError("the same trace is given twice")
    return [os.fspath(path) for path in paths]


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def policies_facts(
    subject: Subject, names: Sequence[str], report: Report, lower: LowerTiers | None = None
) -> dict[str, Any]:
    """The keys of ``swapd compare --json`` for one trace and one budget."""
    rows, problem = [], subject.problem
    for done, policy in enumerate(names):
        report(policy, done, len(names))
        rows.append(policy_facts(subject, policy, lower))
    return {**problem_facts(problem), "budget_bytes": problem.budget_bytes, "policies": rows}


def policies_table(facts: dict[str, Any], path: Path) -> RenderableType:
    """All figures of each policy. A policy that cannot run shows what it needs."""
    with_disk = any("disk_read_bytes" in row for row in facts["policies"])
    shown = {key: _COLUMNS[key] for key in _WITH_DISK} | _TIER_COLUMNS if with_disk else _COLUMNS
    if any("repeat_seconds" in row for row in facts["policies"]):
        shown = shown | _AGAIN
    rows = []
    for row in facts["policies"]:
        if row["can_run"]:
            note = ""
        else:
            needed = facts["fit_budget_bytes"] if "seconds" in row else row["least_budget_bytes"]
            note = "finds no plan" if needed is None else f"needs {format_need(needed)}"
        rows.append([row["policy"], *(_shown(row.get(key), text) for key, text in shown.values()), note])
    title = (
        f"{path}: needed in-core {format_need(facts['fit_budget_bytes'])}, "
        f"budget {format_bytes(facts['budget_bytes'])}, computation {format_duration(facts['compute_seconds'])}"
    )
    return text_table(title, ["policy", *shown, ""], rows, left=("",))


def budget_facts(
    problems: Sequence[Problem],
    trace: Trace,
    names: Sequence[str],
    report: Report,
    lower: LowerTiers | None = None,
) -> dict[str, Any]:
    """The keys of ``swapd compare --budgets --json``, of one trace in several budgets; null: the policy cannot run."""
    subjects = [Subject(format_bytes(problem.budget_bytes), problem, trace) for problem in problems]
    seconds = sweep(subjects, names, report, lower)
    rows = []
    for done, policy in enumerate(names):
        report(f"{policy}: smallest budget", done, len(names))
        smallest = smallest_budget(problems[0], policy, lower, trace)
        rows.append({"policy": policy, "seconds": seconds[policy], "smallest_budget_bytes": smallest})
    return {
        **problem_facts(problems[0]),
        "budgets_bytes": [problem.budget_bytes for problem in problems],
        "lower_bound_seconds": lower_bounds(problems, lower),
        "policies": rows,
    }


def budget_table(facts: dict[str, Any], path: Path) -> RenderableType:
    """A step's time by policy and budget."""
    columns = ["policy", *map(format_bytes, facts["budgets_bytes"]), "smallest budget"]

    def times(seconds: Seconds) -> list[str]:
        return [_shown(value, format_duration) for value in seconds]

    rows = [["lower bound", *times(facts["lower_bound_seconds"]), ""]]
    for row in facts["policies"]:
        size = row["smallest_budget_bytes"]
        rows.append([row["policy"], *times(row["seconds"]), "none found" if size is None else format_need(size)])
    return text_table(f"{path}: time of a step by budget", columns, rows)


def trace_facts(
    subjects: Sequence[Subject], names: Sequence[str], report: Report, lower: LowerTiers | None = None
) -> dict[str, Any]:
    """The keys of ``swapd compare --json`` for several traces by rising need; null: the policy cannot run."""

    def kept(seconds: Seconds) -> Seconds:
        """The shares of the in-core throughput."""
        return [
            None if value is None else problem.compute_seconds / value if value > 0 else 1.0
            for problem, value in zip(problems, seconds)
        ]

    subjects = sorted(subjects, key=lambda subject: subject.problem.fit_budget_bytes)
    problems = [subject.problem for subject in subjects]
    by_need = [subject.name for subject in subjects].index
    return {
        "traces": [
            {
                "name": name,
                **problem_facts(problem),
                "budget_bytes": problem.budget_bytes,
                "most_possible": most,
            }
            for (name, problem, _), most in zip(subjects, kept(lower_bounds(problems, lower)))
        ],
        "policies": [
            {
                "policy": policy,
                "kept": kept(seconds),
                "seconds": seconds,
                "largest": max(
                    (subject.name for subject, value in zip(subjects, seconds) if value is not None),
                    key=by_need,
                    default=None,
                ),
            }
            for policy, seconds in sweep(subjects, names, report, lower).items()
        ],
    }


def trace_table(facts: dict[str, Any]) -> RenderableType:
    """The throughput kept by policy and trace."""
    traces = facts["traces"]

    def ratios(values: Seconds) -> list[str]:
        return [_shown(value, "{:.3f}".format) for value in values]

    rows = [
        ["needed in-core", *(format_need(trace["fit_budget_bytes"]) for trace in traces), ""],
        ["budget", *(format_bytes(trace["budget_bytes"]) for trace in traces), ""],
        ["most possible", *ratios([trace["most_possible"] for trace in traces]), ""],
    ]
    rows += [[row["policy"], *ratios(row["kept"]), row["largest"] or "none"] for row in facts["policies"]]
    columns = ["policy", *(trace["name"] for trace in traces), "largest that runs"]
    return text_table("throughput kept, in-core being 1", columns, rows)
