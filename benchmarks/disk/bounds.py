"""What a step takes at least with a disk, whatever moves when: the lower bound of the recorded program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from swapd.planning.lower_bound import lower_bound
from swapd.planning.problem import Problem
from swapd.trace.trace import Machine, Trace

BOUNDS = "bounds"
_SAME_STEP = 1.25  # a recorded iteration that takes so many times as long as a step, or as short, is something else


def rates_of(disk: dict[str, Any]) -> tuple[float, float]:
    """Bytes a second of reads and writes at once, as measured, and never more than the disk is held to."""
    read, written = (float(disk[f"{way}_bytes_per_second"]) for way in ("read", "write"))
    held = float(disk.get("held") or max(read, written))
    return min(read, held), min(written, held)


def proved_seconds(
    trace: Path, in_core_seconds: float, budget_bytes: int, chunk_bytes: int, disk: dict[str, Any]
) -> float | None:
    """Seconds that no schedule of copies beats, for our budget and chunks (docs/lower-bound.md).

    The trace was recorded in-core with our recorder; its times are scaled to a step of plain PyTorch, so the figure is
    as good as times are the same share of a step in both, some 2%. None if the recorded iteration is no step.
    """
    read, written = rates_of(disk)
    machine = Machine(out_bytes_per_second=written, in_bytes_per_second=read)
    problem = Problem.from_trace(Trace.load(trace), budget_bytes, chunk_bytes=chunk_bytes, machine=machine)
    scale = in_core_seconds / problem.compute_seconds
    if not 1 / _SAME_STEP <= scale <= _SAME_STEP:
        return None
    return lower_bound(replace(problem, seconds=problem.seconds * scale))
