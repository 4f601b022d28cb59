"""Runs the benchmarks, writes the raw data, the tables and the pictures.

python -m benchmarks [--quick] [--only NAME ...] [--tables] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import (
    allocation,
    compiled,
    fragmentation,
    interception,
    machine,
    mapping,
    results,
    sleep,
    step_time,
    three_tiers,
)
from benchmarks.monitoring import scrapes
from benchmarks.runs import ROOT, RunFailed
from swapd.progress import note

BENCHMARKS: dict[str, tuple[Any, str]] = {
    "step_time": (step_time, "Step time beside the bound"),
    "compiled": (compiled, "Compiled models"),
    "interception": (interception, "Cost of interception"),
    "allocation": (allocation, "Cost when everything fits"),
    "fragmentation": (fragmentation, "Fragmentation by chunk size"),
    "mapping": (mapping, "Costs of memory calls"),
    "three_tiers": (three_tiers, "Three tiers"),
    "sleep": (sleep, "Sleep and wake"),
    "monitoring": (scrapes, "Cost of being watched"),
}


def say(text: str) -> None:
    note(text)
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), help="which to run")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables and pictures of the raw data")
    parser.add_argument("--rounds", type=int, help="of step times (default 2; 1 with --quick)")
    parser.add_argument("--output", type=Path, help="folder (default benchmarks/results/emulated; out/ with --quick)")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = ROOT / "out" / "benchmarks" if options.quick else results.folder()
    return options


def measure(options: argparse.Namespace) -> None:
    """Runs what was asked for. Raises RunFailed."""
    quick, target = options.quick, options.output
    if "interception" in options.only:
        interception.measure(target, rounds=30 if quick else 1000, say=say)
    if "allocation" in options.only:
        allocation.measure(target, native_rounds=50 if quick else 1000, step_rounds=5 if quick else 40, say=say)
    if "step_time" in options.only:
        rounds = options.rounds or (1 if quick else 2)
        step_time.measure(target, quick=quick, rounds=rounds, steps=6 if quick else 8, say=say)
    if "compiled" in options.only:
        rounds = options.rounds or (1 if quick else 3)
        compiled.measure(target, quick=quick, rounds=rounds, steps=6 if quick else 36, say=say)
    if "fragmentation" in options.only:
        fragmentation.measure(target, quick=quick, steps=6 if quick else 7, say=say)
    if "mapping" in options.only:
        rounds = options.rounds or (1 if quick else 2)
        mapping.measure(target, quick=quick, rounds=rounds, steps=6 if quick else 10, say=say)
    if "three_tiers" in options.only:
        three_tiers.measure(target, quick=quick, steps=6 if quick else 14, say=say)
    if "sleep" in options.only:
        sleep.measure(target, rounds=2 if quick else 15, say=say)
    if "monitoring" in options.only:
        rounds, steps = (1, 5) if quick else (5, 30)
        scrapes.measure(target, quick=quick, rounds=rounds, steps=steps, count=50 if quick else 1000, say=say)


def write_tables(target: Path) -> Path:
    """`tables.md` of all raw data that there are."""
    text = "# Results\n\nMade from the raw data in this folder by `python -m benchmarks --tables`.\n"
    for name, (benchmark, title) in BENCHMARKS.items():
        made = benchmark.table(results.load(target, name))
        if made:
            text += f"\n## {title}\n\n{made}"
    path = target / "tables.md"
    target.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    began = time.monotonic()
    if not options.tables:
        load = machine.load()[0]
        if load > 0.5:
            say(f"the load average is {load}: other work disturbs the figures")
        try:
            measure(options)
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            return 1
    print(write_tables(options.output).read_text(encoding="utf-8"))
    try:
        from benchmarks.figures import draw

        for path in draw(options.output):
            say(f"drawn: {path}")
    except ImportError:
        say("no pictures: matplotlib is not installed (the extra `report`)")
    say(f"{time.monotonic() - began:.0f} s; raw data and tables in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
