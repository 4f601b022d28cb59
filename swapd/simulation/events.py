"""What a simulated machine does: in all, and event by event, for pictures and Perfetto traces."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    bytes: int
    is_planned: bool  # else on demand
    start: float
    end: float
    mask: int = 0  # which of the variable's chunks: bit c is chunk c


class Lost(NamedTuple):
    """A variable is freed at the time `start` whose chunks of `mask`, a bit for each, were on the host alone."""

    variable: int
    mask: int
    start: float


class Held(NamedTuple):
    """The memory that is taken, in chunks, from the time `start` until the next event of this kind."""

    start: float
    chunks: int


Event = Run | Stall | Copy | Held | Lost


@dataclass(frozen=True)
class Events:
    """One iteration, in seconds since it began. A copy may have begun before it (start < 0), or outlast it."""

    seconds: float
    runs: tuple[Run, ...]  # [n]
    stalls: tuple[Stall, ...]
    copies: tuple[Copy, ...]  # by start; variables as numbered in this iteration, -1 if freed with the one before
    held: tuple[Held, ...]  # by start
    lost: tuple[Lost, ...] = ()  # by start


@dataclass
class SimulationResult:
    """What one iteration of the steady state does."""

    seconds: float = 0.0  # from the end of the iteration before to the end of this one
    compute_seconds: float = 0.0
    stall_seconds: float = 0.0  # seconds - compute_seconds
    out_bytes: int = 0  # copied to the host
    write_back_bytes: int = 0  # the part of `out_bytes` that was copied ahead of leaving
    in_bytes: int = 0  # copied to the device
    dropped_bytes: int = 0  # left clean, without a copy
    out_count: int = 0
    in_count: int = 0
    demand_in_count: int = 0  # swap-ins that no plan asked for
    demand_out_count: int = 0  # swap-outs and drops that no plan asked for
    peak_chunks: int = 0  # most chunks held while a function runs
    average_chunks: float = 0.0
    starts: list[float] = field(default_factory=list)  # [n] when each function starts
    stall_by_function: dict[int, float] = field(default_factory=dict)  # seconds that it waited
    stall_by_variable: dict[int, float] = field(default_factory=dict)  # by what was waited for last; -1 is room
