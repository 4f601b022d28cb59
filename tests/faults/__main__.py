"""`python -m tests.faults`: the whole campaign; --scenarios and --calls for a part of it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults import campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", nargs="*", default=list(campaign.SCENARIOS))
    parser.add_argument("--calls", nargs="*", help="only sites that call these")
    parser.add_argument("--modes", nargs="*", help="only modes that begin with one of these words")
    parser.add_argument("--own", action="store_true", help="only calls of the system and memory of our own")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = campaign.build(folder)
        scenarios = tuple(options.scenarios)
        cases = [] if options.own else campaign.driver_cases(program, scenarios, folder)
        cases += campaign.own_cases(program, campaign.build_interposer(folder), scenarios, folder)
        cases = [case for case in cases if not options.calls or case.site.call in options.calls]
        cases = [case for case in cases if not options.modes or case.mode.split()[0].strip(",") in options.modes]
        print(f"{len(cases)} runs", flush=True)

        def said(result: campaign.Result) -> None:
            if result.outcome not in campaign.GOOD:
                print(f"{result.outcome}: {result.scenario}, {result.call} at {result.line}, {result.mode}")
                print("   ", "\n    ".join(result.words)[-600:], flush=True)

        results = campaign.carry_out(program, cases, options.jobs, said)
    for key, value in campaign.report(results).items():
        print(f"{key}: {value}")
    return 0 if all(result.outcome in campaign.GOOD for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
