"""How much memory a workload needs, and which settings of the kernel's swap suit it: found out before its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.disk import swap
from benchmarks.disk.cases import ARMS, IN_CORE, MIB, OURS, TUNED, WARM_UP, Case, Memory, Workload
from benchmarks.disk.places import Place
from benchmarks.disk.run import Bench, run
from benchmarks.runs import RunFailed

SIZING, TUNING = "sizing", "tuning"
SPARE_BYTES = 16 * MIB  # of our reserve, beyond what was measured: page tables, and the least that files need
TUNING_STEPS, TUNING_WARM_UP = 5, 2
SIZING_STEPS = 3  # the optimizer has its state from the second one on


def ended(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a run without which nothing can be said. Raises RunFailed."""
    if "failed" in record:
        raise RunFailed(f"{record['workload']}, {record['arm']}: {record['failed']}")
    return record


def trace_of(bench: Bench, workload: Workload) -> Path:
    """Where the in-core run with our recorder leaves an iteration; array programs have none."""
    return bench.scratch / f"{workload.name}.trace"


def memory_of(
    bench: Bench, workload: Workload, place: Place, target: Path, *, ours: bool, say: Callable[[str], None]
) -> Memory:
    """What the workload needs; the runs that say so are kept. Raises RunFailed.

    The live peak is that of an in-core run with our recorder, and the base what that process has beside its variables;
    plain PyTorch's also has what its allocator cannot reuse, which is no part of what the program needs. The matrix of
    an array program is as large as it says. Our reserve is what our process has beyond base and budget, run with the
    largest of the oversubscriptions.
    """
    if workload.module == "numpy_child":
        first = ended(run(bench, Case(workload, ARMS[IN_CORE]), place, steps=SIZING_STEPS))
        live = held = int(first["live_bytes"])
    else:
        trace = trace_of(bench, workload)
        first = ended(run(bench, Case(workload, ARMS[OURS]), place, steps=SIZING_STEPS, alloc="emulated", trace=trace))
        live, held = (int(first["summary"][name]) for name in ("live_peak_bytes", "device_peak_bytes"))
    kept = {"in_core": first}
    found = Memory(live, max(0, first["steps"][-1]["peak_rss_bytes"] - held))
    if ours:
        largest = workload.oversubscriptions[-1]
        case = Case(workload, ARMS[OURS], largest)
        record = run(bench, case, place, steps=WARM_UP + 2, budget_bytes=found.budget_bytes(largest))
        kept["ours"] = record
        if "failed" in record:
            say(f"{workload.name}: our own process's memory is not known: {record['failed']}")
        else:
            beyond = record["steps"][-1]["peak_rss_bytes"] - found.base_bytes - found.budget_bytes(largest)
            found = Memory(live, found.base_bytes, max(0, beyond) + SPARE_BYTES)
    sizes = {"live_bytes": live, "base_bytes": found.base_bytes, "reserve_bytes": found.reserve_bytes}
    results.save(target, SIZING, workload.name, {**sizes, "runs": kept})
    say(
        f"{workload.name}: live {results.mib(live)} MiB, base {results.mib(found.base_bytes)}, "
        f"our reserve {results.mib(found.reserve_bytes)}; limits "
        + ", ".join(f"{x:g}x {results.mib(found.limit_bytes(x))}" for x in workload.oversubscriptions)
    )
    return found


def best_tuning(
    bench: Bench, workload: Workload, place: Place, memory: Memory, target: Path, say: Callable[[str], None]
) -> swap.Tuning:
    """The candidate whose steps are shortest at the smallest oversubscription, with the disk as it is."""
    x = workload.oversubscriptions[0]
    seconds: dict[swap.Tuning, float] = {}
    for number, tuning in enumerate(swap.CANDIDATES[:2] if bench.quick else swap.CANDIDATES):
        case = Case(workload, ARMS[TUNED], x)
        record = run(bench, case, place, steps=TUNING_STEPS, limit_bytes=memory.limit_bytes(x), tuning=tuning)
        results.save(target, TUNING, f"{workload.name}-{number}", record)
        if "failed" in record:
            say(f"{workload.name}: swap with {tuning.words()}: {record['failed']}")
            continue
        seconds[tuning] = statistics.median(step["seconds"] for step in record["steps"][TUNING_WARM_UP:])
        say(f"{workload.name}: swap with {tuning.words()}: step {seconds[tuning]:.2f} s")
    return fastest(seconds.items())


def fastest(seconds: Iterable[tuple[swap.Tuning, float]]) -> swap.Tuning:
    """The tuning with the least seconds; as it comes where there are none."""
    return min(seconds, key=lambda item: item[1], default=(swap.AS_IT_COMES, 0.0))[0]
