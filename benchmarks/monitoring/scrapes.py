"""Cost of being watched: training steps with nothing on, and with each kind of monitoring; what one scrape costs.

The GPT example trains in half of the memory that it needs. The arms take turns, each in a process of its own. The
difference of two arms is smaller than the noise of a step, so the cost of a scrape is measured directly as well: the
process's processor time over many scrapes in a row.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.children import measure_in_child
from benchmarks.workloads import WORKLOADS

NAME = "monitoring"
TARGET = 0.001  # of the processor time of steps, for one scrape a second
OVERSUBSCRIPTION = 2.0

# What is turned on, as keywords of `enable`. The first is what the others are compared with.
ARMS: dict[str, dict[str, Any]] = {
    "off": {},
    "scraped once a second": {"metrics_port": 0},
}


def measure(target: Path, *, quick: bool, rounds: int, steps: int, count: int, say: Callable[[str], None]) -> None:
    """Runs it and writes the raw data. Raises RunFailed."""
    workload = next(workload for workload in WORKLOADS if workload.name == "gpt")
    arguments = workload.quick_arguments if quick else workload.arguments

    def run(settings: dict[str, Any], steps: int) -> dict[str, Any]:
        return measure_in_child("monitoring.steps", str(steps), str(count), json.dumps(settings), *arguments)

    in_core = run({"policy": "demand"}, 1)["summary"]
    budget = int(in_core["live_peak_bytes"] / OVERSUBSCRIPTION)
    results.clear(target, NAME)
    names = list(ARMS)
    for turn in range(rounds):
        for shift in range(len(names)):
            place = (turn + shift) % len(names)
            record = run({"budget": budget, **ARMS[names[place]]}, steps)
            kept = {"arm": names[place], "round": turn, "arguments": list(arguments), "budget_bytes": budget, **record}
            results.save(target, NAME, f"{place}-{turn}", kept)
            say(f"{names[place]}: {median_of([kept], 'processor_seconds') * 1e3:.1f} ms of processor time a step")


def median_of(records: list[dict[str, Any]], key: str) -> float:
    """Over all steps of all rounds."""
    return statistics.median(value for record in records for value in record[key])


def scrape_seconds(record: dict[str, Any]) -> float:
    """Processor seconds of one scrape."""
    burst = record["burst"]
    return (burst["processor_seconds"] - burst["idle_processor_seconds"]) / burst["scrapes"]


def share_of_steps(record: dict[str, Any]) -> float:
    """Processor time of one scrape a second, over what steps take in a second."""
    return scrape_seconds(record) / (sum(record["processor_seconds"]) / sum(record["seconds"]))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: steps by arm, and the cost of a scrape."""
    if not records:
        return ""
    arms = {name: [record for record in records if record["arm"] == name] for name in ARMS}
    arms = {name: group for name, group in arms.items() if group}
    rows = []
    for name, group in arms.items():
        row = [name, str(sum(record["scraped"] for record in group))]
        for key in ("seconds", "processor_seconds"):
            value, base = median_of(group, key), median_of(arms.get("off", group), key)
            row += [f"{value * 1e3:.1f}", f"{100 * (value / base - 1):+.2f}%"]
            rounds = [median_of([record], key) for record in group]
            row.append(f"{min(rounds) * 1e3:.1f} to {max(rounds) * 1e3:.1f}")
        rows.append(row)
    header = "|scrapes|ms a step|beside off|rounds|processor ms a step|beside off|rounds".split("|")
    text = (
        f"{machine.words(records[0]['machine'])}; load {records[0]['machine']['load_average'][0]}. The GPT example at "
        f"{OVERSUBSCRIPTION:g} times the budget, medians; under *rounds* the smallest and largest median of a round. "
        "What lies within that is no difference.\n\n" + results.markdown(header, rows)
    )
    bursts = [record for record in records if "burst" in record]
    if bursts:
        cost = statistics.median(map(scrape_seconds, bursts))
        share = statistics.median(map(share_of_steps, bursts))
        count, size = sum(record["burst"]["scrapes"] for record in bursts), bursts[0]["burst"]["page_bytes"]
        text += (
            f"\nOne scrape costs {cost * 1e6:.0f} us of processor time ({count} of them, {size} bytes each, HTTP "
            f"included); once a second, that is {100 * share:.3f}% of the processor time of the steps (target: under "
            f"{100 * TARGET:g}%).\n"
        )
    return text
