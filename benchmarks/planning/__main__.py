"""Plans recorded traces with every policy, in simulation; writes the raw data, the tables and the pictures.

python -m benchmarks.planning [--quick] [--only NAME ...] [--tables] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning import chunks, memory, recompute, scale, suite, table1, tiers, vdnn
from benchmarks.runs import ROOT
from swapd.progress import note

BENCHMARKS: dict[str, tuple[Any, str]] = {
    "table1": (table1, "The seed paper's table 1"),
    "suite": (suite, "Every policy beside the lower bound"),
    "vdnn": (vdnn, "vDNN: memory and speed"),
    "scale": (scale, "Planning time"),
    "chunks": (chunks, "Chunk sizes where memory calls cost time"),
    "tiers": (tiers, "Three tiers: device, host memory, disk"),
    "recompute": (recompute, "Recomputation beside swapping"),
    "memory": (memory, "Memory at equal speed"),
}


def say(text: str) -> None:
    note(text)
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few cases: shows that it works")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS), help="which to run")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables and pictures of the raw data")
    parser.add_argument("--output", type=Path, help="folder (default results/simulated/planning; out/ with --quick)")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = ROOT / "out" / "planning" if options.quick else results.folder("simulated") / "planning"
    return options


def tables(target: Path) -> str:
    """The text of `tables.md`, of all raw data that there are in a folder."""
    text = (
        "# Planning, simulated\n\nMade from the raw data in this folder by `python -m benchmarks.planning --tables`. "
        "Traces are of fake tensors, times of a roofline model, transfers of the simulator: nothing here was measured "
        "on a GPU.\n"
    )
    for name, (benchmark, title) in BENCHMARKS.items():
        made = benchmark.table(results.load(target, name))
        if made:
            text += f"\n## {title}\n\n{made}"
    return text


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    began = time.monotonic()
    if not options.tables:
        for name in options.only:
            BENCHMARKS[name][0].measure(options.output, options.quick, say)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "tables.md"
    path.write_text(tables(options.output), encoding="utf-8")
    try:
        from benchmarks.planning.figures import draw

        for drawn in draw(options.output):
            say(f"drawn: {drawn}")
    except ImportError:
        say("no pictures: matplotlib is not installed (the extra `report`)")
    say(f"{time.monotonic() - began:.0f} s; raw data and tables in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
