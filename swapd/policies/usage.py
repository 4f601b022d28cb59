"""Usage: a number for each function of the iteration. Amounts are added, and maxima found, over stretches of functions.

Stretches are in the coordinates of `intervals`: functions of the iteration before are negative, and wrap around. Plain
arrays take time in proportion to the stretch, which is fastest up to some ten thousand functions. Beyond that,
`BlockUsage` keeps an amount to add and the maximum for each block, so that a stretch costs the work of two blocks, and
of one number for each block between them. Both give the same answers, so plans do not depend on which one is used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

BLOCKS_FROM = 20_000  # functions
BLOCK = 512
_LEAST = np.iinfo(np.int64).min // 2  # of the entries behind the last function


def make_usage(values: Counts) -> Usage:
    """A usage that begins with a copy of `values`, in the form that is fastest for so many of them."""
    return Usage(values.copy()) if len(values) < BLOCKS_FROM else BlockUsage(values)


class Usage:
    """The numbers in a plain array."""

    def __init__(self, values: Counts) -> None:
        self.n = len(values)
        self.values = values

    def add(self, start: int, stop: int, amount: int) -> None:
        """Add `amount` over the functions `start` to `stop` - 1."""
        if start < 0:
            self._add(self.n + start, self.n + min(stop, 0), amount)
        if stop > 0:
            self._add(max(start, 0), stop, amount)

    def highest(self, start: int, stop: int) -> int:
        """The maximum over the functions `start` to `stop` - 1, of which there must be one."""
        if start >= 0:
            return self._highest(start, stop)
        before = self._highest(self.n + start, self.n + min(stop, 0))
        return max(before, self._highest(0, stop)) if stop > 0 else before

    def last_above(self, start: int, stop: int, level: int) -> int | None:
        """The last of the functions `start` to `stop` - 1 with more than `level`; None when there is none."""
        if stop > 0:
            low = max(start, 0)
            found = self._last_above(low, stop, level)
            if found is not None:
                return found
        if start < 0:
            found = self._last_above(self.n + start, self.n, level)
            if found is not None:
                return found - self.n
        return None

    def array(self) -> Counts:
        """All numbers, in the order of the functions."""
        return self.values

    def _add(self, start: int, stop: int, amount: int) -> None:
        self.values[start:stop] += amount

    def _highest(self, start: int, stop: int) -> int:
        return int(self.values[start:stop].max())

    def _last_above(self, start: int, stop: int, level: int) -> int | None:
        above = (self.values[start:stop] > level).nonzero()[0]
        return start + int(above[-1]) if len(above) else None

    def first_of_highest(self) -> int:
        """The first function that has the maximum of all numbers."""
        return int(self.values.argmax())

    def at(self, function: int) -> int:
        """The number of one function."""
        return int(self.values[function])


class BlockUsage(Usage):
    """The numbers in blocks. Invariant: ``tops[b]`` is the maximum of the values of block b, plus ``adds[b]``."""

    def __init__(self, values: Counts) -> None:
        count = -(-len(values) // BLOCK)
        padded = np.full(count * BLOCK, _LEAST, np.int64)
        padded[: len(values)] = values
        super().__init__(padded)
        self.n = len(values)
        self.adds = np.zeros(count, np.int64)
        self.tops: Counts = padded.reshape(count, BLOCK).max(axis=1)

    def array(self) -> Counts:
        whole: Counts = (self.values.reshape(-1, BLOCK) + self.adds[:, None]).reshape(-1)[: self.n]
        return whole

    def at(self, function: int) -> int:
        return int(self.values[function] + self.adds[function // BLOCK])

    def first_of_highest(self) -> int:
        block = int(self.tops.argmax())
        return block * BLOCK + int(self.values[block * BLOCK : (block + 1) * BLOCK].argmax())

    def _add(self, start: int, stop: int, amount: int) -> None:
        if stop <= start:
            return
        first, last = start // BLOCK, (stop - 1) // BLOCK
        for block in {first, last}:
            low = block * BLOCK
            self.values[start if block == first else low : stop if block == last else low + BLOCK] += amount
            self.tops[block] = self.values[low : low + BLOCK].max() + self.adds[block]
        if first + 1 < last:
            self.adds[first + 1 : last] += amount
            self.tops[first + 1 : last] += amount

    def _highest(self, start: int, stop: int) -> int:
        first, last = start // BLOCK, (stop - 1) // BLOCK
        found = int(self.tops[first + 1 : last].max()) if first + 1 < last else _LEAST
        for block in {first, last}:
            low = block * BLOCK
            found = max(found, int(self.values[max(start, low) : min(stop, low + BLOCK)].max() + self.adds[block]))
        return found

    def _last_above(self, start: int, stop: int, level: int) -> int | None:
        first = start // BLOCK
        above = np.flatnonzero(self.tops[first : -(-stop // BLOCK)] > level)
        for block in (first + above[::-1]).tolist():
            low = block * BLOCK
            within = max(start, low), min(stop, low + BLOCK)
            found = super()._last_above(*within, level - int(self.adds[block]))
            if found is not None:
                return found
        return None
