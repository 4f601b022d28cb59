"""One run of one arm in a control group of its own, as a record that is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.disk import cache, counting, swap
from benchmarks.disk.cases import OURS, Case
from benchmarks.disk.groups import MemoryGroup, hold_in_group
from benchmarks.disk.places import Place
from benchmarks.disk.undo import Undo
from benchmarks.runs import ROOT, RunFailed

TIMEOUT_SECONDS = 1800
_STAT = ("pgmajfault", "total_pgmajfault", "swap", "total_swap", "cache", "rss", "mapped_file", "anon", "file")
ALLOCATOR = "cpu"  # the name of the device that is this machine's memory


@dataclass(frozen=True)
class Bench:
    """What all runs share. `scratch` is where programs leave their results, on the disk as it is."""

    undo: Undo
    scratch: Path
    threads: int
    quick: bool
    swap_bytes: int
    libraries: list[Path] = field(default_factory=cache.libraries)
    root: Path = Path("/")


def run(
    bench: Bench,
    case: Case,
    place: Place,
    *,
    steps: int,
    limit_bytes: int | None = None,
    budget_bytes: int | None = None,
    tuning: swap.Tuning = swap.AS_IT_COMES,
    alloc: str | None = None,
    trace: Path | None = None,
) -> dict[str, Any]:
    """The record of a run. An arm that did not end well is a result: its record has `failed`, a sentence.

    Args:
        place: where the arm may keep its bytes.
        limit_bytes: of the control group; None is no limit.
        budget_bytes: of our variables; None is as much as there is, and then there is no disk.
        alloc: the name of our device; None is `ALLOCATOR`.
        trace: where our recorder leaves an iteration; None is nowhere.
    """
    record: dict[str, Any] = {
        "workload": case.workload.name,
        "arm": case.arm.name,
        "oversubscription": case.oversubscription,
        "disk": place.label,
        "held_bytes_per_second": place.held,
        "limit_bytes": limit_bytes,
        "budget_bytes": budget_bytes,
        "tuning": tuning.as_json() if case.arm.swaps else None,
        "load_average_before": machine.load(),
    }
    stolen = machine.stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="run-", dir=bench.scratch) as folder:
        output, state = Path(folder) / "child.json", Path(folder) / "state.pt"
        command = _command(bench, case, place, output, state, steps)
        variables = {"OMP_NUM_THREADS": str(bench.threads)}
        if case.arm.name == OURS:
            variables |= _our_variables(place, budget_bytes, Path(folder), alloc or ALLOCATOR)
            variables |= {"OOC_TRACE": str(trace)} if trace else {}
        record |= {"arguments": [_here(text) for text in command[2:]]}
        record |= {"environment": {name: _here(text) for name, text in variables.items()}}
        record |= _measured(bench, case, place, limit_bytes, tuning, command, variables)
        if "failed" not in record:
            record |= json.loads(output.read_text(encoding="utf-8"))
            if (Path(folder) / "summary.json").exists():
                record["summary"] = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
        record |= _afterwards(state if state.exists() and "failed" not in record else None)
    record |= {"load_average_after": machine.load(), "stolen_seconds": machine.stolen_seconds() - stolen}
    return record


def _here(text: str) -> str:
    """A path as the checkout sees it; where a checkout is says nothing to others."""
    return text.replace(f"{ROOT}/", "")


def _command(bench: Bench, case: Case, place: Place, output: Path, state: Path, steps: int) -> list[str]:
    workload, way = case.workload, case.arm.way
    if way == "ours" and workload.module != "numpy_child":
        way = "plain"  # the program knows nothing of it
    command = [sys.executable, "-m", f"benchmarks.disk.{workload.module}", str(output), place.device]
    command += [str(bench.threads), way]
    if workload.weights:
        command += ["run", str(weights_of(place, case))]
    command += [*workload.command(quick=bench.quick), "--steps", str(steps), "--save", str(state)]
    if workload.module != "child":
        command += ["--scratch", str(place.folder / "scratch")]
    return command


def weights_of(place: Place, case: Case) -> Path:
    return place.folder / f"{case.workload.name}.safetensors"


def _our_variables(place: Place, budget_bytes: int | None, folder: Path, alloc: str) -> dict[str, str]:
    variables = {"OOC_ALLOC": alloc, "OOC_SUMMARY": str(folder / "summary.json")}
    if budget_bytes is not None:
        tier = place.folder / "tier"
        tier.mkdir(exist_ok=True)
        variables |= {"OOC_BUDGET": str(budget_bytes), "OOC_DISK": str(tier)}
    return variables


def _measured(
    bench: Bench,
    case: Case,
    place: Place,
    limit_bytes: int | None,
    tuning: swap.Tuning,
    command: list[str],
    variables: dict[str, str],
) -> dict[str, Any]:
    """Runs the command in its group, and what the kernel counted meanwhile."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    with bench.undo.part():
        group = MemoryGroup(bench.undo, bench.root)
        group.limit(limit_bytes)
        if place.held is not None and group.version == 2:
            hold_in_group(bench.undo, group, place.device, place.held)
        if case.arm.swaps and limit_bytes is not None:
            swap.turn_on(bench.undo, place.folder / "swap", bench.swap_bytes, place.device, tuning, group, bench.root)
        cache.forget(bench.libraries)
        if case.workload.weights:
            cache.forget([weights_of(place, case)])
        before = counting.disk_bytes(place.device, bench.root) | counting.swap_bytes(bench.root)
        failed = _ended(group.joining(command), environment | variables)
        after = counting.disk_bytes(place.device, bench.root) | counting.swap_bytes(bench.root)
        record: dict[str, Any] = {
            "whole_run": counting.difference(after, before),
            "group": {
                "version": group.version,
                "peak_bytes": group.peak_bytes(),
                "stat": {name: value for name, value in group.stat().items() if name in _STAT},
            },
        }
        if group.killed():
            failed = "the kernel ended it: its memory does not fit the limit"
        shutil.rmtree(place.folder / "scratch", ignore_errors=True)
    left = [path.name for path in (place.folder / "tier").glob("*")]
    if left:
        failed = f"files were left in the folder of the disk tier: {', '.join(left)}"
    return record | ({"failed": failed} if failed else {})


def _ended(command: list[str], environment: dict[str, str]) -> str | None:
    """Runs the command to its end; None if that was well, else what is to be said."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is ours to handle
    ) as child:
        try:
            said, _ = child.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return f"no end after {TIMEOUT_SECONDS} s"
        except BaseException:
            child.kill()
            raise
    return None if child.returncode == 0 else f"status {child.returncode}: {said[-2000:]}"


def _afterwards(state: Path | None) -> dict[str, Any]:
    """The digest of what the run left and the machine, said by a process outside of the group."""
    command = [sys.executable, "-m", "benchmarks.disk.after", *([str(state)] if state else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found
