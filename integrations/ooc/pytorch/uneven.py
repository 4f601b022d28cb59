"""Uneven batches over ranks of unlike speed (micro-cuDNN, Oyama et al. 2018, section III-E).

In data parallel training every rank gets the same number of samples, and all wait for the slowest. Here each rank gets
as many as let the slowest rank finish soonest, and the gradients are those of the whole batch in one process::

    division = uneven.measure(256, run)  # run(size): one forward and backward pass of this rank
    model = DistributedDataParallel(model)
    uneven.weigh_gradients(model, division)
    loader = DataLoader(dataset, batch_sampler=uneven.BatchSampler(len(dataset), division))

Each rank computes the mean loss of its own samples, as always. The sums of gradients are made in another order than in
one process, so they agree up to rounding. A layer that mixes samples (batch-norm) sees only its rank's
samples, as with equal batches.
"""

# No `from __future__ import annotations`: DistributedDataParallel wants objects as annotations of its hook.

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ooc.pytorch.batches import best_batch_size
from swapd.splitting.configurations import micro_batch_sizes

_REPETITIONS = 3


@dataclass(frozen=True)
class Division:
    """How many samples of a batch each rank gets; the sizes are the same on every rank."""

    rank: int
    sizes: tuple[int, ...]  # samples, by rank
    predicted_seconds: tuple[float, ...]  # of a forward and backward pass, by rank

    @property
    def batch(self) -> int:
        """Samples in all."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Samples of this rank."""
        return self.sizes[self.rank]

    @property
    def samples(self) -> slice:
        """Which samples of the whole batch are this rank's."""
        begin = sum(self.sizes[: self.rank])
        return slice(begin, begin + self.size)

    @property
    def weight(self) -> float:
        """The share of this rank's mean gradient in the whole batch's."""
        return self.size / self.batch


def measure(
    batch: int,
    run: Callable[[int], Any],
    *,
    sizes: Sequence[int] | None = None,
    repetitions: int = _REPETITIONS,
    step: int = 1,
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Division:
    """Times `run` on every rank and divides the batch. To be called by all ranks of the group, with equal arguments.

    Args:
        batch: samples in all, at least one a rank.
        run: makes one forward and backward pass of this rank over so many samples, without communication. It may raise
            torch.OutOfMemoryError for a size that does not fit; larger sizes are then not tried.
        sizes: the sizes to measure, by default powers of two up to the batch. Times between two sizes are
            interpolated; no rank gets more samples than the largest size that it ran.
        repetitions: timed passes of each size, after one that is not timed; the median counts.
        step: every rank gets a multiple of it.

    Raises:
        ValueError: the arguments cannot be used.
        UnreachableBatchError: the ranks cannot share the batch, because too little fits into their memory.
    """
    world = dist.get_world_size(group)
    if batch < world * step or repetitions < 1:
        raise ValueError(
            f"a batch of {batch} in steps of {step} over {world} ranks, {repetitions} repetitions: every rank gets at "
            "least one step, and is timed at least once"
        )
    tried = sorted(set(micro_batch_sizes("powerOfTwo", batch) if sizes is None else sizes))
    if not tried or tried[0] < 1:
        raise ValueError(f"sizes to measure are numbers from 1 on, not {tried}")
    mine = _times(run, tried, repetitions, clock)
    gathered: list[dict[int, float]] = [{} for _ in range(world)]
    dist.all_gather_object(gathered, mine, group=group)
    tables = {str(rank): interpolated(times, batch, step) for rank, times in enumerate(gathered)}
    found = best_batch_size(batch, tables)
    seconds = tuple(table[found[rank]] for rank, table in tables.items())
    return Division(dist.get_rank(group), tuple(found.values()), seconds)


def _times(
    run: Callable[[int], Any], sizes: Sequence[int], repetitions: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Seconds by size, for the sizes that fit."""

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock()

    def timed(size: int) -> float:
        began = now()
        run(size)
        return now() - began

    times: dict[int, float] = {}
    for size in sizes:
        try:
            run(size)
            times[size] = statistics.median(timed(size) for _ in range(repetitions))
        except torch.OutOfMemoryError:
            break
    return times


def interpolated(times: dict[int, float], batch: int, step: int = 1) -> dict[int, float]:
    """Seconds for every multiple of `step` up to the batch and the largest measured size.

    Between two measured sizes they lie on a line; below the smallest measured size they are that size's.
    """
    if not times:
        return {}
    measured = sorted(times)
    sizes = range(step, min(batch, measured[-1]) + 1, step)
    seconds = np.interp(sizes, measured, [times[size] for size in measured])
    return dict(zip(sizes, seconds.tolist()))


def weigh_gradients(
    model: nn.parallel.DistributedDataParallel, division: Division, group: dist.ProcessGroup | None = None
) -> None:
    """Makes a DistributedDataParallel add up its ranks' mean gradients by their shares of the batch.

    The model then holds the gradient of the mean loss over the whole batch. This takes the place of DDP's own average,
    and of any other communication hook (PyTorch refuses a second one).

    Raises:
        ValueError: the division is of another group.
    """
    if len(division.sizes) != dist.get_world_size(group):
        raise ValueError(
            f"the batch is divided among {len(division.sizes)} ranks, and the group has {dist.get_world_size(group)}"
        )

    def add_up(
        _: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # made in C++
    ) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer().mul_(division.weight)
        work = dist.all_reduce(gradients, group=group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, add_up)


class BatchSampler:
    """This rank's indices of each batch, for a DataLoader's `batch_sampler`. Every rank must use the same seed.

    All batches are whole: samples that fill no batch are left out of the epoch, other ones each time if shuffled.

    Raises:
        ValueError: there are fewer samples than a batch has.
    """

    def __init__(self, samples: int, division: Division, *, shuffle: bool = True, seed: int = 0) -> None:
        if samples < division.batch:
            raise ValueError(f"{samples} samples do not fill a batch of {division.batch}")
        self.samples = samples
        self.division = division
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which decides the order; call it on every rank before each, as with DistributedSampler."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.floor(self.samples / self.division.batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.samples))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator).tolist()
        for number in range(len(self)):
            batch = order[number * self.division.batch : (number + 1) * self.division.batch]
            yield batch[self.division.samples]
