"""Uneven batches over unlike devices, chosen so that the slowest device is done soonest (micro-cuDNN, section III-E).

    min  max over devices g of  sum over b of t_gb x_gb
    subject to  sum over b of x_gb <= 1 for every device g,   sum over g, b of b x_gb = B,   x_gb in {0, 1}

A device with no x_gb = 1 does not take part: here it has a size of 0. The paper gives the programme to an integer
solver; the largest of two times is monotone in both, so a dynamic programme over the devices solves it exactly.
O(G B S) for G devices and S sizes, in vectors of length B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from swapd.splitting.limits import UnreachableBatchError


def best_batch_size(batch: int, times: Mapping[str, Mapping[int, float]]) -> dict[str, int]:
    """Find sizes that add up to `batch` with the least time of the slowest device, and of those the least time in all.

    Args:
        batch: B, samples in all.
        times: for each device, seconds of a forward and backward pass by batch size, for the sizes that the device may
            get. They need not grow with the size. A device that may stay out has the size 0, with 0 seconds.

    Raises:
        UnreachableBatchError: no sizes of these devices add up to the batch.
        ValueError: there are no devices; the batch is below 1; a size or a time is negative, or a time not finite.
    """
    if batch < 1 or not times:
        raise ValueError(f"a batch of {batch} over {len(times)} devices: each is at least 1")
    for name, table in times.items():
        for size, seconds in table.items():
            if size < 0 or not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name}: {seconds} seconds for a batch of {size}")
    slowest = _assign(batch, times, np.maximum)
    if slowest is None:
        reached = {0}
        for table in times.values():
            reached = {total + size for total in reached for size in table}
        raise UnreachableBatchError(f"{len(times)} devices", batch, reached)
    most = max(times[name][size] for name, size in slowest.items())
    allowed = {name: {b: t for b, t in table.items() if t <= most} for name, table in times.items()}
    batches = _assign(batch, allowed, np.add)
    assert batches is not None  # the sizes just found are allowed
    return batches


def _assign(batch: int, tables: Mapping[str, Mapping[int, float]], joined: np.ufunc) -> dict[str, int] | None:
    """The sizes that add up to `batch` with the least joined time; None if no sizes add up to it."""
    best = np.full(batch + 1, np.inf)  # joined time of the devices so far, by samples in all
    best[0] = 0.0
    chosen = []  # for each device: its size, by samples in all
    for table in tables.values():
        now = np.full(batch + 1, np.inf)
        sizes = np.zeros(batch + 1, dtype=np.int64)
        for size, seconds in table.items():
            if size > batch:
                continue
            cost = joined(best[: batch + 1 - size], seconds)
            better = cost < now[size:]
            now[size:][better] = cost[better]
            sizes[size:][better] = size
        best = now
        chosen.append(sizes)
    if not np.isfinite(best[batch]):
        return None
    batches: dict[str, int] = {}
    left = batch
    for name, sizes in zip(reversed(list(tables)), reversed(chosen)):
        batches[name] = int(sizes[left])
        left -= batches[name]
    return {name: batches[name] for name in tables}
