"""The desirable configurations of one kernel: no other is both faster and smaller (micro-cuDNN, section III-C1).

    C(b) = D( union over m, over c_mu in C_mu(m), over c in C(b - m), of {c_mu} + c )

D is the pruning. C(b) is kept here as a function: from a workspace to the least time within it. The function has a step
where C(b) has a configuration, so taking the minimum for every workspace does the union and the pruning at once.
O(B S L) for S sizes and L different workspaces, in vectors of length L.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.reuse import smallest_workspace_bytes

C = TypeVar("C", Configuration, MicroConfiguration)  # what has a time and a workspace
ROUNDING = 1e-12  # relative: the same time summed in another order is no gain


def desirable(configurations: Iterable[C]) -> tuple[C, ...]:
    """D(C): those that nothing beats, from the smallest and slowest to the largest and fastest.

    The paper's formula compares a configuration with itself too, and with its equals, and would keep neither; here the
    first of several with the same time and workspace stays.
    """
    kept: list[C] = []
    for candidate in sorted(configurations, key=lambda c: (c.workspace_bytes, c.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds:
            kept.append(candidate)
    return tuple(kept)


def pareto_front(table: KernelTable, limit_bytes: int | None = None, policy: str = "all") -> tuple[Configuration, ...]:
    """C(B): the desirable configurations with a workspace of at most `limit_bytes` (None: any), smallest first.

    Each is the fastest within its own workspace, so the last is what `reuse.fastest_division` finds for the limit.

    Raises:
        LimitTooSmallError: no division fits.
        UnreachableBatchError: the measured sizes do not add up to the batch.
        ValueError: an unknown policy.
    """
    table = table.restricted(policy)
    smallest = smallest_workspace_bytes(table)
    if limit_bytes is not None and limit_bytes < smallest:
        raise LimitTooSmallError(table.name, limit_bytes, smallest)
    fitting = [row for row in table.rows if limit_bytes is None or row.workspace_bytes <= limit_bytes]
    fronts = {size: desirable(row for row in fitting if row.batch == size) for size in {row.batch for row in fitting}}
    levels = sorted({row.workspace_bytes for front in fronts.values() for row in front} | {smallest})
    return _Recurrence(fronts, np.array(levels, dtype=np.int64), table.batch).front(smallest)


class _Recurrence:
    """T[b, l], the least time of b samples within the workspace of level l, and the size that achieved it."""

    def __init__(
        self, fronts: dict[int, tuple[MicroConfiguration, ...]], levels: NDArray[np.int64], batch: int
    ) -> None:
        self.fronts = fronts
        self.levels = levels
        self.batch = batch
        self.sizes = np.array(sorted(fronts, reverse=True), dtype=np.int64)  # of equals the largest part is chosen
        micro = np.full((len(self.sizes), len(levels)), np.inf)  # C_mu as functions of the workspace
        for i, size in enumerate(self.sizes):
            for row in fronts[int(size)]:
                micro[i, np.searchsorted(levels, row.workspace_bytes) :] = row.seconds
        self.seconds = np.full((batch + 1, len(levels)), np.inf)
        self.seconds[0] = 0.0
        self.chosen = np.zeros((batch + 1, len(levels)), dtype=np.int32)
        for b in range(1, batch + 1):
            usable = np.flatnonzero(self.sizes <= b)
            if len(usable):
                sums = micro[usable] + self.seconds[b - self.sizes[usable]]
                best = sums.argmin(axis=0)
                self.seconds[b] = sums[best, np.arange(len(levels))]
                self.chosen[b] = self.sizes[usable][best]

    def front(self, smallest: int) -> tuple[Configuration, ...]:
        least = self.seconds[self.batch]
        falls: list[int] = []
        for i in range(int(np.searchsorted(self.levels, smallest)), len(self.levels)):
            if not falls or least[i] < least[falls[-1]] * (1 - ROUNDING):
                falls.append(i)
        return desirable(self._read_back(i) for i in falls)

    def _read_back(self, level: int) -> Configuration:
        parts, b = [], self.batch
        while b:
            size = int(self.chosen[b, level])
            within = [row for row in self.fronts[size] if row.workspace_bytes <= self.levels[level]]
            parts.append(within[-1])  # of a front, the largest is the fastest
            b -= size
        return Configuration(tuple(sorted(parts, key=lambda part: (-part.batch, part.algorithm))))
