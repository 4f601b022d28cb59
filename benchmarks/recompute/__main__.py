"""Runs every arm of every case, writes the raw data and the table.

python -m benchmarks.recompute [--quick] [--only MODEL ...] [--at X ...] [--links X ...] [--arms ARM ...] [--rounds N]
    [--output FOLDER]
python -m benchmarks.recompute --tables

Each model is first recorded with all the memory it wants. A budget is a share of its live peak. Before each case the
in-core step is timed, as the machine's speed drifts, and the case's link is so slow that swapping alone takes at least
two, or four, times that. Then the arms of the case take turns, a few steps at a time, each in a process of its own:
PyTorch without us; ours without recomputation; ours with all the memory it wants, whose times the bounds are of; ours;
checkpointing of each block, written by hand, in the same budget, on the same link, with its swapping planned by us. The
device is emulated.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from benchmarks import machine, results
from benchmarks.fragmentation import reason
from benchmarks.recompute.cases import (
    ARMS,
    COMPARED,
    IN_CORE,
    NAME,
    OVERSUBSCRIPTIONS,
    SLOWDOWNS,
    TIMED,
    Runner,
    budgets_of,
    case_of,
)
from benchmarks.recompute.models import MODELS
from benchmarks.recompute.tables import step_seconds, table
from benchmarks.runs import ROOT, RunFailed
from swapd.progress import note

TURNS = 3  # of a run, once its steps are steady


def say(text: str) -> None:
    note(text)
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def measure(model: str, options: argparse.Namespace) -> None:
    """Raw data of one model, in place of earlier ones.

    Raises:
        RunFailed: PyTorch without us failed, or a run without a budget.
    """
    target, quick = options.output, options.quick
    for path in (target / NAME).glob(f"{model}-*.json"):
        path.unlink()
    runner = Runner(model, quick=quick, turns=1 if quick else TURNS)
    traced, trace = runner.traced()
    live_peak = int(traced["summary"]["live_peak_bytes"])
    peak = results.mib(live_peak)
    say(f"{model}: live peak {peak} MiB, {trace.functions} functions")
    results.save(target, NAME, f"{model}-checkpoint-in-core", runner.checkpoint_in_core())
    ends = {1}
    arms = [arm for arm in ARMS if arm in (IN_CORE, TIMED, *options.arms)]
    cases, budgets = [], budgets_of(trace, live_peak, options.at)
    for x, slowdown in itertools.product(budgets, options.links):
        alone, name = runner.in_core(), f"{model}-{x:g}x-{slowdown:g}"
        results.save(target, NAME, f"{name}-in-core-alone", alone)
        case = case_of(trace, x, slowdown, budgets[x], step_seconds(alone))
        cases.append(case)
        for turn in range(options.rounds):
            for arm, found in runner.arms(arms, case).items():
                label = f"{name}-{arm.replace(' ', '-')}-{turn}"
                if not isinstance(found, RunFailed):
                    record = found | {"round": turn}
                    ends.update(int(number) for number in record["digests"])
                    said = f"step {step_seconds(record):.3f} s, {len(record['steps'])} steps"
                elif arm not in COMPARED:
                    raise found
                else:
                    said = reason(str(found))
                    frame = {"model": model, "arm": arm, "round": turn, "machine": machine.describe()}
                    record = case.facts() | frame | {"failed": said, "output": str(found)[-3000:]}
                results.save(target, NAME, label, record)
                say(f"{label}: {said}, load {machine.load()[0]}")
    results.save(target, NAME, f"{model}-traced", traced | {"cases": [case.facts() for case in cases]})
    results.save(target, NAME, f"{model}-plain", runner.plain(sorted(ends)))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recompute", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--at", nargs="+", type=float, metavar="X", help="oversubscriptions (default 2 4 8)")
    parser.add_argument("--links", nargs="+", type=float, metavar="X", help="slowdowns of swapping alone (default 2 4)")
    parser.add_argument("--arms", nargs="+", choices=COMPARED, default=COMPARED, metavar="ARM", help="beside in-core")
    parser.add_argument("--tables", action="store_true", help="run nothing: the table of the raw data")
    parser.add_argument("--rounds", type=int, default=1, help="of all arms (default %(default)s)")
    parser.add_argument("--output", type=Path, help="folder (default benchmarks/results/emulated; out/ with --quick)")
    options = parser.parse_args(arguments)
    options.at = options.at or OVERSUBSCRIPTIONS[: 1 if options.quick else None]
    options.links = options.links or SLOWDOWNS[: 1 if options.quick else None]
    if options.output is None:
        options.output = ROOT / "out" / "benchmarks" if options.quick else results.folder()
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    began = time.monotonic()
    if not options.tables:
        try:
            for model in options.only:
                measure(model, options)
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            return 1
        say(f"{time.monotonic() - began:.0f} s; raw data in {options.output / NAME}")
    text = (
        "# Recomputation beside swapping\n\n"
        "Made from the raw data in `recompute/` by `python -m benchmarks.recompute --tables`. The device is emulated: "
        "its link is held, its kernels are PyTorch's CPU kernels.\n\n"
    )
    path = options.output / f"{NAME}.md"
    path.write_text(text + table(results.load(options.output, NAME)), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
