"""Two checkouts in turns: step times of both workloads and the cost of interception, as ratios of new to old.

    python -m benchmarks.versions OLDER [--rounds N] [--steps N] [--output FOLDER]

OLDER is a checkout whose libraries are built and which has an environment in .venv, as this one. Within a round both
do the same, and every second round begins with the other one, so that neither always runs on the cooler machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.runs import ROOT, RunFailed

NAME = "versions"
OVERSUBSCRIPTION = 2
# Runs inside either checkout, so it takes nothing but what both have.
STEPS = """
import json, sys
from benchmarks.runs import run
from benchmarks.workloads import WORKLOADS
name, steps, budget, bandwidth = json.loads(sys.argv[1])
workload = next(w for w in WORKLOADS if w.name == name)
print(json.dumps(run(workload, steps, budget_bytes=budget, bytes_per_second=bandwidth)))
"""
INTERCEPTION = """
import json, sys
from benchmarks.children import measure_in_child
print(json.dumps(measure_in_child("operators", json.loads(sys.argv[1])[0])))
"""


def ask(checkout: Path, program: str, arguments: list[Any]) -> dict[str, Any]:
    """What a program prints, run by a checkout's own environment. Raises RunFailed."""
    command = [checkout / ".venv" / "bin" / "python", "-c", program, json.dumps(arguments)]
    adapters = checkout / "integrations"  # in 0.1.0, modules there had names of others: numpy
    paths = [checkout, adapters] if (adapters / "ooc").is_dir() else [checkout]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(f"{checkout}: {done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def step_seconds(record: dict[str, Any]) -> float:
    """The median of the steps after the plan was made."""
    return float(statistics.median(step["seconds"] for step in record["steps"][4:]))


def kept_of(record: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: the machine, the raw times, and the figure that is compared.

    Of interception that is what a call takes, the mean over the operators of the fastest of its rounds.
    """
    known = {"machine": record["machine"], "load_average_after": record["load_average_after"]}
    if "steps" in record:
        seconds = [step["seconds"] for step in record["steps"]]
        return known | {"figure": step_seconds(record), "step_seconds": seconds, "digest": record["digest"]}
    fastest = {
        name: {kind: min(times) for kind, times in kinds.items()} for name, kinds in record["nanoseconds"].items()
    }
    figure = statistics.mean(kinds["intercepted"] for kinds in fastest.values())
    return known | {"figure": figure, "fastest_nanoseconds": fastest}


def measure(older: Path, target: Path, rounds: int, steps: int) -> None:
    """Runs everything and writes the raw data. Raises RunFailed."""
    checkouts = {"old": older, "new": ROOT}
    cases: dict[str, tuple[str, list[Any]]] = {"interception": (INTERCEPTION, ["200"])}
    for name in ("gpt", "resnet50"):
        whole = ask(ROOT, STEPS, [name, steps, None, None])
        budget = whole["summary"]["live_peak_bytes"] // OVERSUBSCRIPTION
        bandwidth = 2 * budget / step_seconds(whole)  # copying takes about as long as computing
        cases[f"{name}-in-core"] = STEPS, [name, steps, None, None]
        cases[f"{name}-{OVERSUBSCRIPTION}x"] = STEPS, [name, steps, budget, bandwidth]
    results.clear(target, NAME)
    for turn in range(rounds):
        for case, (program, arguments) in cases.items():
            for which in sorted(checkouts, reverse=bool(turn % 2)):
                record = ask(checkouts[which], program, arguments)
                kept = kept_of(record) | {"case": case}
                results.save(target, NAME, f"{case}-{turn}-{which}", kept)
                print(f"{case}, round {turn}, {which}: {kept['figure']:.6g}", flush=True)


def table(target: Path) -> str:
    """One row a case: the median of new to old over the rounds."""
    ratios: dict[str, list[float]] = {}
    for path in sorted((target / NAME).glob("*-new.json")):
        new, old = (json.loads(at.read_text()) for at in (path, path.with_name(path.name.replace("-new.", "-old."))))
        ratios.setdefault(new["case"], []).append(new["figure"] / old["figure"])
    rows = [
        [case, f"{statistics.median(values):.3f}", f"{min(values):.3f} to {max(values):.3f}", len(values)]
        for case, values in ratios.items()
    ]
    return results.markdown(["case", "new / old, median", "range", "rounds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("older", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", type=Path, default=results.folder())
    options = parser.parse_args()
    measure(options.older.resolve(), options.output, options.rounds, options.steps)
    print(table(options.output))


if __name__ == "__main__":
    main()
