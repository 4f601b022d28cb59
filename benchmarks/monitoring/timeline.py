"""What a timeline costs: steps with and without one take turns in one process.

    python -m benchmarks.monitoring.timeline [--rounds N] [--quick] [--output FILE] [-- ARGUMENT OF examples/gpt.py ...]

Two processes, one after the other: everything fits (nothing moves, so that only the functions' events cost something),
and half of what is needed fits. In each round one step runs with the timeline and one without, in an order that turns
from round to round, so that what disturbs the machine disturbs both. A figure is the median over rounds of the ratio of
a round's two steps, of the process's CPU time and of the wall clock; the quartiles say how sure it is. The ring is
turned on and off between steps: making it is not counted, writing its file neither.

A step's share is small beside what disturbs it, so one small operator is timed too: what the timeline adds to it, over
all functions of a step, is the last column. Off is off: the branch that is left is not seen here, as both have it.
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

from benchmarks import machine

ROOT = Path(__file__).resolve().parents[2]
WARM_STEPS = 6
SMALL = ["--layers", "4", "--width", "128", "--context", "128", "--batch-size", "8", "--text-bytes", "400000"]
CASES = {"in-core": None, "out-of-core": 0.5}  # budget as a share of the in-core run's live peak


def measure(rounds: int, arguments: list[str]) -> dict[str, Any]:
    """In this process: {kind: [seconds of a step, one for each round]} of wall and CPU time, and what the ring saw."""
    import torch

    import ooc
    from benchmarks.gpt_step import make_step

    torch.set_num_threads(1)
    ooc.enable()
    core = ooc.pytorch._active().core
    step = make_step(arguments)
    for _ in range(WARM_STEPS):
        step()
    found: dict[str, Any] = {name: {"off": [], "on": []} for name in ("wall_seconds", "cpu_seconds")}
    events, functions = [], []
    for turn in range(rounds):
        for kind in ("off", "on") if turn % 2 else ("on", "off"):
            if kind == "on":
                core.timeline_start()
            before = int(core.stats()["functions"])
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            found["wall_seconds"][kind].append(time.perf_counter() - wall)
            found["cpu_seconds"][kind].append(time.process_time() - cpu)
            if kind == "on":
                functions.append(int(core.stats()["functions"]) - before)
                core.timeline_stop()
                events.append(core.timeline_state().recorded)
    one: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(rounds):
        for kind in one:
            if kind == "on":
                core.timeline_start()
            one[kind].append(nanoseconds(torch.zeros(16)))
            core.timeline_stop()
        ooc.step()  # the recorder starts afresh
    stats = core.stats()
    names = ("live_peak_bytes", "budget_bytes", "swap_out_bytes", "swap_in_bytes")
    return {
        **found,
        "operator_nanoseconds": one,
        "functions_per_step": statistics.median(functions),
        "events_per_step": statistics.median(events),
        **{name: stats[name] for name in names},
    }


def nanoseconds(tensor: Any, calls: int = 200) -> float:
    """Of one small operator."""
    for _ in range(20):
        tensor.add_(1)
    began = time.perf_counter_ns()
    for _ in range(calls):
        tensor.add_(1)
    return (time.perf_counter_ns() - began) / calls


def share(record: dict[str, Any]) -> tuple[float, float]:
    """Nanoseconds that the timeline adds to an operator, and the share of a step that this is for all its functions."""
    one = record["operator_nanoseconds"]
    more = statistics.median(on - off for on, off in zip(one["on"], one["off"], strict=True))
    return more, more * 1e-9 * record["functions_per_step"] / statistics.median(record["wall_seconds"]["off"])


def ratio(record: dict[str, Any], clock: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile of on / off over rounds."""
    ratios = [on / off for on, off in zip(record[clock]["on"], record[clock]["off"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return statistics.median(ratios), low, high


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    columns = (
        "",
        "functions, events a step",
        "step off",
        "CPU time on / off",
        "wall time on / off",
        "an operator more, of a step",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, record in results.items():
        ratios = (ratio(record, clock) for clock in ("cpu_seconds", "wall_seconds"))
        cpu, wall = (f"{middle:.4f} ({low:.4f} to {high:.4f})" for middle, low, high in ratios)
        off = f"{1e3 * statistics.median(record['wall_seconds']['off']):.1f} ms"
        counts = f"{record['functions_per_step']:.0f}, {record['events_per_step']:.0f}"
        more, part = share(record)
        lines.append(f"| {name} | {counts} | {off} | {cpu} | {wall} | {more:.0f} ns, {part:.2%} |")
    return "\n".join(lines) + "\n"


def run_child(rounds: int, arguments: list[str], budget_bytes: int | None) -> dict[str, Any]:
    """`measure` in a process of its own. Raises subprocess.CalledProcessError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    environment |= {"OOC_ALLOC": "emulated", "OOC_CHUNK_SIZE": "128KiB", "OOC_SMALL_LIMIT": "64KiB"}
    if budget_bytes is not None:
        environment["OOC_BUDGET"] = str(budget_bytes)
    command = [sys.executable, "-m", "benchmarks.monitoring.timeline", "--child", "--rounds", str(rounds), "--"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150, help="(default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it works, measures nothing")
    parser.add_argument("--output", type=Path, help="keep the raw data there, as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help="of examples/gpt.py")
    options = parser.parse_args()
    rounds, arguments = 4 if options.quick else options.rounds, options.arguments or SMALL
    if options.child:
        print(json.dumps(measure(rounds, arguments)))
        return
    before = machine.describe()
    results: dict[str, dict[str, Any]] = {}
    for name, part in CASES.items():
        budget = None if part is None else int(part * results["in-core"]["live_peak_bytes"])
        results[name] = run_child(rounds, arguments, budget)
    if options.output is not None:
        record = {"machine": before, "load_average_after": machine.load(), "arguments": arguments, "results": results}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
