"""Pieces: the chunks of one interval are moved in several copies, so that a function need not wait for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals

PIECES = 8  # at most, of one interval's chunks
LATENCIES = 32  # a piece takes at least so many times the latency of a copy
_CAPACITY_SHARE = 256  # a piece has at least one part in so many of the capacity


@dataclass(frozen=True)
class Piece:
    """Some chunks of the variable of an interval."""

    interval: int
    first: int
    count: int
    at: int  # the function before which it may start, in the coordinates of `intervals`


def piece_chunks(problem: Problem, count: int, bytes_per_second: float, latencies: int = LATENCIES) -> int:
    """How many chunks each piece has when `count` chunks move at that speed of the link."""
    least = latencies * problem.machine.latency_seconds * bytes_per_second / problem.chunk_bytes
    return max(1, -(-count // PIECES), int(least), problem.capacity_chunks // _CAPACITY_SHARE)


def after(problem: Problem, intervals: Intervals, interval: int) -> int:
    """The function that ends as the interval begins, numbered as in the iteration in which the function ends."""
    return int(intervals.start[interval]) - 1 + (problem.functions if intervals.wraps[interval] else 0)
