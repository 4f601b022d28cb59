"""`swapd report`: pictures of a simulated iteration, alone or in a page with tables; a page about a running process."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import click
import numpy as np

from swapd.cli.output import Failure
from swapd.cli.problems import (
    FILE,
    budget_for,
    budget_unless_planned,
    link_options,
    load_plan,
    load_trace,
    machine_of,
    make_problem,
    parsed,
)
from swapd.cli.simulate import advice_for, simulate_facts, simulate_rows, simulated, stall_tables
from swapd.cli.top import newest, write_answer
from swapd.observing.analysis import DEMAND
from swapd.observing.charts import picture, scene_chart, starts_chart
from swapd.observing.recording import Predicted
from swapd.observing.report_page import bullets, document, figure, table
from swapd.planning.problem import Problem
from swapd.policies import available
from swapd.settings import parse_window
from swapd.simulation.events import Events
from swapd.simulation.simulator import simulate_events
from swapd.trace.trace import Trace
from swapd.units import Amount, format_bytes, format_duration

KINDS = (".svg", ".html")
_LOOKS: tuple[str, ...] = ("used", "live", "run", "out", "in", "demand", "stall")


@click.command("report")
@click.argument("trace_path", metavar="TRACE", required=False, type=FILE)
@budget_unless_planned
@click.option(
    "--output", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), help="A .svg or .html file."
)
@click.option(
    "--policy",
    default="auto",
    show_default=True,
    type=click.Choice([*available(), DEMAND]),
    help="Scheduling policy; demand: no plan.",
)
@click.option("--plan", "plan_path", metavar="FILE", type=FILE, help="Show this plan, of `swapd plan -o`.")
@click.option("--window", metavar="BYTES|auto", callback=parsed(parse_window), help="Schedule window [auto].")
@click.option(
    "--measured",
    "measured_path",
    metavar="TRACE",
    type=FILE,
    help="A trace of the same functions whose starts were measured: drawn against the simulated ones.",
)
@click.option("--pid", type=int, help="A running process instead of TRACE; 0: the one that was started last.")
@click.option(
    "--seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0, 3600),
    help="With --pid: how long to look, where the process keeps no timeline of its own.",
)
@link_options
def command(
    trace_path: Path | None,
    budget: Amount | None,
    output: Path,
    policy: str,
    plan_path: Path | None,
    window: int | None,
    measured_path: Path | None,
    pid: int | None,
    seconds: float,
    chunk_size: int | None,
    bandwidth: Any,
    device: str | None,
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
    trace, machine = load_trace(trace_path), machine_of(bandwidth, device)
    measured = None if measured_path is None else load_measured(measured_path, trace)
    plan = None if plan_path is None else load_plan(plan_path, trace, chunk_size)
    chunk = chunk_size if plan is None else plan.chunk_bytes
    problem = make_problem(trace, budget_for(trace, budget, plan), chunk, machine)
    outcome = simulated(problem, policy, window, plan)
    _, events = simulate_events(problem, outcome.plan)
    line = caption(problem, outcome.policy, outcome.timeline.seconds, outcome.timeline.stall_seconds)
    shown = [(scene_chart(Predicted(problem, events, outcome.plan).scene()), line, _LOOKS)]
    if measured is not None:
        shown.append((*_measured(events, measured), ()))
    if kind == ".html":  # only a page has room for all pictures
        advice = advice_for(outcome, trace, machine, window, plan is not None)
        text = page(trace_path.name, simulate_facts(outcome, 10, advice), [figure(*one) for one in shown])
    else:
        chart, words, _ = shown[-1]
        text = picture(chart, words)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {output}: {error.strerror}") from None
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


def caption(problem: Problem, policy: str, seconds: float, stall_seconds: float) -> str:
    """One line about the picture."""
    peak = problem.live_peak_chunks * problem.chunk_bytes
    return (
        f"{policy}: live peak {format_bytes(peak)} in {format_bytes(problem.budget_bytes)}, "
        f"a step of {format_duration(seconds)}, of which stalls {format_duration(stall_seconds)} (simulated)"
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
