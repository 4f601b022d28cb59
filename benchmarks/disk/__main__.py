"""Measures the disk tier beside the kernel's swap and other ways, all within the same memory; no GPU is needed.

python -m benchmarks.disk [--quick] [--only NAME ...] [--arms NAME ...] [--rounds N] [--disk FOLDER] [--tables]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.disk import bandwidth, bounds, counting, needs, places, sizing, swap, tables
from benchmarks.disk.cases import (
    ARMS,
    IN_CORE,
    OURS,
    QUICK_STEPS,
    TUNED,
    WARM_UP,
    WORKLOADS,
    Case,
    Memory,
    Workload,
    cases_of,
)
from benchmarks.disk.groups import NoGroup
from benchmarks.disk.run import Bench, run, weights_of
from benchmarks.disk.undo import NotPutBack, Undo, endings_unwind
from benchmarks.runs import ROOT, RunFailed
from swapd.progress import note

GIB = 1 << 30
HELD_BYTES_PER_SECOND = 500_000_000
NOTE = "ooc-disk-bench-undo.sh"


def say(text: str) -> None:
    note(text)
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="which workloads")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="which arms")
    parser.add_argument("--disks", nargs="+", choices=("fast", "held"), default=["fast", "held"], help="which disks")
    parser.add_argument("--rounds", type=int, help="in which all arms take turns (default 2; 1 with --quick)")
    parser.add_argument("--steps", type=int, help=f"of every run, {WARM_UP} to warm up (default: the workload's)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every program")
    parser.add_argument("--disk", type=Path, default=ROOT / "out", help="folder on the disk to measure (default out/)")
    parser.add_argument("--tables", action="store_true", help="run nothing: the tables of the raw data")
    parser.add_argument("--output", type=Path, help="folder (default benchmarks/results/disk; out/ with --quick)")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = ROOT / "out" / "disk-results" if options.quick else results.folder("disk")
    options.rounds = options.rounds or (1 if options.quick else 2)
    return options


def disk_space(quick: bool) -> tuple[int, int, int]:
    """Bytes of the swap file, of the held disk, and of all that must be free."""
    return (GIB, 3 * GIB, 6 * GIB) if quick else (3 * GIB, 8 * GIB, 18 * GIB)


@contextlib.contextmanager
def prepared(options: argparse.Namespace, undo: Undo) -> Iterator[tuple[Bench, dict[bool, places.Place]]]:
    """The places to measure, by whether they are held, and what runs share; gone at the end."""
    swap_bytes, held_bytes, _ = disk_space(options.quick)
    with undo.part():
        fast = places.as_it_is(undo, options.disk.resolve())
        found = {False: fast}
        if "held" in options.disks:
            try:
                found[True] = places.held(undo, fast, held_bytes, HELD_BYTES_PER_SECOND)
            except places.CannotHold as why:
                say(f"no disk is held, so there are no such figures: {why}")
        yield Bench(undo, fast.folder, options.threads, options.quick, swap_bytes), found


def make_weights(workload: Workload, found: dict[bool, places.Place], options: argparse.Namespace) -> None:
    """The file of weights on every disk."""
    for place in found.values():
        path = weights_of(place, Case(workload, ARMS[IN_CORE]))
        command = [sys.executable, "-m", f"benchmarks.disk.{workload.module}", "-", "-", str(options.threads), "plain"]
        command += ["make", str(path), *workload.command(quick=options.quick)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RunFailed(f"no weights were made: {done.stderr[-2000:]}")


def measure(options: argparse.Namespace, undo: Undo) -> None:
    """Runs everything and writes the raw data. Raises RunFailed, NotPutBack."""
    left_out = needs.arms_without_library(options.arms)
    for sentence in left_out.values():
        say(sentence)
    arms = [name for name in options.arms if name not in left_out]
    with prepared(options, undo) as (bench, found):
        speeds: dict[str, Any] = {
            place.label: {
                **bandwidth.measure(place.folder, (256 << 20) if options.quick else GIB),
                "held": place.held,
                "settings": counting.settings(place.device),
            }
            for place in found.values()
        }
        for label, speed in speeds.items():
            rates = [f"{way}s {speed[f'{way}_bytes_per_second'] / 1e6:.0f} MB/s" for way in ("read", "write")]
            say(f"disk {label}: {', '.join(rates)} at once")
        results.save(options.output, tables.DISKS, "disks", speeds)
        disks = [held for held in found if ("held" if held else "fast") in options.disks]
        for name in options.only:
            _measure_workload(options, bench, WORKLOADS[name], arms, found, disks)
            save_bounds(options.output, sizing.trace_of(bench, WORKLOADS[name]), name, speeds)


def _measure_workload(
    options: argparse.Namespace,
    bench: Bench,
    workload: Workload,
    arms: list[str],
    found: dict[bool, places.Place],
    disks: list[bool],
) -> None:
    for benchmark in (tables.NAME, sizing.SIZING, sizing.TUNING, bounds.BOUNDS):
        for path in (options.output / benchmark).glob(f"{workload.name}*.json"):
            path.unlink()  # so that a table never mixes two runs
    if workload.weights:
        make_weights(workload, found, options)
    memory = sizing.memory_of(bench, workload, found[False], options.output, ours=OURS in arms, say=say)
    tuning = swap.AS_IT_COMES
    if TUNED in arms and TUNED in workload.arms:
        tuning = sizing.best_tuning(bench, workload, found[False], memory, options.output, say)
    for turn in range(options.rounds):
        for case in cases_of(workload, arms, disks, quick=options.quick):
            steps = options.steps or (QUICK_STEPS if options.quick else workload.steps)
            record = measure_case(bench, case, found[case.held], memory, tuning, steps) | {"round": turn}
            results.save(options.output, tables.NAME, f"{case.name}-{turn}", record)
            say(f"{case.name}: {outcome(record)}")
    if workload.weights:
        for place in found.values():
            weights_of(place, Case(workload, ARMS[IN_CORE])).unlink()


def save_bounds(output: Path, trace: Path, workload: str, speeds: dict[str, Any]) -> None:
    """What no schedule of copies beats, for each of our cases of a workload that was recorded."""
    records = [record for record in results.load(output, tables.NAME) if record["workload"] == workload]
    in_core = [tables.median(record) for record in tables.in_core_of(records).values()]
    cases = {
        (record["oversubscription"], record["disk"]): (record["budget_bytes"], record["summary"]["chunk_bytes"])
        for record in records
        if record["arm"] == OURS and "failed" not in record
    }
    if not trace.exists() or not in_core:
        return
    seconds = statistics.median(in_core)
    proved = []
    for (x, disk), sizes in cases.items():
        least = bounds.proved_seconds(trace, seconds, *sizes, speeds[disk])
        if least is not None:
            proved.append({"oversubscription": x, "disk": disk, "seconds": least})
    results.save(output, bounds.BOUNDS, workload, {"workload": workload, "in_core_seconds": seconds, "proved": proved})


def measure_case(
    bench: Bench, case: Case, place: places.Place, memory: Memory, tuning: swap.Tuning, steps: int
) -> dict[str, Any]:
    """One case's run, with the memory that it gets."""
    if case.oversubscription is None:
        return run(bench, case, place, steps=steps)
    return run(
        bench,
        case,
        place,
        steps=steps,
        limit_bytes=memory.limit_bytes(case.oversubscription),
        budget_bytes=memory.budget_bytes(case.oversubscription) if case.arm.name == OURS else None,
        tuning=tuning if case.arm.name == TUNED else swap.AS_IT_COMES,
    )


def outcome(record: dict[str, Any]) -> str:
    if "failed" in record:
        return str(record["failed"])
    return f"step {tables.median(record):.2f} s, peak {results.mib(record['group']['peak_bytes'])} MiB"


def write_tables(target: Path) -> Path:
    """`tables.md` of all raw data that there are."""
    path = target / "tables.md"
    target.mkdir(parents=True, exist_ok=True)
    path.write_text(tables.text(target), encoding="utf-8")
    return path


def _run(options: argparse.Namespace) -> int:
    options.disk.mkdir(parents=True, exist_ok=True)
    swaps = any(ARMS[name].swaps for name in options.arms)
    refused = needs.missing(options.disk, disk_space(options.quick)[2], swaps=swaps)
    if refused:
        print("This benchmark cannot run here:\n- " + "\n- ".join(refused), file=sys.stderr)
        return 2
    load = machine.load()[0]
    if load > 0.5:
        say(f"the load average is {load}: other work disturbs the figures")
    failures: tuple[type[Exception], ...] = (RunFailed, NotPutBack, NoGroup, swap.NoSwap, OSError, ValueError)
    try:
        undo = Undo(options.disk / NOTE)
        with endings_unwind():
            measure(options, undo)
    except failures as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    began = time.monotonic()
    if not options.tables:
        status = _run(options)
        if status:
            return status
    print(write_tables(options.output).read_text(encoding="utf-8"))
    say(f"{time.monotonic() - began:.0f} s; raw data and tables in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
