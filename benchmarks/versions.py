"""Two checkouts beside each other: step times of both workloads and the cost of interception, as ratios of new to old.

    python -m benchmarks.versions OLDER [--rounds N] [--steps N] [--output FOLDER]

OLDER is a checkout whose libraries are built and which has an environment in .venv, best a link to the one of this
checkout: two environments with the same PyTorch were seen to differ by 4 to 6% of a step. What is installed there as
editable is left out, so that each checkout runs its own code. A step of the old one and a step of the new one take
turns, so that what slows the machine down slows a pair of them; interception is measured in rounds, of which every
second begins with the other checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.child import TURNS
from benchmarks.runs import ROOT, RunFailed, in_turns
from benchmarks.workloads import CHUNK_BYTES

NAME = "versions"
OVERSUBSCRIPTION = 2
WARM_STEPS = 12  # those that are recorded, planned, and followed first
SETTINGS = {"exact": {}, "off": {"OOC_RECOMPUTE": "off"}}  # of the new checkout, within a name of a case
# Runs inside either checkout, so it takes nothing but what both have.
STEPS = """
import json, os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
from benchmarks.workloads import WORKLOADS
name, steps = json.loads(sys.argv[1])
pipes = [int(number) for number in os.environ.pop("BENCHMARK_TURNS", "").split()]
seconds, began = [], None
def step(*_):
    global began
    if began is not None:
        seconds.append(time.perf_counter() - began)
    if pipes:
        try:
            if began is not None:
                os.write(pipes[1], b"!")
            if not os.read(pipes[0], 1):
                pipes.clear()
        except BrokenPipeError:
            pipes.clear()
    began = time.perf_counter()
register_optimizer_step_post_hook(step)
script, *arguments = next(w for w in WORKLOADS if w.name == name).command(quick=False)
sys.argv = [script, *arguments, "--steps", str(steps)]
said, sys.stdout = sys.stdout, sys.stderr
runpy.run_path(script, run_name="__main__")
import ooc.pytorch
print(json.dumps({"seconds": seconds, "summary": ooc.pytorch.summary()}), file=said)
"""
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""
INTERCEPTION = """
import json, sys
from benchmarks.children import measure_in_child
print(json.dumps(measure_in_child("operators", json.loads(sys.argv[1])[0])))
"""


@cache
def _site() -> tempfile.TemporaryDirectory[str]:
    """A folder that Python looks into as it starts, for each process of a checkout."""
    folder = tempfile.TemporaryDirectory(prefix="ooc-bench-")
    Path(folder.name, "sitecustomize.py").write_text(SITE, encoding="utf-8")
    return folder


def ask(
    checkout: Path, program: str, arguments: list[Any], variables: dict[str, str], turns: Sequence[int] = ()
) -> dict[str, Any]:
    """What a program prints, run with a checkout's own code and environment. Raises RunFailed."""
    command = [checkout / ".venv" / "bin" / "python", "-c", program, json.dumps(arguments)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (_site().name, checkout, checkout / "integrations")))}
    environment = kept | paths | variables | {TURNS: " ".join(map(str, turns)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, pass_fds=turns, capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(f"{checkout}: {done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def environment(budget_bytes: int | None = None, bytes_per_second: float | None = None) -> dict[str, str]:
    """Of a process that trains, in a budget and with a held link if they are given."""
    variables = {"OOC_ALLOC": "emulated", "OOC_CHUNK_SIZE": str(CHUNK_BYTES), "OOC_SMALL_LIMIT": str(CHUNK_BYTES // 2)}
    if budget_bytes is not None:
        variables["OOC_BUDGET"] = str(budget_bytes)
    if bytes_per_second is not None:
        variables["OOC_EMULATED_BANDWIDTH"] = f"{bytes_per_second:.0f}B/s"
    return variables


def interception(record: dict[str, Any]) -> float:
    """Nanoseconds of a call: the mean over the operators of the fastest of its rounds."""
    return statistics.mean(min(kinds["intercepted"]) for kinds in record["nanoseconds"].values())


def measure(older: Path, target: Path, rounds: int, steps: int) -> None:
    """Runs everything and writes the raw data. Raises RunFailed."""
    cases: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {}  # workload, variables of both, of the new one
    for name in ("gpt", "resnet50"):
        whole = ask(ROOT, STEPS, [name, WARM_STEPS], environment())
        budget = whole["summary"]["live_peak_bytes"] // OVERSUBSCRIPTION
        pressed = environment(budget, 2 * budget / statistics.median(whole["seconds"]))  # copying takes as long
        for setting, variables in SETTINGS.items():
            cases[f"{name} in core, {setting}"] = name, environment(), variables
        cases[f"{name} at {OVERSUBSCRIPTION} times, off"] = name, pressed, SETTINGS["off"]
    results.clear(target, NAME)
    for turn in range(rounds):
        for case, (name, variables, of_new) in cases.items():
            run = partial(ask, program=STEPS, arguments=[name, steps])
            old, new = in_turns(
                lambda ends: run(older, variables=variables, turns=ends),  # noqa: B023
                lambda ends: run(ROOT, variables=variables | of_new, turns=ends),  # noqa: B023
            )
            pairs = list(zip(old["seconds"], new["seconds"]))[WARM_STEPS:]
            keep(target, case, turn, {"pairs": pairs}, statistics.median(new / old for old, new in pairs))
        checkouts = {"old": older, "new": ROOT}
        found = {
            which: ask(checkouts[which], INTERCEPTION, ["200"], {})
            for which in sorted(checkouts, reverse=bool(turn % 2))
        }
        nanoseconds = {which: interception(record) for which, record in found.items()}
        keep(target, "interception", turn, {"ns": nanoseconds}, nanoseconds["new"] / nanoseconds["old"])


def keep(target: Path, case: str, turn: int, raw: dict[str, Any], ratio: float) -> None:
    """Writes one ratio and what it is of."""
    record = {"case": case, "ratio": ratio, "machine": machine.describe(), **raw}
    results.save(target, NAME, f"{case.replace(',', '').replace(' ', '-')}-{turn}", record)
    print(f"{case}, round {turn}: {ratio:.4f}", flush=True)


def table(target: Path) -> str:
    """One row a case: the median of new to old over the rounds."""
    ratios: dict[str, list[float]] = {}
    for record in results.load(target, NAME):
        ratios.setdefault(record["case"], []).append(record["ratio"])
    rows = [
        [case, f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}", len(values)]
        for case, values in ratios.items()
    ]
    return results.markdown(["case", "new / old, median", "range", "rounds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("older", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=42)
    parser.add_argument("--output", type=Path, default=results.folder())
    options = parser.parse_args()
    measure(options.older.resolve(), options.output, options.rounds, options.steps)
    print(table(options.output))


if __name__ == "__main__":
    main()
