"""Events: what a simulated machine does, one by one, for pictures and Perfetto traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """A function of the sequence runs; `function` is its index."""

    function: int
    start: float
    end: float


class Stall(NamedTuple):
    """A function waits, in the end for `variable` to arrive, or for room if `variable` is -1."""

    function: int
    variable: int
    start: float
    end: float


class Copy(NamedTuple):
    """Chunks on a link. The event is logged when the copy starts, as its end is known by then."""

    is_out: bool
    variable: int
    chunks: int
    is_planned: bool  # else on demand
    start: float
    end: float


class Held(NamedTuple):
    """The memory that is taken, in chunks, from the time `start` until the next event of this kind."""

    start: float
    chunks: int


Event = Run | Stall | Copy | Held


@dataclass(frozen=True)
class Events:
    """One iteration, in seconds since it began. A copy may have begun before it (start < 0), or outlast it."""

    seconds: float
    runs: tuple[Run, ...]  # [n]
    stalls: tuple[Stall, ...]
    copies: tuple[Copy, ...]  # by start; variables as numbered in this iteration, -1 if freed with the one before
    held: tuple[Held, ...]  # by start
