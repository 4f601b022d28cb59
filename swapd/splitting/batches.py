"""Uneven batches over unlike devices, chosen so that the slowest device is done soonest (micro-cuDNN, section III-E).

    min  max over devices g of  sum over b of t_gb x_gb
    subject to  sum over b of x_gb <= 1 for every device g,   sum over g, b of b x_gb = B,   x_gb in {0, 1}

A device with no x_gb = 1 does not take part. The paper gives the programme to an integer solver; the largest of two
times is monotone in both, so a dynamic programme over the devices solves it exactly. O(G B S) for G devices and
S sizes, in vectors of length B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swapd.splitting.limits import UnreachableBatchError


@dataclass(frozen=True)
class LinearTime:
    """A device whose time grows by the same with every sample."""

    fixed_seconds: float
    sample_seconds: float
    largest: int | None = None  # samples that fit into its memory; None if any number does

    def table(self, batch: int, step: int = 1) -> dict[int, float]:
        """Seconds by batch size, for the multiples of `step` up to `batch`."""
        most = batch if self.largest is None else min(batch, self.largest)
        return {size: self.fixed_seconds + self.sample_seconds * size for size in range(step, most + 1, step)}


@dataclass(frozen=True)
class BatchDivision:
    """A batch size for each device, 0 for one that does not take part."""

    batches: dict[str, int]
    seconds: dict[str, float]  # of each device; 0 for one that does not take part

    @property
    def slowest_seconds(self) -> float:
        """The time of the slowest device, which was minimised."""
        return max(self.seconds.values(), default=0.0)


def best_batch_size(
    batch: int, times: Mapping[str, Mapping[int, float] | LinearTime], step: int = 1, *, everyone: bool = False
) -> BatchDivision:
    """Find sizes that add up to `batch` with the least time of the slowest device, and of those the least time in all.

    Args:
        batch: B, samples in all.
        times: for each device, seconds of a forward and backward pass by batch size, for the sizes that the device may
            get (it may get 0 anyway, unless `everyone`); or a linear model. Times need not grow with the size.
        step: devices get only multiples of it.
        everyone: no device may stay out.

    Raises:
        UnreachableBatchError: no sizes of these devices add up to the batch.
        ValueError: there are no devices; the batch, the step or a size is below 1; a time is negative or not finite.
    """
    if batch < 1 or step < 1 or not times:
        raise ValueError(f"a batch of {batch} in steps of {step} over {len(times)} devices: each is at least 1")
    tables = {name: _checked_table(name, given, batch, step, everyone) for name, given in times.items()}
    slowest = _assign(batch, tables, np.maximum)
    if slowest is None:
        raise _unreachable(batch, times, step, everyone)
    most = max((tables[name][size] for name, size in slowest.items()), default=0.0)
    allowed = {name: {b: t for b, t in table.items() if t <= most} for name, table in tables.items()}
    batches = _assign(batch, allowed, np.add)
    assert batches is not None  # the sizes just found are allowed
    return BatchDivision(batches, {name: tables[name][size] for name, size in batches.items()})


def _checked_table(
    name: str, given: Mapping[int, float] | LinearTime, batch: int, step: int, everyone: bool
) -> dict[int, float]:
    table = given.table(batch, step) if isinstance(given, LinearTime) else dict(given)
    for size, seconds in table.items():
        if size < 1 or not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{name}: {seconds} seconds for a batch of {size}")
    usable = {size: seconds for size, seconds in table.items() if size <= batch and size % step == 0}
    return usable if everyone else {0: 0.0} | usable


def _assign(batch: int, tables: Mapping[str, Mapping[int, float]], joined: np.ufunc) -> dict[str, int] | None:
    """The sizes that add up to `batch` with the least joined time; None if no sizes add up to it."""
    best = np.full(batch + 1, np.inf)  # joined time of the devices so far, by samples in all
    best[0] = 0.0
    chosen = []  # for each device: its size, by samples in all
    for table in tables.values():
        now = np.full(batch + 1, np.inf)
        sizes = np.zeros(batch + 1, dtype=np.int64)
        for size, seconds in table.items():
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


def _unreachable(
    batch: int, times: Mapping[str, Mapping[int, float] | LinearTime], step: int, everyone: bool
) -> UnreachableBatchError:
    """The error, which says which batches near this one the devices do reach."""
    reached = {0}
    for name, given in times.items():
        most = 2 * batch if isinstance(given, LinearTime) else max(given, default=0)
        table = _checked_table(name, given, most, step, everyone)
        reached = {total + size for total in reached for size in table}
    below = max((total for total in reached if 0 < total < batch), default=None)
    above = min((total for total in reached if total > batch), default=None)
    return UnreachableBatchError(f"{len(times)} devices in steps of {step}", batch, below, above)
