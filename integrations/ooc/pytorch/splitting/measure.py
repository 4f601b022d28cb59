"""Measured costs: how long an algorithm takes for a micro-batch, and what workspace it takes (micro-cuDNN, III-B).

Times are medians of repetitions after a warm-up. A workspace is the most bytes that our own allocator saw live at once
while the kernel ran, small allocations too, beyond the kernel's operands and its result. So this needs a session, as
the running program has one (fast.py), or a process of its own with room enough that nothing moves
(`ooc.enable(alloc="emulated")`). Everything goes to the store, and what is there is not measured again.

A size below the batch is measured as a part, which is written into its place in a larger result. The batch itself is
measured with a result of its own; the algorithm's name then ends with "whole".

Not everything is measured (docs/splitting.md). The rules depend only on what is known, so a second run leaves out the
same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ooc.pytorch.splitting import conditions
from ooc.pytorch.splitting.kernels import AS_SEVERAL, CPU, IN_BLOCKS, STRIPS, SUMMED, Algorithm, Kernel, MicroBatches
from ooc.pytorch.splitting.verification import tensors_in
from swapd.splitting.configurations import KernelTable, MicroConfiguration, micro_batch_sizes
from swapd.splitting.store import Store

HOPELESS = 3.0
MOST_SIZES = 32  # of the policy `all`, beside powers of two
WHOLE = " whole"


@dataclass(frozen=True)
class Effort:
    """How often a kernel is run: until `least` runs and `seconds` are reached, but at most `most` times."""

    least: int = 3
    seconds: float = 0.1
    most: int = 9


def measured_sizes(policy: str, batch: int) -> tuple[int, ...]:
    """The sizes of a policy, ascending; of `all` the powers of two, others evenly. Raises ValueError for another."""
    sizes = micro_batch_sizes(policy, batch)
    if len(sizes) <= MOST_SIZES:
        return sizes
    evenly = np.linspace(1, batch, MOST_SIZES).round().astype(int).tolist()
    return tuple(sorted({*evenly, *micro_batch_sizes("powerOfTwo", batch)}))


class Measurer:
    """Fills tables of kernels from the store, and measures what is missing.

    Args:
        store: where measurements are kept.
        largest_bytes: workspaces beyond it are of no interest.
    """

    def __init__(self, store: Store, largest_bytes: int = 1 << 29, effort: Effort | None = None) -> None:
        self.store = store
        self.largest_bytes = largest_bytes
        self.effort = effort or Effort()
        self.algorithms: Sequence[Algorithm] = tuple(CPU.values())
        self.measurements = 0  # made by this object

    def table(self, kernel: Kernel, policy: str = "all") -> KernelTable:
        """What is known of a kernel for its samples, after measuring what is not known.

        The store's key has no batch size, so all batches use the same measurements.
        """
        key = conditions.key(f"convolution {kernel.kind}", kernel.shapes)
        batch = kernel.samples.length
        known = {(row.algorithm, row.batch): row for row in self.store.cost(key) or []}
        found: list[MicroConfiguration] = []
        for size in measured_sizes(policy, batch):
            for algorithm in self.algorithms:
                if not algorithm.suits(kernel) or self._left_out(kernel, algorithm, size, found):
                    continue
                label = algorithm.name + (WHOLE if size == batch else "")
                row = known.get((label, size))
                if row is None:
                    cost = self._measure(kernel, algorithm, size)
                    if cost is None:
                        continue
                    row = MicroConfiguration(size, label, *cost)
                    self.measurements += 1
                    self.store.put_cost(key, [row])
                found.append(replace(row, algorithm=algorithm.name))
        return KernelTable(f"{kernel.kind} {kernel.shapes}", batch, tuple(found))

    def _left_out(self, kernel: Kernel, algorithm: Algorithm, size: int, found: list[MicroConfiguration]) -> bool:
        alike = {"own"}.union(*({each.name for each in group} for group in (IN_BLOCKS, SUMMED) if algorithm in group))
        fits = {row.algorithm for row in found if row.batch == size and row.workspace_bytes <= self.largest_bytes}
        ever_fits = any(row.workspace_bytes <= self.largest_bytes for row in found)
        needless = (algorithm is AS_SEVERAL and size > 1) or (algorithm in STRIPS and ever_fits)
        if needless or (algorithm.name != "own" and algorithm.name in alike and fits & alike):
            return True
        earlier = [row for row in found if row.algorithm == algorithm.name][-2:]
        alone = kernel.samples.sums and size == kernel.samples.length  # it is added to nothing
        too_large = not alone and all(row.workspace_bytes > self.largest_bytes for row in earlier)
        hopeless = all(any(_makes_hopeless(other, row) for other in found) for row in earlier)
        return len(earlier) == 2 and (too_large or hopeless)

    def _measure(self, kernel: Kernel, algorithm: Algorithm, size: int) -> tuple[float, int, float] | None:
        """Seconds, workspace in bytes, and spread of an algorithm at one size; None if it does not fit the budget."""
        try:
            call = _in_turns(kernel, algorithm, size)
            call()  # what a library keeps from its first call on is no workspace
            workspace = live_during(call)
            median, spread = timed(call, self.effort)
        except torch.OutOfMemoryError:
            return None
        return median, workspace, spread


def _in_turns(kernel: Kernel, algorithm: Algorithm, size: int) -> Callable[[], Any]:
    """A call that computes one part, each time the next one: data that were just used may still be in the cache."""
    if size == kernel.samples.length:
        return lambda: algorithm(**kernel.named)
    number = kernel.samples.length // size
    parts, made = MicroBatches(kernel, [(size, algorithm)] * number), list[Any]()
    numbers = itertools.cycle(range(number))
    return lambda: parts.some(kernel.named, made, [next(numbers)])


def _makes_hopeless(other: MicroConfiguration, row: MicroConfiguration) -> bool:
    faster = other.batch == row.batch and other.seconds * HOPELESS < row.seconds
    return faster and other.workspace_bytes <= row.workspace_bytes


def live_during(call: Callable[[], Any]) -> int:
    """The most bytes that were live at once during a call, beyond those before it and those of its results."""
    torch.ops.ooc.watch_live()
    try:
        own = sum(tensor.nbytes for tensor in tensors_in(call()))
    finally:
        peak = int(torch.ops.ooc.watched_live())
    return max(peak - own, 0)


def timed(call: Callable[[], Any], effort: Effort) -> tuple[float, float]:
    """Median and interquartile range, in seconds, of a call that was made before."""
    seconds: list[float] = []
    while len(seconds) < effort.least or (sum(seconds) < effort.seconds and len(seconds) < effort.most):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return float(middle), float(high - low)
