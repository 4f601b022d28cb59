"""Equal and uneven batches over two ranks of unlike speed, in turns.

    python -m benchmarks.splitting.uneven [--rounds N] [--quick] [--output FILE]

Two processes of one thread each (gloo), on this machine's cores. Rank 1 is made slow: it does the work of every sample
`SLOWNESS` times. `ooc.pytorch.uneven.measure` divides the batch from times that it measures. Then steps with
equal and with uneven batches take turns; of each, the time until a rank is done and the time until both are. That this
gives the gradients of one process is a test (`tests/frameworks/test_uneven.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, results

SLOWNESS = 3
BATCH, ROUNDS = 64, 40
CHILD_SECONDS = 300
HERE = "benchmarks.splitting.uneven"


def rank_main(batch: int, rounds: int, target: Path) -> None:
    """In each of two ranks; rank 0 writes what both measured."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from ooc.pytorch import uneven

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()
    ).append(nn.Linear(32 * 32 * 32, 10))
    images = torch.randn(batch, 3, 32, 32)

    def run(size: int) -> None:
        for _ in range(SLOWNESS if rank == 1 else 1):
            model(images[:size]).square().mean().backward()

    division = uneven.measure(batch, run)
    arms = {"equal": batch // 2, "uneven": division.size}
    mine: dict[str, list[list[float]]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name in sorted(arms, reverse=turn % 2 == 1):
            dist.barrier()
            began = time.perf_counter()
            run(arms[name])
            done = time.perf_counter()
            dist.barrier()
            if turn > 0:
                mine[name].append([done - began, time.perf_counter() - began])
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, mine)
    if rank == 0:
        found = {"sizes": division.sizes, "predicted_seconds": division.predicted_seconds, "ranks": gathered}
        target.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def measure(batch: int, rounds: int, target: Path) -> dict[str, Any]:
    """Raw data: for each rank and arm, [seconds until it was done, until both were] of each round."""
    raw = target.with_suffix(".raw")
    raw.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", HERE]
    arguments = ["--child", str(raw), "--batch", str(batch), "--rounds", str(rounds)]
    before = machine.describe()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    subprocess.run(command + arguments, check=True, timeout=CHILD_SECONDS, env={**kept, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
    raw.unlink()
    names = {"batch": batch, "rounds": rounds, "slowness": SLOWNESS}
    return {"machine": before, "load_after": machine.load(), **names, **found}


def rows_of(record: dict[str, Any]) -> list[list[str]]:
    """One row an arm, in milliseconds, medians over rounds."""

    def median(rank: int, arm: str, which: int) -> float:
        return statistics.median(pair[which] for pair in record["ranks"][rank][arm])

    rows = []
    base = median(0, "equal", 1)
    for arm in ("equal", "uneven"):
        sizes = record["sizes"] if arm == "uneven" else [record["batch"] // 2] * 2
        first, second, both = median(0, arm, 0), median(1, arm, 0), median(0, arm, 1)
        unlike = max(first, second) / min(first, second)
        cells = [f"{1e3 * seconds:.1f}" for seconds in (first, second, both)]
        rows.append([arm, " + ".join(map(str, sizes)), *cells, f"{unlike:.2f}", f"{both / base:.2f}"])
    return rows


def table(record: dict[str, Any]) -> str:
    """For people."""
    header = ["batches", "samples", "rank 0, ms", "rank 1, ms", "step, ms", "slower / faster rank", "step / equal's"]
    return results.markdown(header, rows_of(record)) + "\n" + machine.words(record["machine"]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it works, measures nothing")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch", type=int, default=BATCH)
    default = results.folder() / "splitting" / "uneven.json"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        rank_main(options.batch, options.rounds, options.child)
        return 0
    record = measure(options.batch, 3 if options.quick else options.rounds, options.output)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
