"""Perfetto: iterations as JSON that https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project (complete events "X", counters "C", names "M"); times are in
microseconds. Up to three processes are shown:

    simulated   rows for the computation, the link out, the link in and stalls; counters for the memory that is taken
                and the budget
    recorded    the functions as the trace has them, without the time that they waited for memory
    measured    what a running program did (`recording.py`): functions by thread, both links, stalls, memory. The
                prediction is then shown as "simulated", from the start of an iteration that was measured
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ooc_alloc import timeline as kinds
from swapd.observing.analysis import allocated_by, printable
from swapd.observing.recording import Predicted, Recording
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Events
from swapd.trace.trace import Trace

SIMULATED, RECORDED, MEASURED = 1, 2, 3
COMPUTE, OUT, IN, STALLS = 1, 2, 3, 4
_THREADS = 100  # a thread's functions are in the row of this number plus the thread's
_ROWS = {COMPUTE: "compute", OUT: "out link", IN: "in link", STALLS: "stalls"}


def to_perfetto(problem: Problem, events: Events, trace: Trace | None = None) -> str:
    """The JSON text of a simulated iteration, with the recorded functions if their `trace` is given."""
    found = [*_names(trace is not None), *_simulated(problem, events)]
    if trace is not None:
        found += _recorded(trace)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": found})


def measured_to_perfetto(recording: Recording, predicted: Predicted | None = None, trace: Trace | None = None) -> str:
    """The JSON text of what was measured, from the first event on, with what was predicted beside it.

    Args:
        recording: the ring's events.
        predicted: the simulated iteration; it is shown beside the last measured one of its sequence, which is one under
            a plan if there is any.
        trace: the trace of that sequence, whose places tell where variables were allocated.
    """
    begin = float(recording.events["start"][0]) if len(recording.events) else recording.now
    found = [*_measured_names(recording), *_measured(recording, begin, trace)]
    span = None if predicted is None or trace is None else recording.span_of(trace.fingerprint)
    if predicted is not None and span is not None:
        found += _names(False)
        for event in _simulated(predicted.problem, predicted.events):
            found.append({**event, "ts": event["ts"] + 1e6 * (span.start - begin)})
    facts = {
        "device": printable(recording.device),
        "pid": recording.pid,
        "events": len(recording.events),
        "lost_events": recording.lost,
        "unix_seconds_at_0": recording.unix_now - (recording.now - begin),
        "budget_bytes": recording.budget_bytes,
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": facts, "traceEvents": found})


def encoded(text: str, path: Path) -> bytes:
    """The content of the file, compressed if its name ends in .gz, which Perfetto opens too."""
    content = text.encode("utf-8")
    return gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content


def _measured_names(recording: Recording) -> Iterator[dict[str, Any]]:
    yield _name("process_name", MEASURED, 0, f"measured: process {recording.pid} on {printable(recording.device)}")
    functions = recording.of_kind(kinds.FUNCTION)
    when = ", as enqueued" if len(functions) and functions["flags"][0] & kinds.ENQUEUED else ""
    for thread in np.unique(functions["thread"]).tolist():
        yield from _row(MEASURED, _THREADS + thread, f"functions of thread {thread}{when}")
    for row in (OUT, IN, STALLS):
        yield from _row(MEASURED, row, _ROWS[row])
    yield from _row(MEASURED, COMPUTE, "iterations")


def _measured(recording: Recording, begin: float, trace: Trace | None) -> Iterator[dict[str, Any]]:
    numbers = {s.number for s in recording.spans if trace is not None and s.fingerprint == trace.fingerprint}
    names = {number: printable(name) for number, name in recording.names.items()}

    def variable(row: Any) -> dict[str, Any]:
        v, iteration = int(row["variable"]), int(row["iteration"])
        facts: dict[str, Any] = {"variable": v, "of_iteration": iteration} if v >= 0 else {}
        parts = trace.parts_of(v) if trace is not None and iteration in numbers and v >= 0 else ()
        if trace is not None and parts:
            facts["of_bytes"] = int(trace.variable_bytes[parts[0] : parts[-1] + 1].sum())
            facts |= {"in_parts": len(parts)} if len(parts) > 1 else {}
            facts |= {"allocated_at": printable(trace.place(parts[0]), 200)} if trace.place(parts[0]) else {}
        return facts

    def span(row: Any, place: int, name: str, **facts: Any) -> dict[str, Any]:
        return _span(MEASURED, place, name, float(row["start"]) - begin, recording.end_of(row) - begin, **facts)

    def counter(name: str, when: float, value: int) -> dict[str, Any]:
        return _counter(name, when - begin, value, MEASURED)

    for row in recording.events:
        kind, on_demand = int(row["kind"]), bool(row["flags"] & kinds.ON_DEMAND)
        facts: dict[str, Any]
        if kind == kinds.FUNCTION:
            facts = {"function": int(row["index"]), "iteration": int(row["iteration"])}
            facts |= {} if row["end"] >= 0 else {"still_runs": 1}
            yield span(row, _THREADS + int(row["thread"]), names[int(row["function"])], **facts)
        elif kind in (kinds.COPY_OUT, kinds.COPY_IN):
            known = f"variable {row['variable']}" if row["variable"] >= 0 else f"region {row['region']}"
            facts = {"function": int(row["index"]), "bytes": int(row["bytes"]), "planned": not on_demand}
            name = known + (" (demand)" if on_demand else " (write-back)" if row["flags"] & kinds.WRITE_BACK else "")
            yield span(row, OUT if kind == kinds.COPY_OUT else IN, name, **facts, **variable(row))
        elif kind in (kinds.STALL_SWAP_IN, kinds.STALL_ROOM):
            room = kind == kinds.STALL_ROOM
            who = names.get(int(row["function"]), "(no function)")
            facts = {"function": int(row["index"]), "waits_for": "room" if room else f"variable {row['variable']}"}
            yield span(row, STALLS, f"{who} waits", **facts, **({} if room else variable(row)))
        elif kind == kinds.ITERATION:
            facts = {
                "fingerprint": f"{int(row['bytes']):016x}",
                "planned": not on_demand,
                "functions": int(row["index"]),
            }
            yield span(row, COMPUTE, f"iteration {row['iteration']}", **facts)
        elif kind == kinds.MEMORY:
            when = float(row["start"])
            yield counter("used bytes", when, int(row["bytes"]))
            yield counter("cached bytes", when, int(row["cached_bytes"]))
            yield counter("free bytes", when, int(row["free_bytes"]))
    for when, value in recording.live():
        yield counter("live bytes", max(when, begin), value)
    for when in (begin, recording.now):
        yield counter("budget bytes", when, recording.budget_bytes)


def _names(with_recorded: bool) -> Iterator[dict[str, Any]]:
    yield _name("process_name", SIMULATED, 0, "simulated")
    for row, text in _ROWS.items():
        yield from _row(SIMULATED, row, text)
    if with_recorded:
        yield _name("process_name", RECORDED, 0, "recorded")
        yield _name("thread_name", RECORDED, COMPUTE, "compute")


def _span(pid: int, row: int, name: str, start: float, end: float, **facts: Any) -> dict[str, Any]:
    start = max(start, 0.0)  # what began before the iteration is cut off
    times = {"ts": 1e6 * start, "dur": 1e6 * max(end - start, 0.0)}
    return {"ph": "X", "name": name, "pid": pid, "tid": row, **times, "args": facts}


def _name(kind: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": text}}


def _row(pid: int, row: int, text: str) -> Iterator[dict[str, Any]]:
    yield _name("thread_name", pid, row, text)
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": row, "args": {"sort_index": row}}


def _simulated(problem: Problem, events: Events) -> Iterator[dict[str, Any]]:
    names = [printable(name) for name in problem.names]
    for run in events.runs:
        yield _span(SIMULATED, COMPUTE, names[run.function], run.start, run.end, function=run.function)
    for copy in events.copies:
        yield _copy(problem, copy)
    for stall in events.stalls:
        cause = "room" if stall.variable < 0 else problem.label(stall.variable)
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
    name = (problem.label(v) if v >= 0 else "freed variable") + ("" if copy.is_planned else " (demand)")
    return _span(SIMULATED, OUT if copy.is_out else IN, name, copy.start, copy.end, **facts)


def _counter(name: str, when: float, value: int, pid: int = SIMULATED) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": 1e6 * when, "args": {"bytes": value}}


def _recorded(trace: Trace) -> Iterator[dict[str, Any]]:
    rows = zip(trace.function_names, trace.function_start.tolist(), trace.function_seconds.tolist())
    for function, (name, start, seconds) in enumerate(rows):
        yield _span(RECORDED, COMPUTE, printable(name), start, start + seconds, function=function)
