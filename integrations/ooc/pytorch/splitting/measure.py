"""Measured costs: how long an algorithm takes for a micro-batch, and what workspace it takes (micro-cuDNN, III-B).

Times are medians of repetitions after a warm-up. A workspace is the most bytes that our own allocator saw live at once
while the kernel ran, small allocations too, beyond the kernel's operands and its result. So this needs a session, as
the running program has one (fast.py), or a process of its own with room enough that nothing moves
(`ooc.enable(alloc="emulated")`). Everything goes to the store, and what is there is not measured again.

A size below the batch is measured as a part, which is written into its place in a larger result. The batch itself is
measured with a result of its own; the algorithm's name then ends with "whole".

Not everything is measured. The rules depend only on what is known, so a second run leaves out the same:

- an algorithm at a size for which its estimated workspace, or its workspace at the two sizes before, is above
  `largest_bytes` (at one size it may be that of another kernel: PyTorch takes one of its own for single samples)
- an algorithm that, without less workspace, took more than `HOPELESS` times as long as another for the two sizes
  before, or more than `HOPELESS_AT_ONCE` times as long for one
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ooc.pytorch.splitting import conditions
from ooc.pytorch.splitting.kernels import BACKWARD_FILTER, CPU, Algorithm, Kernel, result_like
from ooc.pytorch.splitting.verification import tensors_in
from swapd.splitting.configurations import KernelTable, MicroConfiguration, micro_batch_sizes
from swapd.splitting.store import Key, Store

HOPELESS, HOPELESS_AT_ONCE = 3.0, 10.0
MOST_SIZES = 32  # of the policy `all`
WHOLE = " whole"


class MeasureError(RuntimeError):
    """Nothing can be measured here; the message says what is missing."""


@dataclass(frozen=True)
class Effort:
    """How often a kernel is run: until `least` runs and `seconds` are reached, but at most `most` times."""

    least: int = 3
    seconds: float = 0.1
    most: int = 9


def measured_sizes(policy: str, batch: int, most: int = MOST_SIZES) -> tuple[int, ...]:
    """The sizes of a policy, ascending. `all` has at most `most`: powers of two, the batch, and others evenly between.

    Raises:
        ValueError: there is no such policy.
    """
    sizes = micro_batch_sizes(policy, batch)
    if len(sizes) <= most:
        return sizes
    kept = set(micro_batch_sizes("powerOfTwo", batch))
    for size in np.linspace(1, batch, most).round().astype(int):
        if len(kept) >= most:
            break
        kept.add(int(size))
    return tuple(sorted(kept))


class Measurer:
    """Fills tables of kernels from the store, and measures what is missing.

    Args:
        store: where measurements are kept.
        measures: there is a session in this process; else costs are only looked up.
        largest_bytes: workspaces beyond it are of no interest.
        algorithms: the candidates.
    """

    def __init__(
        self,
        store: Store,
        *,
        measures: bool = False,
        largest_bytes: int = 1 << 29,
        effort: Effort | None = None,
        algorithms: Sequence[Algorithm] = tuple(CPU.values()),
    ) -> None:
        self.store = store
        self.measures = measures
        self.largest_bytes = largest_bytes
        self.effort = effort or Effort()
        self.algorithms = tuple(algorithms)
        self.measurements = 0  # made by this object
        self.rows: list[MicroConfiguration] = []  # of all tables, measured or known

    def key(self, kernel: Kernel) -> Key:
        """The store's key for a kernel's costs. It has no batch size, so all batches use the same measurements."""
        return conditions.key(f"convolution {kernel.kind}", str(kernel.convolution))

    def table(
        self,
        kernel: Kernel,
        batch: int,
        policy: str = "all",
        name: str | None = None,
        operands: tuple[Tensor, Tensor] | None = None,
    ) -> KernelTable:
        """What is known of a kernel for a batch of `batch` samples, after measuring what is not known.

        `operands` of the whole batch are used for that; by default random ones are made.

        Raises:
            MeasureError: something has to be measured, and there is no session.
        """
        known = {(row.algorithm, row.batch): row for row in self.store.cost(self.key(kernel)) or []}
        found: list[MicroConfiguration] = []
        for size in measured_sizes(policy, batch):
            for algorithm in self.algorithms:
                if not algorithm.suits(kernel) or self._left_out(kernel, algorithm, size, found):
                    continue
                label = algorithm.name + (WHOLE if size == batch else "")
                row = known.get((label, size))
                if row is None:
                    row = self._measure(kernel, algorithm, size, batch, operands)
                    if row is None:
                        continue
                    self.store.put_cost(self.key(kernel), [row])
                found.append(row)
        self.rows += found
        rows = tuple(replace(row, algorithm=row.algorithm.removesuffix(WHOLE)) for row in found)
        return KernelTable(name or f"{kernel.convolution} {kernel.kind}", batch, rows)

    def _left_out(self, kernel: Kernel, algorithm: Algorithm, size: int, found: list[MicroConfiguration]) -> bool:
        if algorithm.workspace_bytes(kernel, size) > self.largest_bytes:
            return True
        earlier = [row for row in found if row.algorithm == algorithm.name]
        if len(earlier) >= 2 and all(row.workspace_bytes > self.largest_bytes for row in earlier[-2:]):
            return True
        if any(_is_hopeless(row, found, HOPELESS_AT_ONCE) for row in earlier):
            return True
        return len(earlier) >= 2 and all(_is_hopeless(row, found, HOPELESS) for row in earlier[-2:])

    def _measure(
        self, kernel: Kernel, algorithm: Algorithm, size: int, batch: int, given: tuple[Tensor, Tensor] | None
    ) -> MicroConfiguration | None:
        """Measures an algorithm at one size. Returns None if it does not fit into the budget of this process."""
        if not self.measures:
            raise MeasureError(
                f"{kernel.convolution}, {kernel.kind}: {size} samples by {algorithm.name} are not measured"
            )
        try:
            operands = given or kernel.operands(batch, torch.Generator().manual_seed(0))
            call = _in_turns(kernel, algorithm, size, batch, operands)
            workspace = workspace_bytes(call)
            median, spread = timed(call, self.effort)
        except torch.OutOfMemoryError:
            return None
        self.measurements += 1
        return MicroConfiguration(size, algorithm.name + (WHOLE if size == batch else ""), median, workspace, spread)


def _in_turns(
    kernel: Kernel, algorithm: Algorithm, size: int, batch: int, operands: tuple[Tensor, Tensor]
) -> Callable[[], Any]:
    """A call that computes one part, each time the next one: data that were just used may still be in the cache."""
    if size == batch:
        return lambda: algorithm.whole(kernel, *operands)
    add = kernel.kind == BACKWARD_FILTER
    result = result_like(kernel, batch).zero_()
    begins = itertools.cycle(range(0, batch - size + 1, size))

    def call() -> None:
        begin = next(begins)
        target = result if add else result[begin : begin + size]
        algorithm.into(kernel, *kernel.part(operands, begin, begin + size), target, add)

    return call


def _is_hopeless(row: MicroConfiguration, found: Sequence[MicroConfiguration], times: float) -> bool:
    return any(
        other.batch == row.batch
        and other.seconds * times < row.seconds
        and other.workspace_bytes <= row.workspace_bytes
        for other in found
    )


def workspace_bytes(call: Callable[[], Any]) -> int:
    """What `live_during` measures in the second of two calls."""
    call()  # what a library keeps from its first call on is no workspace
    return live_during(call)


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
