"""Whole models under `torch.compile`: what interception costs when everything fits, and a step at 2 times the budget.

The link is as slow, each way, as makes moving the spill take as long as the computation; the bound is that of
`benchmarks.step_time`. A plain process and one with memory to spare run beside each other and take turns, step by step:
the overhead is the median of the quotients of the steps that follow each other.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import in_turns, run, torch_threads
from benchmarks.step_time import IN_CORE, Reference, median, reference, run_mode, steady
from benchmarks.workloads import WORKLOADS, Workload
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
                both = in_turns(
                    functools.partial(_run_with_turns, workload, steps, alloc=False, **shared),
                    functools.partial(_run_with_turns, workload, steps, trace_path=trace_path, **shared),
                )
                plain, spare = (record | {"mode": m, "round": turn} for record, m in zip(both, (PLAIN, IN_CORE)))
                results.save(target, NAME, f"{workload.name}-{PLAIN}-{turn}", plain)
                results.save(target, NAME, f"{workload.name}-{IN_CORE}-{turn}", spare)
                say(f"{workload.name}: with memory to spare {overhead([plain], [spare]):.3f} of the plain step")
                first = first or reference([spare])
                record = run_mode(workload, steps, first, OVERSUBSCRIPTION, "auto", shared, Trace.load(trace_path))
                results.save(target, NAME, f"{workload.name}-2x-{turn}", record | {"round": turn})
                say(f"{workload.name}: 2x, {median(record) / record['bound_seconds']:.3f} of the bound")


def _run_with_turns(workload: Workload, steps: int, turns: tuple[int, ...], **settings: Any) -> dict[str, Any]:
    return run(workload, steps, turns=turns, **settings)


def quotients(plain: Sequence[dict[str, Any]], spare: Sequence[dict[str, Any]]) -> list[float]:
    """Of the steps of runs in turns, those with memory to spare over the plain ones that they follow."""
    return [b / a for runs in zip(plain, spare, strict=True) for a, b in zip(*map(steady, runs), strict=True)]


def overhead(plain: Sequence[dict[str, Any]], spare: Sequence[dict[str, Any]]) -> float:
    return statistics.median(quotients(plain, spare))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    rows = []
    for name in dict.fromkeys(record["workload"] for record in records):
        of = {
            mode: sorted((r for r in records if (r["workload"], r["mode"]) == (name, mode)), key=lambda r: r["round"])
            for mode in (PLAIN, IN_CORE, "auto")
        }
        spare = sorted(quotients(of[PLAIN], of[IN_CORE]))
        quarter = len(spare) // 4
        over = [median(record) / record["bound_seconds"] for record in of["auto"]]
        summary = of["auto"][0]["summary"]
        digests = {record["digest"] for records in of.values() for record in records}
        rows.append(
            [
                name,
                f"{statistics.median(map(median, of[PLAIN])):.3f}",
                f"{statistics.median(spare):.3f} ({spare[quarter]:.3f} to {spare[-1 - quarter]:.3f})",
                f"{statistics.median(map(median, of['auto'])):.3f}",
                f"{statistics.median(over):.3f} ({min(over):.3f} to {max(over):.3f})",
                results.mib(summary["live_peak_bytes"]),
                results.mib(summary["min_budget_bytes"]),
                "yes" if len(digests) == 1 else "NO",
            ]
        )
    if not rows:
        return ""
    header = "model|plain step s|to spare / plain (middle half)|step at 2x|over the bound|live MiB|least MiB|identical"
    words = machine.words(records[0]["machine"])
    return f"{words}; the device is emulated.\n\n" + results.markdown(header.split("|"), rows)
