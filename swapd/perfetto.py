"""Perfetto: a simulated iteration as JSON that https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project (complete events "X", counters "C", names "M"); times are in
microseconds. Two processes are shown:

    simulated   rows for the computation, the link out, the link in and stalls; counters for the memory that is taken
                and the budget
    recorded    the functions as the trace has them: without the time that they waited for memory
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from swapd.analysis import allocated_by, printable
from swapd.events import Copy, Events
from swapd.problem import Problem
from swapd.trace import Trace

SIMULATED, RECORDED = 1, 2
COMPUTE, OUT, IN, STALLS = 1, 2, 3, 4
_ROWS = {COMPUTE: "compute", OUT: "out link", IN: "in link", STALLS: "stalls"}


def to_perfetto(problem: Problem, events: Events, trace: Trace | None = None) -> str:
    """The JSON text; with the recorded functions when their `trace` is given."""
    found = [*_names(trace is not None), *_simulated(problem, events)]
    if trace is not None:
        found += _recorded(trace)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": found})


def _names(with_recorded: bool) -> Iterator[dict[str, Any]]:
    def name(kind: str, pid: int, tid: int, text: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}

    yield name("process_name", SIMULATED, 0, "simulated")
    for row, text in _ROWS.items():
        yield name("thread_name", SIMULATED, row, text)
        yield {"ph": "M", "name": "thread_sort_index", "pid": SIMULATED, "tid": row, "args": {"sort_index": row}}
    if with_recorded:
        yield name("process_name", RECORDED, 0, "recorded")
        yield name("thread_name", RECORDED, COMPUTE, "compute")


def _span(pid: int, row: int, name: str, start: float, end: float, **facts: Any) -> dict[str, Any]:
    start = max(start, 0.0)  # what began before the iteration is cut off
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "name": name, "pid": pid, "tid": row, **times, "args": facts}


def _simulated(problem: Problem, events: Events) -> Iterator[dict[str, Any]]:
    names = [printable(name) for name in problem.names]
    for run in events.runs:
        yield _span(SIMULATED, COMPUTE, names[run.function], run.start, run.end, function=run.function)
    for copy in events.copies:
        yield _copy(problem, copy)
    for stall in events.stalls:
        cause = "room" if stall.variable < 0 else f"variable {stall.variable}"
        facts = {"function": stall.function, "waits_for": cause}
        yield _span(SIMULATED, STALLS, f"{names[stall.function]} waits", stall.start, stall.end, **facts)
    slabs, chunk = problem.slab_chunks, problem.chunk_bytes
    before = -1
    for held in events.held:
        if held.chunks != before:
            before = held.chunks
            yield _counter("resident bytes", held.start, (held.chunks + slabs) * chunk)
    for when in (0.0, events.seconds):
        yield _counter("budget bytes", when, problem.budget_bytes)


def _copy(problem: Problem, copy: Copy) -> dict[str, Any]:
    v = copy.variable
    facts: dict[str, Any] = {"bytes": copy.chunks * problem.chunk_bytes, "planned": copy.is_planned}
    if v >= 0:
        facts |= {"of_bytes": int(problem.chunks[v]) * problem.chunk_bytes, "allocated_by": allocated_by(problem, v)}
    name = (f"variable {v}" if v >= 0 else "freed variable") + ("" if copy.is_planned else " (demand)")
    return _span(SIMULATED, OUT if copy.is_out else IN, name, copy.start, copy.end, **facts)


def _counter(name: str, when: float, value: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": SIMULATED, "tid": 0, "ts": 1e6 * when, "args": {"bytes": value}}


def _recorded(trace: Trace) -> Iterator[dict[str, Any]]:
    rows = zip(trace.function_names, trace.function_start.tolist(), trace.function_seconds.tolist())
    for function, (name, start, seconds) in enumerate(rows):
        yield _span(RECORDED, COMPUTE, printable(name), start, start + seconds, function=function)
