"""`swapd report`: pictures of a simulated iteration, alone or in a page with tables; a page about a running process."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import click
import numpy as np

from swapd.cli.output import OUTPUT, Failure, write_file
from swapd.cli.problems import FILE, budget_option, load_trace, plan_option, simulated, simulation_options
from swapd.cli.simulate import advice_for, simulate_facts, simulate_rows, stall_tables
from swapd.cli.top import newest, seconds_option, write_answer
from swapd.observing.analysis import DEMAND, Outcome
from swapd.observing.charts import picture, scene_chart, starts_chart
from swapd.observing.recording import Predicted
from swapd.observing.report_page import bullets, document, figure, table
from swapd.simulation.events import Events
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Trace
from swapd.units import format_bytes, format_duration, format_need

KINDS = (".svg", ".html")
_LOOKS: tuple[str, ...] = ("used", "live", "run", "out", "in", "demand", "stall")


@click.command("report")
@click.argument("trace_path", metavar="TRACE", required=False, type=FILE)
@budget_option(" Needed unless --plan says it.")
@plan_option
@simulation_options(DEMAND)
@click.option("--output", "-o", required=True, type=OUTPUT, help="A .svg or .html file.")
@click.option(
    "--measured",
    "measured_path",
    metavar="TRACE",
    type=FILE,
    help="A trace of the same functions whose starts were measured: drawn against the simulated ones.",
)
@click.option("--pid", type=int, help="A running process instead of TRACE; 0: the one that was started last.")
@seconds_option("With --pid: how long to look, where the process keeps no timeline of its own.")
def command(
    trace_path: Path | None, output: Path, measured_path: Path | None, pid: int | None, seconds: float, **asked: Any
) -> int:
    """Draw what happens in an iteration of TRACE, as simulated.

    Memory over time with the budget, and what would be live if nothing were swapped; transfers on both links; stalls.
    A .html page also has the figures and the advice of `swapd simulate`, and needs no other file.

    With --measured, a .svg shows the measured starts against the simulated ones, a page both pictures. A trace
    of `swapd record` leaves out the time that functions waited for memory, so it lies below by the simulated stalls.

    With --pid, the page is about a process that runs, as OOC_REPORT writes it when a program ends: what happened, what
    waited for what and where that was allocated, predicted against measured. It has to be started with OOC_STATUS=1.

    \b
    swapd report gpt.trace --budget 8GiB -o gpt.html
    """
    kind = output.suffix.lower()
    if pid is not None:
        if trace_path is not None or kind != ".html":
            raise click.UsageError("--pid makes a page (.html) about a process, and takes no TRACE")
        write_answer(pid or newest(), "report", output, seconds)
        return 0
    if trace_path is None:
        raise click.UsageError("Missing argument 'TRACE'; or give --pid")
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
