"""Write-backs: copies made ahead of the moment at which a variable leaves, while the link out has nothing else to do.

A gradient, say, is written in the backward pass and idle until the optimizer reads it; from then on it is in the way.
If it was copied while it was idle, it is dropped at once when room is short. So what leaves dirty is written back over
the longest idle interval that it has had since it was last written.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import Out
from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals, host_valid
from swapd.policies.pieces import after, piece_chunks


def write_backs(problem: Problem, intervals: Intervals, taken: NDArray[np.int64]) -> list[Out]:
    """The write-backs of a plan in which the first ``taken[i]`` chunks leave over interval i."""
    rate = problem.machine.out_bytes_per_second
    clean = np.minimum(host_valid(intervals, taken), taken)
    found: list[Out] = []
    written: dict[int, int] = {}  # interval: how many of its first chunks are written back already
    for leaving in np.flatnonzero((taken > clean) & (intervals.clean_after >= 0)).tolist():
        over = max(_earlier(intervals, leaving), key=lambda interval: float(intervals.seconds[interval]))
        start, stop = max(int(clean[leaving]), written.get(over, 0)), int(taken[leaving])
        if stop <= start:
            continue
        written[over] = stop
        variable, function = int(intervals.out_variable[over]), after(problem, intervals, over)
        size = piece_chunks(problem, stop - start, rate)
        found += [Out(variable, first, min(size, stop - first), function) for first in range(start, stop, size)]
    return sorted(found, key=lambda move: move.after_function)


def _earlier(intervals: Intervals, interval: int) -> Iterator[int]:
    """The intervals since the variable was last written, latest first; at least one. In a circle each comes once."""
    at = int(intervals.clean_after[interval])
    seen: set[int] = set()
    while at >= 0 and at != interval and at not in seen:
        seen.add(at)
        yield at
        at = int(intervals.clean_after[at])
