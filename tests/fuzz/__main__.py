"""`python -m tests.fuzz`: a campaign of random programs, which goes on from where the last one stopped."""

import argparse
import sys
from pathlib import Path

from tests.fuzz import campaign
from tests.fuzz.server import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=campaign.__doc__)
    parser.add_argument("--minutes", type=float, default=120, help="how long [120]")
    parser.add_argument("--jobs", type=int, default=2, help="batches at a time [2]")
    path = campaign.ROOT / "benchmarks/results/emulated/fuzz/batches.jsonl"
    parser.add_argument("--results", type=Path, default=path, help="file of results [%(default)s]")
    parser.add_argument("--batch", type=int, help="only this batch")
    chosen = parser.parse_args()
    if chosen.batch is None:
        return 0 if campaign.run(chosen.results.resolve(), chosen.minutes, chosen.jobs) else 1
    with Server() as server:
        batch = campaign.run_batch(server, chosen.batch)
    campaign.keep(batch, chosen.results)
    return 1 if batch.failure else 0


if __name__ == "__main__":
    sys.exit(main())
