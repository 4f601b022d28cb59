"""The words of micro-cuDNN (Oyama et al. 2018, section III-A): what was measured, and what a batch is divided into.

A *micro-configuration* is an algorithm with a micro-batch size; a *configuration* is a list of them whose sizes add up
to the batch. Its parts run one after the other in one workspace: its time is their sum, its workspace their largest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True)
class MicroConfiguration:
    """One measurement: a micro-batch by one algorithm."""

    batch: int  # samples
    algorithm: str
    seconds: float
    workspace_bytes: int
    spread_seconds: float = field(default=0.0, compare=False)  # between its repetitions' quartiles; 0 if not known

    def __post_init__(self) -> None:
        if self.batch < 1 or self.workspace_bytes < 0 or not 0 <= self.seconds < math.inf:
            raise ValueError(f"{self} cannot have been measured")


@dataclass(frozen=True)
class Configuration:
    """A division: its parts in the order in which they run."""

    parts: tuple[MicroConfiguration, ...]

    @cached_property
    def seconds(self) -> float:
        """T(c), the same for every order of the parts."""
        return math.fsum(part.seconds for part in self.parts)

    @cached_property
    def workspace_bytes(self) -> int:
        """M(c): the parts share one workspace."""
        return max((part.workspace_bytes for part in self.parts), default=0)

    def __str__(self) -> str:
        """Such as `4 x 8 own, 2 im2col`: how many equal parts there are, with their samples and algorithm."""
        counts = Counter((part.batch, part.algorithm) for part in self.parts)
        return ", ".join(f"{n} x {size} {name}" if n > 1 else f"{size} {name}" for (size, name), n in counts.items())


@dataclass(frozen=True)
class KernelTable:
    """What was measured of one kernel: any sizes up to its batch, any algorithms, in any order."""

    name: str = field(compare=False)
    batch: int  # B: what is to be divided
    rows: tuple[MicroConfiguration, ...]

    def cautious(self) -> KernelTable:
        """The same table, in which parts take longer by their `spread_seconds`.

        The least of many measurements is a lucky one. With the longer times, a division is chosen over the whole batch
        only if it gains more than its measurements vary. micro-cuDNN differs: it takes times as they are.
        """
        later = [row.spread_seconds if row.batch < self.batch else 0.0 for row in self.rows]
        return replace(self, rows=tuple(replace(row, seconds=row.seconds + by) for row, by in zip(self.rows, later)))


def micro_batch_sizes(policy: str, batch: int) -> tuple[int, ...]:
    """The sizes to measure, ascending (section III-B).

    `powerOfTwo` ends with the batch itself, even if that is no power of two: every policy allows the whole.

    Raises:
        ValueError: there is no such policy.
    """
    if policy == "all":
        return tuple(range(1, batch + 1))
    if policy == "powerOfTwo":
        return (*(1 << exponent for exponent in range((batch - 1).bit_length())), batch)
    raise ValueError(f"there is no micro-batch policy {policy!r}; there are: all, powerOfTwo")
