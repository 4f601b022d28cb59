"""How long iterations took: the times themselves, and a histogram of all of them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Upper ends of the histogram's buckets, in seconds; one more is infinite.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0,
)  # fmt: skip
MOST_KEPT = 100_000


@dataclass(frozen=True)
class Histogram:
    """Of all iterations so far; the counts are per bucket, the last one is that of the infinite one."""

    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Of iterations."""
        return sum(self.counts)


class StepTimes:
    """Iterations of one session. One thread adds, any thread may look."""

    def __init__(self) -> None:
        self.kept: list[float] = []  # seconds, of the first MOST_KEPT
        self.last: float | None = None  # seconds, of the last one
        self._histogram = Histogram((0,) * (len(BUCKETS) + 1), 0.0)  # replaced, never changed: no lock

    def add(self, seconds: float) -> None:
        """An iteration of so many seconds has ended."""
        if len(self.kept) < MOST_KEPT:
            self.kept.append(seconds)
        self.last = seconds
        counts = list(self._histogram.counts)
        counts[bisect_left(BUCKETS, seconds)] += 1
        self._histogram = Histogram(tuple(counts), self._histogram.sum + seconds)

    @property
    def count(self) -> int:
        """Of iterations."""
        return self.histogram().count

    def histogram(self) -> Histogram:
        """As it is now."""
        return self._histogram
