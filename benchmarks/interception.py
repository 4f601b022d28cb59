"""Cost of interception: nanoseconds per operator, beside a TorchDispatchMode that does nothing, and plain PyTorch.

The three kinds take turns in rounds of 100 calls. The cost of a kind is its time less the plain one's of the same
round, on the same memory; the median over the rounds, and the difference of the two minima, which a loaded machine does
not disturb. The calls are made from Python, whose own cost is in all three.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.children import measure_in_child

NAME = "interception"
TARGET_NANOSECONDS = 500


def measure(target: Path, *, rounds: int, say: Callable[[str], None]) -> None:
    """Runs it and writes the raw data. Raises RunFailed."""
    record = measure_in_child("operators", str(rounds))
    results.clear(target, NAME)
    results.save(target, NAME, "operators", record)
    for name, kinds in record["nanoseconds"].items():
        say(f"{name}: interception costs {cost(kinds, 'intercepted')[1]:.0f} ns")


def cost(kinds: dict[str, list[float]], kind: str) -> tuple[float, float]:
    """Nanoseconds beyond the plain call: difference of the minima, median of the differences."""
    differences = [value - plain for value, plain in zip(kinds[kind], kinds["plain"])]
    return min(kinds[kind]) - min(kinds["plain"]), statistics.median(differences)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, one line an operator."""
    if not records:
        return ""
    rows = []
    for name, kinds in records[0]["nanoseconds"].items():
        ours, python = cost(kinds, "intercepted"), cost(kinds, "dispatch mode")
        plain = min(kinds["plain"]), statistics.median(kinds["plain"])
        rows.append([name, *(f"{value:.0f}" for value in (*plain, *ours, *python))])
    header = (
        "operator|plain, min|plain, median|ours adds, min|ours adds, median|mode adds, min|mode adds, median"
    ).split("|")
    rounds = len(next(iter(records[0]["nanoseconds"].values()))["plain"])
    return (
        f"{machine.words(records[0]['machine'])}; load {records[0]['machine']['load_average'][0]}. Nanoseconds a call, "
        f"{rounds} rounds; the target for what interception adds is {TARGET_NANOSECONDS}.\n\n"
        + results.markdown(header, rows)
    )
