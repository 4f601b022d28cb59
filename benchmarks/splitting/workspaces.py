"""Training steps with OOC_SPLIT=fast under limits of workspace, in turns with undivided ones.

    python -m benchmarks.splitting.workspaces [--cases NAME ...] [--steps N] [--rounds N] [--output FOLDER] [--tables]

A step of one run and a step of the other take turns. The undivided run has our allocator too (OOC_SPLIT=off); one more
pair compares it with plain PyTorch. The workspace is what the allocator counts in one further step, the most of any
convolution. Everything is in memory: the device is emulated, and larger than what the programs need.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import in_turns
from benchmarks.splitting.child_runs import run_child
from benchmarks.splitting.workspaces_child import CASES, WARM_STEPS

NAME = "workspaces"
STEPS = 12
MIB = 1 << 20
LIMITS_MIB = (None, 512, 64, 8)
EMULATED = {"OOC_ALLOC": "emulated", "OOC_BUDGET": "4GiB", "OOC_SPLIT": "off", "OMP_NUM_THREADS": "2"}


def measure(case: str, steps: int, rounds: int, target: Path) -> None:
    """Every pair of runs of one network, `rounds` times: where a process has its memory counts. Raises RunFailed."""

    def run(ends: tuple[int, ...], variables: dict[str, str]) -> dict[str, Any]:
        return run_child("benchmarks.splitting.workspaces_child", [case, str(steps)], variables, ends)

    def pair(name: str, old: dict[str, str], new: dict[str, str]) -> None:
        first, second = in_turns(partial(run, variables=old), partial(run, variables=new))
        keep(target, case, name, first, second)

    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            pair(f"our allocator, {turn}", {"OOC_ALLOC": "0", "OMP_NUM_THREADS": "2"}, EMULATED)
            for limit in LIMITS_MIB:
                fast = EMULATED | {"OOC_SPLIT": "fast", "OOC_SPLIT_STORE": str(Path(folder) / "store.sqlite")}
                if limit is not None:
                    fast["OOC_WORKSPACE"] = f"{limit}MiB"
                pair(f"{'no limit' if limit is None else f'{limit} MiB'}, {turn}", EMULATED, fast)


def keep(target: Path, case: str, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Writes one pair."""
    pairs = list(zip(old["seconds"], new["seconds"]))[WARM_STEPS:]
    ratio = statistics.median(two / one for one, two in pairs)
    record = {"case": case, "run": name, "ratio": ratio, "old": old, "new": new}
    results.save(target, NAME, f"{case} {name}".replace(",", "").replace(" ", "-"), record)
    print(f"{case}, {name}: {ratio:.3f}", flush=True)


def _workspace(run: dict[str, Any]) -> int:
    return max(run.get("workspace_bytes", {"": 0}).values())


def table(records: list[dict[str, Any]]) -> str:
    """A row for each network and limit."""
    by_run: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: (list(CASES).index(r["case"]), r["run"].rpartition(", ")[2])):
        by_run.setdefault((record["case"], record["run"].rpartition(", ")[0]), []).append(record)
    rows = []
    for (case, name), rounds in by_run.items():
        first = rounds[0]
        new, ratios = first["new"], [record["ratio"] for record in rounds]
        rows.append(
            [
                f"{case}, {name}",
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                results.mib(_workspace(first["old"])),
                results.mib(max(_workspace(record["new"]) for record in rounds)),
                str(len(new["split_layers"])),
                f"{max((layer['largest_relative'] for layer in new['split_layers']), default=0):.1e}",
                f"{new['seconds'][0] / statistics.median(first['old']['seconds'][WARM_STEPS:]):.1f}",
            ]
        )
    header = ["network, limit", "step / undivided", "rounds", "workspace undivided, MiB", "workspace, MiB", "divided"]
    return results.markdown([*header, "largest difference", "first step / step"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results.folder() / "splitting")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables of the raw data")
    options = parser.parse_args()
    for case in [] if options.tables else options.cases:
        measure(case, options.steps, options.rounds, options.output)
    records = results.load(options.output, NAME)
    text = (
        "# Convolutions in measured micro-batches\n\nMade from the raw data in `workspaces/` by "
        "`python -m benchmarks.splitting.workspaces --tables`. The device is emulated; steps of both runs in turns.\n"
        "`our allocator` is undivided with it against plain PyTorch; all others are against that.\n\n" + table(records)
    )
    text += "\n" + "; ".join(sorted({machine.words(record["new"]["machine"]) for record in records})) + "\n"
    (options.output / "workspaces.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
