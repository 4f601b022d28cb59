"""Whole models under `torch.compile`: what interception costs when everything fits, and a step at 2 times the budget.

The link is as slow, each way, as makes moving the spill take as long as the computation; the bound is that of
`benchmarks.step_time`. Plain steps and steps with memory to spare take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import run, torch_threads
from benchmarks.step_time import IN_CORE, Reference, median, reference, run_mode
from benchmarks.workloads import WORKLOADS
from swapd.trace.trace import Trace

NAME = "compiled"
PLAIN = "plain"
OVERSUBSCRIPTION = 2.0


def measure(target: Path, *, quick: bool, rounds: int, steps: int, say: Callable[[str], None]) -> None:
    """Runs everything and writes the raw data. Raises RunFailed."""
    results.clear(target, NAME)
    shared: dict[str, Any] = {"quick": quick, "threads": torch_threads()}
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as scratch:
        for eager in WORKLOADS:
            plus = ("--compile",)
            workload = replace(eager, arguments=eager.arguments + plus, quick_arguments=eager.quick_arguments + plus)
            trace_path = Path(scratch) / f"{workload.name}.trace"
            first: Reference | None = None
            for turn in range(rounds):
                plain = run(workload, steps, alloc=False, **shared) | {"mode": PLAIN, "round": turn}
                results.save(target, NAME, f"{workload.name}-{PLAIN}-{turn}", plain)
                spare = run(workload, steps, trace_path=trace_path, **shared) | {"mode": IN_CORE, "round": turn}
                results.save(target, NAME, f"{workload.name}-{IN_CORE}-{turn}", spare)
                say(f"{workload.name}: with memory to spare {median(spare) / median(plain):.3f} of the plain step")
                first = first or reference([spare])
                record = run_mode(workload, steps, first, OVERSUBSCRIPTION, "auto", shared, Trace.load(trace_path))
                results.save(target, NAME, f"{workload.name}-2x-{turn}", record | {"round": turn})
                say(f"{workload.name}: 2x, {median(record) / record['bound_seconds']:.3f} of the bound")


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    rows = []
    for name in dict.fromkeys(record["workload"] for record in records):
        of = {
            mode: sorted((r for r in records if (r["workload"], r["mode"]) == (name, mode)), key=lambda r: r["round"])
            for mode in (PLAIN, IN_CORE, "auto")
        }
        spare = [median(a) / median(b) for a, b in zip(of[IN_CORE], of[PLAIN], strict=True)]
        over = [median(record) / record["bound_seconds"] for record in of["auto"]]
        summary = of["auto"][0]["summary"]
        digests = {record["digest"] for records in of.values() for record in records}
        rows.append(
            [
                name,
                f"{statistics.median(map(median, of[PLAIN])):.3f}",
                f"{statistics.median(spare):.3f} ({min(spare):.3f} to {max(spare):.3f})",
                f"{statistics.median(map(median, of['auto'])):.3f}",
                f"{statistics.median(over):.3f} ({min(over):.3f} to {max(over):.3f})",
                results.mib(summary["live_peak_bytes"]),
                results.mib(summary["min_budget_bytes"]),
                "yes" if len(digests) == 1 else "NO",
            ]
        )
    if not rows:
        return ""
    header = "model|plain step s|to spare, over plain|step at 2x|over the bound|live MiB|least budget MiB|identical"
    words = machine.words(records[0]["machine"])
    return f"{words}; the device is emulated.\n\n" + results.markdown(header.split("|"), rows)
