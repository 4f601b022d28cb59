"""How long iterations took: the first ones each by itself, and a histogram of all of them."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

# Upper ends of the histogram's buckets, in seconds. One more bucket has no upper end.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
)  # fmt: skip
MOST_KEPT = 100_000


class Step(NamedTuple):
    """One iteration that has ended."""

    seconds: float
    stall_seconds: float
    followed_plan: bool
    fingerprint: int = 0  # of its sequence
    moved: bool = False  # bytes left the device
    waited_for_plans: bool = False  # it had none, and one was being made, for its sequence or for another


@dataclass(frozen=True)
class Histogram:
    """The times of all iterations so far: a count for each bucket, the last of which has no end, and their sum."""

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """The number of iterations."""
        return sum(self.counts)


class StepTimes:
    """The iterations of one session. One thread adds them; any thread may read them."""

    def __init__(self) -> None:
        self.kept: list[Step] = []  # the first MOST_KEPT
        self.last: float | None = None  # seconds, of the last one
        self.histogram = Histogram((0,) * (len(BUCKETS) + 1), 0.0)  # each change makes a new one: no lock

    def add(self, step: Step) -> None:
        """Adds an iteration."""
        if len(self.kept) < MOST_KEPT:
            self.kept.append(step)
        self.last = step.seconds
        counts = list(self.histogram.counts)
        counts[bisect_left(BUCKETS, step.seconds)] += 1
        self.histogram = Histogram(tuple(counts), self.histogram.sum + step.seconds)

    def main(self) -> tuple[int, float | None]:
        """Of the kept iterations' sequences the one that took the most time: how often it ran, and its usual time.

        The time is the median of the later half, after what the first ones have to learn. The first iteration is left
        out, as all that the program did before is in it; with no other one the time is None.
        """
        of: defaultdict[int, list[float]] = defaultdict(list)
        for step in self.kept[1:]:
            of[step.fingerprint].append(step.seconds)
        if not of:
            return 0, None
        most = max(of.values(), key=sum)
        return len(most), statistics.median(most[len(most) // 2 :])
