"""Training where one function alone exceeds the budget: a batch-norm's backward pass, a large vocabulary's logits.

    python -m benchmarks.splitting.training [--cases NAME ...] [--steps N] [--output FOLDER] [--tables]

Each run is a process of its own: plain PyTorch, and out-of-core with `OOC_SPLIT=exact` (and `allow`, where exact
divisions do not suffice). Losses and the final state are compared bit by bit. The device is emulated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import RunFailed
from benchmarks.splitting.child_runs import run_child
from benchmarks.splitting.training_child import CASES

STEPS = 12  # the first steps wait for verdicts, so that the later ones run in parts
MIB = 1 << 20
CHUNK_BYTES = 64 << 10
BUDGETS = {"resnet50": 32 * MIB, "gpt": 28 * MIB}
LARGEST = {  # of one function, undivided
    "resnet50": ("batch-norm backward", 3 * 48 * 64 * 32 * 32 * 4),  # gradient, input and result of (48, 64, 32, 32)
    "gpt": ("the logits alone", 4 * 128 * 16384 * 4),
}


def run(case: str, split: str | None, steps: int) -> dict[str, Any]:
    """One process; without a mode of splitting, plain PyTorch. Raises RunFailed."""
    variables = {}
    if split is not None:
        variables = {
            "OOC_ALLOC": "emulated",
            "OOC_BUDGET": str(BUDGETS[case]),
            "OOC_CHUNK_SIZE": str(CHUNK_BYTES),
            "OOC_SMALL_LIMIT": str(CHUNK_BYTES // 2),
            "OOC_SPLIT": split,
            "OOC_PLANNING": "blocking",
        }
    return {"case": case, "split": split} | run_child(
        "benchmarks.splitting.training_child", [case, str(steps)], variables
    )


def measure(cases: list[str], steps: int, target: Path) -> list[str]:
    """Raw data of all runs; returns what was wrong."""
    complaints = []
    for case in cases:
        plain = run(case, None, steps)
        results.save(target, "training", f"{case}-plain", plain)
        try:
            record = run(case, "exact", steps)
        except RunFailed as error:
            if "OOC_SPLIT=allow" not in str(error):
                raise
            record = run(case, "allow", steps)
        record["identical"] = all(record[name] == plain[name] for name in ("losses", "state_fingerprint"))
        results.save(target, "training", f"{case}-split", record)
        summary = record["summary"]
        if summary["device_peak_bytes"] > BUDGETS[case]:
            complaints.append(f"{case}: the device held {summary['device_peak_bytes']} bytes")
        if record["split"] == "exact" and not record["identical"]:
            complaints.append(f"{case}: other bits than in plain PyTorch")
    return complaints


def table(records: list[dict[str, Any]]) -> str:
    """One row a run under a budget."""
    plain = {r["case"]: min(step["seconds"] for step in r["steps"]) for r in records if r["split"] is None}
    rows = []
    for record in records:
        if record["split"] is None:
            continue
        case, summary = record["case"], record["summary"]
        what, size = LARGEST[case]
        seconds = min(step["seconds"] for step in record["steps"][len(record["steps"]) // 2 :])
        rows.append(
            [
                f"{case}, {record['split']}",
                f"{what}: {results.mib(size)}",
                results.mib(summary["budget_bytes"]),
                results.mib(summary["device_peak_bytes"]),
                results.mib(summary["live_peak_bytes"]),
                str(summary["split_function_count"]),
                str(summary["host_backed_function_count"]),
                f"{seconds / plain[case]:.2f}",
                "identical" if record["identical"] else "other rounding",
            ]
        )
    header = ["run", "largest undivided, MiB", "budget", "device peak", "live peak", "functions in parts"]
    return results.markdown([*header, "host-backed", "step / plain", "losses and state"], rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=results.folder() / "splitting")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables of the raw data")
    options = parser.parse_args(arguments)
    complaints = [] if options.tables else measure(options.cases, options.steps, options.output)
    records = results.load(options.output, "training")
    text = (
        "# Training with functions larger than the budget\n\nMade from the raw data in `training/` by "
        "`python -m benchmarks.splitting.training --tables`. The device is emulated.\n\n" + table(records)
    )
    text += "\n" + "; ".join(sorted({machine.words(record["machine"]) for record in records})) + "\n"
    (options.output / "training.md").write_text(text, encoding="utf-8")
    print(text)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
