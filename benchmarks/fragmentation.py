"""Waste, step time and driver calls by chunk size, at twice the memory that the budget allows.

Internal waste is what rounding to chunks and holes in slabs cost at the live peak, over the live bytes. External
fragmentation is 0 by construction; the core's audit recounts every chunk. Allocations of up to half a chunk lie in
slabs, which are never swapped and take at most half of the budget. 64 KiB exists on the emulated device only: a GPU's
granularity is 2 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import RunFailed, run, torch_threads
from benchmarks.step_time import median, reference
from benchmarks.workloads import CHUNK_BYTES, WORKLOADS

NAME = "fragmentation"
CHUNKS_KIB = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 20480, 40960)
QUICK_CHUNKS_KIB = (64, 2048)
OVERSUBSCRIPTION = 2.0
CALLS = ("driver_calls_map", "driver_calls_unmap", "driver_calls_set_access")


def measure(target: Path, *, quick: bool, steps: int, say: Callable[[str], None]) -> None:
    """Runs everything and writes the raw data. Raises RunFailed if an in-core run fails."""
    results.clear(target, NAME)
    shared: dict[str, Any] = {"quick": quick, "threads": torch_threads()}
    for workload in WORKLOADS[1:] if quick else WORKLOADS:
        in_core = run(workload, steps, **shared) | {"mode": "in-core"}
        results.save(target, NAME, f"{workload.name}-in-core", in_core)
        known = reference([in_core])
        budget = known.budget_bytes(OVERSUBSCRIPTION)
        link = known.link_bytes_per_second(known.spill_bytes(budget))
        for kib in QUICK_CHUNKS_KIB if quick else CHUNKS_KIB:
            record: dict[str, Any] = {
                "workload": workload.name,
                "mode": "auto",
                "chunk_bytes": kib << 10,
                "budget_bytes": budget,
                "link_bytes_per_second": link,
            }
            try:
                record |= run(
                    workload, steps, chunk_bytes=kib << 10, budget_bytes=budget, bytes_per_second=link, **shared
                )
                say(f"{workload.name}: chunks of {results.size(kib << 10)}, step {median(record):.3f} s")
            except RunFailed as failure:
                record |= {"failed": reason(str(failure)), "machine": machine.describe()}
                record["in_core"] = run(workload, steps, chunk_bytes=kib << 10, **shared)["summary"]
                say(f"{workload.name}: chunks of {results.size(kib << 10)} cannot run: {record['failed']}")
            results.save(target, NAME, f"{workload.name}-{kib:05d}KiB", record)


def _waste(summary: dict[str, Any]) -> list[str]:
    return [f"{summary['internal_fragmentation_ratio']:.2%}", f"{summary['external_fragmentation_ratio']:.0%}"]


def reason(output: str) -> str:
    """Why a program stopped: the last line that names an error."""
    lines = [line.strip() for line in output.splitlines() if "Error" in line]
    return lines[-1] if lines else output.strip().splitlines()[-1]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, one line a workload and chunk size."""
    if not records:
        return ""
    digests = {record["workload"]: record["digest"] for record in records if record["mode"] == "in-core"}
    rows, stopped = [], []
    for record in records:
        if record["mode"] == "in-core":
            continue
        name = f"{record['workload']} {results.size(record['chunk_bytes'])}"
        if "failed" in record:
            stopped.append(f"- {name}: {record['failed']}")
            summary = record["in_core"]
            least = results.mib(summary["min_budget_bytes"])
            rows.append([name, *_waste(summary), "does not fit", "", "", "", "", least, "", ""])
            continue
        summary = record["summary"]
        rows.append(
            [
                name,
                *_waste(summary),
                f"{median(record):.3f}",
                *(f"{median(record, call):.0f}" for call in CALLS),
                results.mib(median(record, "swap_out_bytes") + median(record, "swap_in_bytes")),
                results.mib(summary["min_budget_bytes"]),
                "yes" if summary["device_peak_bytes"] <= summary["budget_bytes"] else "no",
                "yes" if record["digest"] == digests[record["workload"]] else "NO",
            ]
        )
    header = (
        "chunk|internal|external|step s|map|unmap|set access|moved MiB|least budget MiB|in budget|identical"
    ).split("|")
    return (
        f"{machine.words(records[0]['machine'])}. At {OVERSUBSCRIPTION:g}x, link as in the step times at "
        f"{results.size(CHUNK_BYTES)}; calls and MiB a step. Large chunks put most variables into slabs, which "
        "cannot leave: some runs then do not fit (their waste is that of a run in-core). Where *in budget* says no, "
        "slabs could still exceed the budget when that run was measured.\n\n"
        + results.markdown(header, rows)
        + "\n"
        + "\n".join(stopped)
        + ("\n" if stopped else "")
    )
