"""The bound: a step time that no schedule beats if data leaves once, before the turn, and comes back once, after it.

    T >= max(C_f, S / b_out) + max(C_b, S / b_in),    S = max(0, P - M)

P is the live peak and M the capacity, both in whole chunks; the function at the peak is where the forward phase
(compute C_f, that function included) turns into the backward one (C_b). What exceeds M at the peak must have left
before it and come back after it. The bound does not know the size of single functions, so it can be out of reach
when they are large; and state that lives across iterations (weights, optimizer state) may leave in the backward
phase and come back in the forward one, so a schedule that moves mostly such state can fall below it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapd.planning.problem import Problem


@dataclass(frozen=True)
class Bound:
    """The terms of the bound."""

    forward_seconds: float  # C_f
    backward_seconds: float  # C_b
    spill_bytes: int  # S
    out_seconds: float  # S / b_out
    in_seconds: float  # S / b_in

    @property
    def seconds(self) -> float:
        """The bound itself."""
        return max(self.forward_seconds, self.out_seconds) + max(self.backward_seconds, self.in_seconds)


def bound(problem: Problem) -> Bound:
    """The bound for `problem`, which is the compute time when everything fits."""
    turn = problem.live_peak_function + 1
    spill = max(0, problem.live_peak_chunks - problem.capacity_chunks) * problem.chunk_bytes
    machine = problem.machine
    return Bound(
        forward_seconds=float(problem.seconds[:turn].sum()),
        backward_seconds=float(problem.seconds[turn:].sum()),
        spill_bytes=spill,
        out_seconds=spill / machine.out_bytes_per_second,
        in_seconds=spill / machine.in_bytes_per_second,
    )
