"""Micro-batches of one kernel: its fastest division under a limit, and its desirable ones (micro-cuDNN, section III).

    T_w(0) = 0,  T_w(b) = min over measurements of m <= b samples with a workspace of at most w of  T_mu + T_w(b - m)

WR (section III-B) is T_w(B) for the kernel's own limit w. The desirable configurations (section III-C1), of which no
other is both faster and smaller, are those of the workspaces w where T_w(B) falls: a workspace is the largest of its
parts', so every w has such a recurrence of its own. O(B R L) for R measurements and L workspaces, in vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError

ROUNDING = 1e-12  # relative: the same time summed in another order is no gain


def fastest_division(table: KernelTable, limit_bytes: int) -> Configuration:
    """WR: the configuration of least time with a workspace of at most `limit_bytes`.

    Among equally fast ones it is one of the fewest parts, while a front has the smallest. Its parts are ordered from
    the largest to the smallest. Errors are as in `pareto_front`.
    """
    pareto_front(table, limit_bytes)
    return _fastest_within(table, [limit_bytes])[0]


def smallest_division(table: KernelTable) -> Configuration:
    """The fastest of the configurations with the smallest workspace. Raises UnreachableBatchError if there is none."""
    return desirable(table)[0]


def pareto_front(table: KernelTable, limit_bytes: int) -> tuple[Configuration, ...]:
    """C(B): the desirable configurations with a workspace of at most `limit_bytes`, from the smallest to the fastest.

    Raises:
        LimitTooSmallError: no division fits.
        UnreachableBatchError: the measured sizes do not add up to the batch.
    """
    front = desirable(table)
    if front[0].workspace_bytes > limit_bytes:
        raise LimitTooSmallError(table.name, limit_bytes, front[0].workspace_bytes)
    return tuple(configuration for configuration in front if configuration.workspace_bytes <= limit_bytes)


@lru_cache  # layers of a network often have the same measurements
def desirable(table: KernelTable) -> tuple[Configuration, ...]:
    """The desirable configurations of any workspace. Raises UnreachableBatchError if there is none."""
    found = _fastest_within(table, sorted({row.workspace_bytes for row in table.rows}))
    if found:
        return tuple(found)
    reached = {0}
    for b in range(1, 2 * table.batch + 1):  # a multiple of each size lies above the batch
        if any(b - row.batch in reached for row in table.rows):
            reached.add(b)
    raise UnreachableBatchError(table.name, table.batch, reached)


def _fastest_within(table: KernelTable, limits: Sequence[int]) -> list[Configuration]:
    """The fastest division within each of the ascending limits, where it is faster than within the one before."""
    rows = sorted(table.rows, key=lambda row: (-row.batch, row.workspace_bytes))  # of equals the first is chosen
    batches = np.array([row.batch for row in rows], dtype=np.int64)
    fits = np.array([row.workspace_bytes for row in rows], dtype=np.int64)[:, None] <= np.array(limits, dtype=np.int64)
    micro = np.where(fits, np.array([row.seconds for row in rows])[:, None], np.inf)
    shape = (table.batch + 1, len(limits))
    seconds, parts, chosen = np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    seconds[0] = 0.0
    for b in range(1, table.batch + 1):
        usable = np.flatnonzero(batches <= b)
        if len(usable):
            rest = b - batches[usable]
            sums = micro[usable] + seconds[rest]
            seconds[b] = sums.min(axis=0)
            fewest = np.where(sums == seconds[b], parts[rest], table.batch).argmin(axis=0)
            chosen[b] = usable[fewest]
            parts[b] = parts[b - batches[chosen[b]], np.arange(len(limits))] + 1
    found: list[Configuration] = []
    least = np.inf
    for at, total in enumerate(seconds[table.batch]):
        if total < least * (1 - ROUNDING):
            least, left, division = total, table.batch, []
            while left:
                division.append(rows[chosen[left, at]])
                left -= division[-1].batch
            found.append(Configuration(tuple(sorted(division, key=lambda part: (-part.batch, part.algorithm)))))
    return found
