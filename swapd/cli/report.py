"""`swapd report`: pictures of a simulated iteration, a page about a running process, a job's ranks side by side."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import click
import numpy as np

from swapd.cli.output import OUTPUT, Failure, console, json_option, print_json, text_table, write_file
from swapd.cli.problems import FILE, budget_option, load_trace, plan_option, simulated, simulation_options
from swapd.cli.simulate import advice_for, simulate_facts, simulate_rows, stall_tables
from swapd.cli.top import newest, seconds_option, write_answer
from swapd.observing import rank_report
from swapd.observing.analysis import DEMAND, Outcome
from swapd.observing.charts import picture, scene_chart, starts_chart
from swapd.observing.recording import Predicted
from swapd.observing.report_page import bullets, document, figure, table
from swapd.simulation.events import Events
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Trace
from swapd.units import format_bytes, format_duration, format_need

KINDS = (".svg", ".html")
_LABELS_WIDE, _RANKS_WIDE = 22, 16  # characters
_LOOKS: tuple[str, ...] = ("used", "live", "run", "out", "in", "demand", "stall")


@click.command("report")
@click.argument("paths", metavar="TRACE|FOLDER|SUMMARY...", nargs=-1, type=click.Path(exists=True, path_type=Path))
@budget_option(" Needed unless --plan says it.")
@plan_option
@simulation_options(DEMAND)
@click.option("--output", "-o", type=OUTPUT, help="A .svg or .html file; of ranks a .html file, or none.")
@click.option(
    "--measured",
    "measured_path",
    metavar="TRACE",
    type=FILE,
    help="A trace of the same functions whose starts were measured: drawn against the simulated ones.",
)
@click.option("--pid", type=int, help="A running process instead of TRACE; 0: the one that was started last.")
@seconds_option("With --pid: how long to look, where the process keeps no timeline of its own.")
@json_option
def command(
    paths: tuple[Path, ...],
    output: Path | None,
    measured_path: Path | None,
    pid: int | None,
    seconds: float,
    *,
    as_json: bool,
    **asked: Any,
) -> int:
    """Draw what happens in an iteration of TRACE, as simulated.

    Memory over time with the budget, and what would be live if nothing were swapped; transfers on both links; stalls.
    A .html page also has the figures and the advice of `swapd simulate`, and needs no other file.

    With --measured, a .svg shows the measured starts against the simulated ones, a page both pictures. A trace
    of `swapd record` leaves out the time that functions waited for memory, so it lies below by the simulated stalls.

    With --pid, the page is about a process that runs, as OOC_REPORT writes it when a program ends: what happened, what
    waited for what and where that was allocated, predicted against measured. It has to be started with OOC_STATUS=1.

    With the FOLDER that the ranks of a job wrote their summaries to (OOC_SUMMARY=FOLDER/summary.json under torchrun and
    its like), or with SUMMARY files (.json), their figures stand side by side, and the slowest rank is named: printed,
    as JSON (--json), or as a page. Processes that managed nothing wrote no summary.

    \b
    swapd report gpt.trace --budget 8GiB -o gpt.html
    swapd report FOLDER
    """
    if pid is None and paths and (len(paths) > 1 or paths[0].is_dir() or paths[0].suffix == ".json"):
        return _show_ranks(paths, output, as_json=as_json)
    if as_json:
        raise click.UsageError("--json is for summaries of ranks; `swapd simulate --json` has the figures of a TRACE")
    if output is None:
        raise click.UsageError("Missing option '--output' / '-o'")
    kind = output.suffix.lower()
    if pid is not None:
        if paths or kind != ".html":
            raise click.UsageError("--pid makes a page (.html) about a process, and takes no TRACE")
        write_answer(pid or newest(), "report", output, seconds)
        return 0
    if not paths:
        raise click.UsageError("Missing argument 'TRACE'; or give a folder of summaries, or --pid")
    trace_path = paths[0]
    if kind not in KINDS:
        raise click.UsageError(f"--output: {output.name!r} does not end in {', '.join(KINDS)}")
    case = simulated(trace_path, **asked)
    problem, outcome = case.outcome.problem, case.outcome
    _, events = simulate_events(problem, outcome.plan)
    line = caption(outcome)
    shown = [(scene_chart(Predicted(problem, events, outcome.plan).scene()), line, _LOOKS)]
    if measured_path is not None:
        shown.append((*_measured(events, load_measured(measured_path, case.trace)), ()))
    if kind == ".html":  # only a page has room for all pictures
        facts = simulate_facts(outcome, 10, advice_for(case))
        text = page(trace_path.name, facts, [figure(*one) for one in shown])
    else:
        chart, words, _ = shown[-1]
        text = picture(chart, words)
    write_file(output, text)
    click.echo(f"{output}: {line}")
    return 0


def _show_ranks(paths: tuple[Path, ...], output: Path | None, *, as_json: bool) -> int:
    """Puts the summaries of a folder, or in these files, side by side. Raises Failure or click.UsageError."""
    context = click.get_current_context()
    taken = {"paths", "output", "as_json"}
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source == click.core.ParameterSource.COMMANDLINE and option.name not in taken:
            raise click.UsageError(f"{option.opts[0]} is for one TRACE, not for summaries of ranks")
    if output is not None and output.suffix.lower() != ".html":
        raise click.UsageError(f"--output: {output.name!r} does not end in .html; ranks make a page")
    try:
        ranks = rank_report.ranks_in(paths[0]) if paths[0].is_dir() else rank_report.ranks_of(paths)
    except rank_report.RanksError as error:
        raise Failure(str(error)) from None
    columns, rows = rank_report.rows(ranks)
    title, sentences = "Ranks of a job, side by side", list(rank_report.notes(ranks))
    if output is not None:
        figures = table(columns, [[html.escape(cell) for cell in row] for row in rows], range(1, len(columns)))
        write_file(output, document(title, [f"<h1>{title}</h1>", bullets(sentences), figures]))
    if as_json:
        print_json(rank_report.facts(ranks))
        return 0
    if output is not None:
        click.echo(f"{output}: {sentences[0]}")
        return 0
    screen = console()
    at_once = max((screen.width - _LABELS_WIDE) // _RANKS_WIDE, 1)  # a terminal has no room for many ranks
    for first in range(1, len(columns), at_once):
        part = slice(first, first + at_once)
        screen.print(text_table("", [columns[0], *columns[part]], [[row[0], *row[part]] for row in rows]))
    for sentence in sentences:
        click.echo(sentence)
    return 0


def load_measured(path: Path, trace: Trace) -> Trace:
    """A trace with measured starts, of the same functions as `trace`. Raises Failure."""
    measured = load_trace(path)
    if measured.function_names != trace.function_names:
        raise Failure(f"{path} does not have the same functions as the trace; it cannot be drawn against it")
    if measured.functions > 1 and not (measured.function_start > 0).any():
        raise Failure(f"{path} carries no measured starts: all functions start at 0")
    return measured


def caption(outcome: Outcome) -> str:
    """One line about the picture."""
    problem, timeline = outcome.problem, outcome.timeline
    return (
        f"{outcome.policy}: {format_need(problem.fit_budget_bytes)} needed in-core, a budget of "
        f"{format_bytes(problem.budget_bytes)}, a step of {format_duration(timeline.seconds)}, of which stalls "
        f"{format_duration(timeline.stall_seconds)} (simulated)"
    )


def _measured(events: Events, trace: Trace) -> tuple[str, str]:
    """The chart of measured against simulated starts, and the line about it."""
    starts = np.array([run.start for run in events.runs])
    measured = trace.function_start - trace.function_start[:1].sum()
    starts = starts - starts[:1].sum()
    ends = f"last function: simulated {_last(starts)}, measured {_last(measured)}"
    return starts_chart(starts.tolist(), measured.tolist()), f"Starts of functions, from the first one on; {ends}"


def _last(starts: Any) -> str:
    return format_duration(float(starts[-1])) if len(starts) else "none"


def page(name: str, facts: dict[str, Any], figures: list[str]) -> str:
    """The page about a simulated iteration. Everything that comes from a trace is escaped; `figures` are HTML."""
    parts = [f"<h1>{html.escape(facts['policy'])} on {html.escape(name)}, simulated</h1>", *figures]
    parts += ["<h2>figures</h2>", _texts((), simulate_rows(facts))]
    for title, columns, rows in stall_tables(facts):
        parts += [f"<h2>{html.escape(title)}</h2>", _texts(columns, rows)]
    if facts["advice"]:
        parts += ["<h2>advice, each as simulated</h2>", bullets(advice["text"] for advice in facts["advice"])]
    return document(name, parts)


def _texts(columns: tuple[str, ...], rows: list[Any]) -> str:
    return table(columns, [[html.escape(cell) for cell in row] for row in rows])
