"""What splitting costs where nothing needs it: steps with it on and off take turns in one process.

    python -m benchmarks.splitting.idle [--rounds N] [--quick] [--output FILE] [-- ARGUMENT OF examples/gpt.py ...]

As `benchmarks.monitoring.timeline`, whose workload and clocks it uses: a figure is the median over rounds of the
ratio of a round's two steps. In the second case half of what is needed fits, and every single function does.
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
from benchmarks.monitoring.timeline import CASES, ROOT, SMALL, WARM_STEPS, nanoseconds, ratio

HERE = "benchmarks.splitting.idle"


def measure(rounds: int, arguments: list[str]) -> dict[str, Any]:
    """In this process: {kind: [seconds of a step, one for each round]} of wall and CPU time."""
    import torch

    import ooc
    from benchmarks.gpt_step import make_step

    torch.set_num_threads(1)
    ooc.enable()
    step = make_step(arguments)
    for _ in range(WARM_STEPS):
        step()
    found: dict[str, Any] = {name: {"off": [], "on": []} for name in ("wall_seconds", "cpu_seconds")}
    one: dict[str, list[float]] = {"off": [], "on": []}
    small = torch.zeros(16)
    for turn in range(rounds):
        for kind in ("off", "on") if turn % 2 else ("on", "off"):
            torch.ops.ooc.splitting(kind == "on")
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            found["wall_seconds"][kind].append(time.perf_counter() - wall)
            found["cpu_seconds"][kind].append(time.process_time() - cpu)
    for turn in range(rounds):
        for kind in ("off", "on") if turn % 2 else ("on", "off"):
            torch.ops.ooc.splitting(kind == "on")
            one[kind].append(nanoseconds(small))
        ooc.step()  # the recorder starts afresh
    summary = ooc.summary()
    names = ("live_peak_bytes", "budget_bytes", "swap_out_bytes", "split_function_count", "host_backed_function_count")
    return {**found, "operator_nanoseconds": one, **{name: summary[name] for name in names}}


def table(cases: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    rows = []
    for name, record in cases.items():
        ratios = (ratio(record, clock) for clock in ("cpu_seconds", "wall_seconds"))
        steps = [f"{middle:.4f} ({low:.4f} to {high:.4f})" for middle, low, high in ratios]
        one = record["operator_nanoseconds"]
        more = statistics.median(on - off for on, off in zip(one["on"], one["off"], strict=True))
        off = f"{1e3 * statistics.median(record['wall_seconds']['off']):.1f} ms"
        rows.append([name, off, *steps, f"{more:.1f} ns of {statistics.median(one['off']):.0f}"])
    header = ["", "step off", "CPU time on / off", "wall time on / off", "a small operator more"]
    return results.markdown(header, rows)


def run_child(rounds: int, arguments: list[str], budget_bytes: int | None) -> dict[str, Any]:
    """`measure` in a process of its own. Raises subprocess.CalledProcessError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    environment |= {"OOC_ALLOC": "emulated", "OOC_CHUNK_SIZE": "128KiB", "OOC_SMALL_LIMIT": "64KiB"}
    if budget_bytes is not None:
        environment["OOC_BUDGET"] = str(budget_bytes)
    command = [sys.executable, "-m", HERE, "--child", "--rounds", str(rounds), "--", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150, help="(default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it works, measures nothing")
    parser.add_argument("--output", type=Path, default=results.folder() / "splitting" / "idle.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of examples/gpt.py")
    options = parser.parse_args(given)
    rounds, arguments = 4 if options.quick else options.rounds, options.arguments or SMALL
    if options.child:
        print(json.dumps(measure(rounds, arguments)))
        return 0
    before = machine.describe()
    cases: dict[str, dict[str, Any]] = {}
    for name, part in CASES.items():
        budget = None if part is None else int(part * cases["in-core"]["live_peak_bytes"])
        cases[name] = run_child(rounds, arguments, budget)
    record = {"machine": before, "load_average_after": machine.load(), "arguments": arguments, "results": cases}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(table(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
