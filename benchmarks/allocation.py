"""Cost when everything fits: cached malloc/free pairs in nanoseconds, and a GPT step with and without interception.

The pairs are timed by a native program (`native/core_calls.cpp`), built here; calls from Python cost more than what
is measured. The steps of the GPT example take turns in one process (`gpt_step.py`); the ratio is the median over the
rounds of a round's two steps, with a bootstrap interval.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.children import measure_in_child
from benchmarks.runs import ROOT, RunFailed

NAME = "allocation"
TARGET_NANOSECONDS = 300
TARGET_RATIO = 1.02
GPT_ARGUMENTS = ("--batch-size", "4", "--text-bytes", "500000")
_RESAMPLES = 2000


def measure(target: Path, *, native_rounds: int, step_rounds: int, say: Callable[[str], None]) -> None:
    """Runs both and writes the raw data. Raises RunFailed."""
    description = machine.describe()
    nanoseconds = native(native_rounds)
    pairs = {"machine": description, "nanoseconds": nanoseconds, "load_average_after": machine.load()}
    results.clear(target, NAME)
    results.save(target, NAME, "pairs", pairs)
    for name, values in nanoseconds.items():
        say(f"{name}: {statistics.median(values):.0f} ns")
    steps = measure_in_child("gpt_step", str(step_rounds), *GPT_ARGUMENTS)
    results.save(target, NAME, "steps", steps)
    ratio, low, high = ratio_of(steps["seconds"]["intercepted"], steps["seconds"]["same allocator"])
    say(f"GPT step intercepted / not: {ratio:.4f} ({low:.4f} to {high:.4f})")


def native(rounds: int) -> dict[str, list[float]]:
    """Builds the native program and runs it. Raises RunFailed."""
    build = ROOT / "build" / "benchmarks"
    libraries = ROOT / "ooc_alloc" / "lib"
    if shutil.which("cmake") is None:
        raise RunFailed("the native benchmark needs cmake")
    commands = [
        ["cmake", "-S", str(ROOT / "benchmarks" / "native"), "-B", str(build)],
        ["cmake", "--build", str(build)],
        [str(build / "core_calls"), str(libraries / "libooc_emulated_cuda.so"), str(rounds)],
    ]
    output = ""
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RunFailed(
                f"status {done.returncode}: {' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
            )
        output = done.stdout
    found: dict[str, list[float]] = json.loads(output)
    return found


def ratio_of(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Median of the paired ratios first / second, and its 95% interval (percentile bootstrap, seeded)."""
    ratios = [a / b for a, b in zip(first, second)]
    chooser = random.Random(0)
    medians = sorted(statistics.median(chooser.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return statistics.median(ratios), medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40 - 1]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: the native calls, then the GPT step."""
    text = ""
    for record in records:
        if "nanoseconds" in record:
            rows = [
                [name, f"{min(values):.0f}", f"{statistics.median(values):.0f}"]
                for name, values in record["nanoseconds"].items()
            ]
            rounds = len(next(iter(record["nanoseconds"].values())))
            text += (
                f"{machine.words(record['machine'])}; load {record['machine']['load_average'][0]}. Nanoseconds a "
                f"call or pair, {rounds} rounds; the target for a cached pair is {TARGET_NANOSECONDS}.\n\n"
                + results.markdown(["call", "min", "median"], rows)
            )
        else:
            text += "\n" + _steps(record)
    return text


def _steps(record: dict[str, Any]) -> str:
    seconds = record["seconds"]
    rows = []
    for kind, values in seconds.items():
        ratio, low, high = ratio_of(values, seconds["same allocator"])
        compared = "1" if kind == "same allocator" else f"{ratio:.4f} ({low:.4f} to {high:.4f})"
        rows.append([kind, f"{statistics.median(values):.4f}", f"{min(values):.4f}", compared])
    return (
        f"GPT step in-core, {record['functions']} functions, {len(seconds['intercepted'])} rounds, load "
        f"{record['machine']['load_average'][0]}; seconds, and the ratio to the same allocator without interception "
        f"with its 95% interval. The target for the first line is {TARGET_RATIO}.\n\n"
        + results.markdown(["step", "median", "min", "ratio"], rows)
    )
