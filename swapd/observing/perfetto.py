"""Perfetto: iterations as JSON that https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project (complete events "X", counters "C", names "M"); times are in
microseconds. Up to three processes are shown:

    simulated   rows for the computation, the link out, the link in (or to and from the disk, where swapped data are
                on one) and stalls; counters for the memory that is taken and the budget
    recorded    the functions as the trace has them, without the time that they waited for memory
    measured    what a running program did (`recording.py`): functions by thread, both links, stalls, memory. The
                prediction is then shown as "simulated", from the start of an iteration that was measured
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ooc_alloc import timeline as kinds
from swapd.observing.analysis import allocated_by, printable
from swapd.observing.recording import Predicted, Recording
from swapd.planning.problem import Problem
from swapd.simulation.events import Events
from swapd.trace.trace import Trace

SIMULATED, RECORDED, MEASURED = 1, 2, 3
COMPUTE, OUT, IN, STALLS = 1, 2, 3, 4
_THREADS = 100  # a thread's functions are in the row of this number plus the thread's
_ROWS = {COMPUTE: "compute", OUT: "out link", IN: "in link", STALLS: "stalls"}
_DISK_ROWS = {**_ROWS, OUT: "to the disk", IN: "from the disk"}


class _Process:
    """One process of the file, with its rows.

    Args:
        zero: the time, in seconds, before which everything is cut off.
        at: where `zero` is on the file's axis.
    """

    def __init__(self, pid: int, name: str, rows: Mapping[int, str], zero: float = 0.0, at: float = 0.0) -> None:
        self.pid, self.zero, self.at = pid, zero, at
        self.events: list[dict[str, Any]] = []
        self._add("M", 0, "process_name", {"name": name})
        for row, text in rows.items():
            self._add("M", row, "thread_name", {"name": text})
            self._add("M", row, "thread_sort_index", {"sort_index": row})

    def span(self, row: int, name: str, start: float, end: float, **facts: Any) -> None:
        begin = max(start - self.zero, 0.0)
        times = {"ts": 1e6 * (self.at + begin), "dur": 1e6 * max(end - self.zero - begin, 0.0)}
        self._add("X", row, name, facts, **times)

    def counter(self, name: str, when: float, value: int) -> None:
        self._add("C", 0, name, {"bytes": value}, ts=1e6 * (self.at + max(when - self.zero, 0.0)))

    def _add(self, kind: str, row: int, name: str, facts: dict[str, Any], **times: float) -> None:
        self.events.append({"ph": kind, "name": name, "pid": self.pid, "tid": row, **times, "args": facts})


def to_perfetto(problem: Problem, events: Events, trace: Trace) -> str:
    """The JSON text of a simulated iteration, with the functions as they were recorded."""
    recorded = _Process(RECORDED, "recorded", {COMPUTE: _ROWS[COMPUTE]})
    rows = zip(trace.function_names, trace.function_start.tolist(), trace.function_seconds.tolist())
    for function, (name, start, seconds) in enumerate(rows):
        recorded.span(COMPUTE, printable(name), start, start + seconds, function=function)
    return _text([_simulated(problem, events), recorded])


def measured_to_perfetto(recording: Recording, predicted: Predicted | None = None, trace: Trace | None = None) -> str:
    """The JSON text of what was measured, from the first event on, with what was predicted beside it.

    Args:
        recording: the ring's events.
        predicted: the simulated iteration; it is shown beside the last measured one of its sequence, which is one under
            a plan if there is any.
        trace: the trace of that sequence, whose places tell where variables were allocated.
    """
    begin = recording.begin
    processes = [_measured(recording, trace)]
    span = None if predicted is None or trace is None else recording.span_of(trace.fingerprint)
    if predicted is not None and span is not None:
        processes.append(_simulated(predicted.problem, predicted.events, span.start - begin, _rows(recording)))
    facts = {
        "device": printable(recording.device),
        "pid": recording.pid,
        "events": len(recording.events),
        "lost_events": recording.lost,
        "unix_seconds_at_0": recording.unix_now - (recording.now - begin),
        "budget_bytes": recording.budget_bytes,
        "swapped_to": "disk" if recording.disk_budget_bytes else "host memory",
    }
    facts |= {"disk_budget_bytes": recording.disk_budget_bytes} if recording.disk_budget_bytes else {}
    return _text(processes, otherData=facts)


def _text(processes: list[_Process], **more: Any) -> str:
    events = [event for process in processes for event in process.events]
    return json.dumps({"displayTimeUnit": "ms", **more, "traceEvents": events})


def encoded(text: str, path: Path) -> bytes:
    """The content of the file, compressed if its name ends in .gz, which Perfetto opens too."""
    content = text.encode("utf-8")
    return gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content


def _rows(recording: Recording) -> Mapping[int, str]:
    """The names of the rows: copies go to the disk and come from it where there is one."""
    return _DISK_ROWS if recording.disk_budget_bytes else _ROWS


def _measured(recording: Recording, trace: Trace | None) -> _Process:
    functions = recording.of_kind(kinds.FUNCTION)
    enqueued = ", as enqueued" if len(functions) and functions["flags"][0] & kinds.ENQUEUED else ""
    threads = np.unique(functions["thread"]).tolist()
    rows = {_THREADS + thread: f"functions of thread {thread}{enqueued}" for thread in threads}
    rows |= {**_rows(recording), COMPUTE: "iterations"}
    title = f"measured: process {recording.pid} on {printable(recording.device)}"
    process = _Process(MEASURED, title, rows, zero=recording.begin)
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

    def span(row: Any, place: int, name: str, **facts: Any) -> None:
        process.span(place, name, float(row["start"]), recording.end_of(row), **facts)

    for row in recording.events:
        kind, on_demand = int(row["kind"]), bool(row["flags"] & kinds.ON_DEMAND)
        facts: dict[str, Any]
        if kind == kinds.FUNCTION:
            facts = {"function": int(row["index"]), "iteration": int(row["iteration"])}
            facts |= {} if row["end"] >= 0 else {"still_runs": 1}
            span(row, _THREADS + int(row["thread"]), names[int(row["function"])], **facts)
        elif kind in (kinds.COPY_OUT, kinds.COPY_IN):
            known = f"variable {row['variable']}" if row["variable"] >= 0 else f"region {row['region']}"
            facts = {"function": int(row["index"]), "bytes": int(row["bytes"]), "planned": not on_demand}
            name = known + (" (demand)" if on_demand else " (write-back)" if row["flags"] & kinds.WRITE_BACK else "")
            span(row, OUT if kind == kinds.COPY_OUT else IN, name, **facts, **variable(row))
        elif kind in (kinds.STALL_SWAP_IN, kinds.STALL_ROOM):
            room = kind == kinds.STALL_ROOM
            who = names.get(int(row["function"]), "(no function)")
            facts = {"function": int(row["index"]), "waits_for": "room" if room else f"variable {row['variable']}"}
            span(row, STALLS, f"{who} waits", **facts, **({} if room else variable(row)))
        elif kind == kinds.ITERATION:
            facts = {"fingerprint": f"{int(row['bytes']):016x}", "planned": not on_demand}
            span(row, COMPUTE, f"iteration {row['iteration']}", **facts, functions=int(row["index"]))
        elif kind == kinds.MEMORY:
            for name, field in (("used", "bytes"), ("cached", "cached_bytes"), ("free", "free_bytes")):
                process.counter(f"{name} bytes", float(row["start"]), int(row[field]))
    for when, value in recording.live():
        process.counter("live bytes", when, value)
    for when in (recording.begin, recording.now):
        process.counter("budget bytes", when, recording.budget_bytes)
    return process


def _simulated(problem: Problem, events: Events, at: float = 0.0, rows: Mapping[int, str] = _ROWS) -> _Process:
    process = _Process(SIMULATED, "simulated", rows, at=at)
    names = [printable(name) for name in problem.names]
    for run in events.runs:
        process.span(COMPUTE, names[run.function], run.start, run.end, function=run.function)
    for copy in events.copies:
        v = copy.variable
        facts: dict[str, Any] = {"bytes": copy.bytes, "planned": copy.is_planned}
        if v >= 0:
            facts["of_bytes"] = int(problem.variable_bytes[v])
            facts["allocated_by"] = allocated_by(problem, v)
        name = (problem.label(v) if v >= 0 else "freed variable") + ("" if copy.is_planned else " (demand)")
        process.span(OUT if copy.is_out else IN, name, copy.start, copy.end, **facts)
    for stall in events.stalls:
        cause = "room" if stall.variable < 0 else problem.label(stall.variable)
        name = f"{names[stall.function]} waits"
        process.span(STALLS, name, stall.start, stall.end, function=stall.function, waits_for=cause)
    before = -1
    for held in events.held:
        if held.chunks != before:
            before = held.chunks
            process.counter("resident bytes", held.start, (before + problem.slab_chunks) * problem.chunk_bytes)
    for when in (0.0, events.seconds):
        process.counter("budget bytes", when, problem.budget_bytes)
    return process
