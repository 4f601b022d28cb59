"""`python -m tests.faults`: the whole campaign; options for a part of it. `--out FOLDER` keeps what came of it."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import itertools
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import describe
from swapd.progress import note
from tests.faults import campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", nargs="*", default=[*campaign.SCENARIOS, campaign.TORCH])
    parser.add_argument("--calls", nargs="*", help="only sites that call these")
    parser.add_argument("--modes", nargs="*", help="only modes that begin with one of these words")
    parser.add_argument(
        "--kinds", nargs="*", default=["driver", "own"], help="own: the system's calls, and our own memory"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for runs.jsonl.gz and summary.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = campaign.build(folder)
        cases = []
        if "driver" in options.kinds:
            cases += campaign.driver_cases(program, tuple(options.scenarios), folder)
        if "own" in options.kinds:
            native = tuple(scenario for scenario in options.scenarios if scenario != campaign.TORCH)
            cases += campaign.own_cases(program, campaign.build_interposer(folder), native, folder)
        cases = [case for case in cases if not options.calls or case.site.call in options.calls]
        cases = [case for case in cases if not options.modes or case.mode.split()[0].strip(",") in options.modes]
        print(f"{len(cases)} runs", flush=True)

        ended = itertools.count(1)

        def said(result: campaign.Result) -> None:
            note(f"{next(ended)} of {len(cases)}: {result.outcome}, {result.scenario}, {result.call}, {result.mode}")
            if result.outcome not in campaign.GOOD:
                print(f"{result.outcome}: {result.scenario}, {result.call} at {result.line}, {result.mode}")
                print("   ", "\n    ".join(result.words)[-600:], flush=True)

        results = campaign.carry_out(program, cases, options.jobs, said)
    found = campaign.report(results)
    for key, value in found.items():
        print(f"{key}: {value}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dataclasses.asdict(result)) for result in results]
        packed = gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)
        (options.out / "runs.jsonl.gz").write_bytes(packed)
        summary = {"machine": describe(), **found}
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0 if all(result.outcome in campaign.GOOD for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
