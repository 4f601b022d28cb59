"""Result: what the simulator reports."""

from __future__ import annotations

from dataclasses import dataclass, field


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
