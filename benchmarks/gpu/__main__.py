"""Measures on a CUDA GPU.

python -m benchmarks.gpu [--only TEXT ...] [--minutes M] [--tables] [--list] [--output FOLDER]

Without a GPU it says so and ends with status 0.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from benchmarks import results
from benchmarks.gpu import tables
from benchmarks.gpu.cases import Case, all_cases
from benchmarks.gpu.run import ChildEnded, Runner
from benchmarks.gpu.schedule import LIMIT_SECONDS, Outcome, run_all
from swapd.progress import note


def say(text: str) -> None:
    note(text)
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def gpu_name() -> tuple[str | None, str]:
    """The GPU's name, or None and why there is none."""
    try:
        import torch
    except ImportError as error:
        return None, f"PyTorch cannot be imported: {error}"
    if torch.version.cuda is None:
        return None, f"PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return None, "this machine has no NVIDIA GPU, or no driver for one (libcuda.so.1)"
    return torch.cuda.get_device_name(0), ""


def folder_name(gpu: str) -> str:
    """NVIDIA H200 is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def choose(cases: list[Case], words: list[str] | None) -> list[Case]:
    """Those whose name has one of the words, and what they need."""
    if not words:
        return cases
    chosen = [case for case in cases if any(word in case.name for word in words)]
    needed = {case.needs() for case in chosen} | {case for case in cases if case.kind == "probe"}
    return [case for case in cases if case in chosen or case in needed]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only cases whose name has one of these")
    parser.add_argument("--minutes", type=float, default=LIMIT_SECONDS / 60, help="time for all (default %(default)s)")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables of the raw data in the folder")
    parser.add_argument("--list", action="store_true", help="run nothing: the cases in their order")
    parser.add_argument("--output", type=Path, help="folder (default benchmarks/results/<the GPU's name>)")
    return parser.parse_args(arguments)


def write_report(target: Path, gpu: str) -> Path:
    """`tables.md` of the raw data in a folder."""
    left_out = [line for record in results.load(target, "gpu_run") for line in record["left_out"]]
    path = target / "tables.md"
    path.write_text(tables.report(results.load(target, tables.NAME), left_out, gpu), encoding="utf-8")
    return path


def measure(target: Path, cases: list[Case], limit_seconds: float) -> Outcome:
    """Runs the cases and keeps a record of each as soon as there is one. Raises ChildEnded: no ballast."""
    results.clear(target, tables.NAME)
    results.clear(target, "gpu_run")
    runner = Runner(say=say)

    def execute(case: Case, timeout_seconds: float, before: Outcome) -> dict[str, object]:
        record = runner.execute(case, timeout_seconds, before)
        results.save(target, tables.NAME, case.name, record)
        return record

    try:
        outcome = run_all(cases, execute, limit_seconds=limit_seconds)
    finally:
        runner.close()
    results.save(target, "gpu_run", "run", {"left_out": outcome.left_out, "seconds": outcome.seconds})
    return outcome


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    cases = choose(all_cases(), options.only)
    if options.list:
        for case in cases:
            print(f"{case.name:36} {case.seconds:5.0f} s")
        return 0
    gpu, reason = gpu_name()
    if options.tables and options.output is not None:
        print(write_report(options.output, gpu or options.output.name).read_text(encoding="utf-8"))
        return 0
    if gpu is None:
        print(f"The GPU benchmark needs an NVIDIA GPU: {reason}. Nothing was measured.")
        return 0
    target = options.output or results.folder(folder_name(gpu))
    if not options.tables:
        try:
            outcome = measure(target, cases, options.minutes * 60)
        except ChildEnded as ended:
            print(f"the process that holds the device's memory down ended: {ended}", file=sys.stderr)
            return 1
        say(f"{len(outcome.records)} cases in {outcome.seconds:.0f} s, {len(outcome.left_out)} left out")
    print(write_report(target, gpu).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
