"""A time budget: cases run in the order of their importance as long as one is thought to end in time.

What does not fit is left out and named; a shorter case behind it may still run. Estimates are corrected by what the
cases so far have taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.cases import Case

LIMIT_SECONDS = 570.0  # of the ten minutes; the rest is for the tables
_SHORTEST_TIMEOUT = 20.0
_PATIENCE = 4.0  # a case may take so many times what it is thought to


@dataclass
class Outcome:
    """What was measured, and what was not."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the case's name
    left_out: list[str] = field(default_factory=list)  # a line each: name and reason
    seconds: float = 0.0


def run_all(
    cases: Iterable[Case],
    execute: Callable[[Case, float, Outcome], dict[str, Any]],
    *,
    limit_seconds: float = LIMIT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Runs what fits into the time.

    Args:
        execute: runs a case in at most so many seconds, given what was measured before, and returns its record, in
            which `outcome` is "ok" or the reason why there are no figures.
    """
    began = clock()
    outcome = Outcome()
    thought = taken = 0.0
    for case in cases:
        elapsed = clock() - began
        factor = max(0.5, taken / thought) if thought else 1.0
        needed = case.needs()
        if needed is not None and outcome.records.get(needed.name, {}).get("outcome") != "ok":
            outcome.left_out.append(f"{case.name}: there is no result of {needed.name} to measure it by")
            continue
        left = limit_seconds - elapsed
        if case.seconds * factor > left:
            outcome.left_out.append(f"{case.name}: no time left")
            continue
        timeout = min(left, max(_SHORTEST_TIMEOUT, _PATIENCE * case.seconds * factor))
        started = clock()
        outcome.records[case.name] = execute(case, timeout, outcome)
        thought += case.seconds
        taken += clock() - started
    outcome.seconds = clock() - began
    return outcome
