"""What an operator can be cut along (rows, channels, planes, heads), and into which blocks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ooc.pytorch.splitting.calls import CannotSplit
from ooc.pytorch.splitting.memory import Memory

Named = dict[str, Any]  # the arguments of a call
Where = str | int  # an argument, or a result
Span = tuple[int, int]  # of a block: its first unit, and its number of units


@dataclass(frozen=True)
class Axis:
    """Where in each tensor of a call an axis lies. Dimensions may count from the right.

    Each unit of the axis has the same number of elements in a tensor's dimension, in one tensor more than in another. A
    tensor with one element there is broadcast, and not cut.
    """

    name: str
    length: int  # units
    takes: Mapping[str, int]  # arguments that are cut: the dimension
    gives: Mapping[int, int]  # results whose parts lie one after the other: the dimension
    counts: Collection[str] = ()  # integers that grow with its length
    entries: Mapping[str, int] = field(default_factory=dict)  # lists in which one number does so: the index
    offsets: Mapping[str, int] = field(default_factory=dict)  # integers that grow so with each unit before a part
    mirrored: bool = False  # the first part of the results is made of the arguments' last units
    sums: bool = False  # results that have no part of it are sums along it
    equal: bool = False  # all blocks are of one size: the last one overlaps the one before it
    within: str = ""  # its units are those of one unit of another axis, which comes before it
    least: Sequence[int] = (1,)  # units of a block; where nothing fits with the first, the second counts, and so on

    def spans(self, units: int) -> list[Span]:
        """All blocks of so many units."""
        if self.equal and units < self.length:
            return [(min(start, self.length - units), units) for start in range(0, self.length, units)]
        return spans(self.length, units)

    def dimension(self, where: Where, tensor: Tensor) -> int | None:
        """The dimension of an argument or result that is cut, from the left; None if it is not cut.

        Raises:
            CannotSplit: the units have unlike numbers of elements.
        """
        found = self.takes.get(where) if isinstance(where, str) else self.gives.get(where)
        if found is None or not -tensor.dim() <= found < tensor.dim():
            return None
        size = tensor.shape[found]
        if size == 1 and self.length != 1:
            return None
        if size % self.length:
            raise CannotSplit(f"dimension {found} of a shape {tuple(tensor.shape)} has no {self.length} equal parts")
        return found % tensor.dim()

    def elements(self, where: Where, size: int, units: int, start: int | None = None) -> int:
        """Of the `size` elements in that dimension, those of a block; without `start`, the most of any such block."""
        return size * units // self.length

    def part(self, memory: Memory, name: str, tensor: Tensor, start: int, units: int) -> Tensor:
        """An argument's part."""
        first = self.length - start - units if self.mirrored else start
        return self.target(name, tensor, first, units)

    def numbers(self, part: Named, start: int, units: int) -> None:
        """Changes the arguments that are no tensors to those of a block."""
        for name in self.counts:
            part[name] = part[name] * units // self.length
        for name, step in self.offsets.items():
            part[name] += step * start
        for name, index in self.entries.items():
            if part[name] is not None:
                part[name] = [n * units // self.length if i == index else n for i, n in enumerate(part[name])]

    def target(self, where: Where, tensor: Tensor, start: int, units: int) -> Tensor:
        """Where in a result a block lies, or in an argument that is not mirrored."""
        found = self.dimension(where, tensor)
        if found is None:
            return tensor
        unit = tensor.shape[found] // self.length
        return tensor.narrow(found, start * unit, units * unit)

    def own(self, place: int, part: Tensor, start: int, units: int) -> Tensor:
        """What a block's operator returned, without what belongs to other blocks."""
        return part

    def check(self, name: str, part: Tensor) -> None:
        """Raises CannotSplit for an argument's part with numbers for which parts would give something else."""


# ---- grids of blocks ------------------------------------------------------------------------------------------------


def largest(total: int, multiple: int, fits: Callable[[int], bool]) -> int:
    """The largest multiple below `total` that fits as a block size; 0 if none fits. Larger blocks take more."""
    found = bisect_left(range(multiple, total, multiple), True, key=lambda size: not fits(size))
    if not found:
        return 0
    parts = -(-total // (found * multiple))
    share = -(-total // parts)  # no larger blocks than it takes to have so few
    return -(-share // multiple) * multiple


def grid(
    lengths: Sequence[int],
    floors: Sequence[Sequence[int]],
    order: Sequence[int],
    multiple: int,
    fits: Callable[[Sequence[int]], bool],
) -> tuple[int, ...] | None:
    """Block sizes for several axes. One axis after the other, in `order`, is cut until everything fits.

    Blocks are no smaller than the first of `floors` says if that suffices, else no smaller than the second says, and so
    on; at last they may be single units. Returns None if single units do not fit.
    """
    chosen = list(lengths)
    for least in (*floors, [1] * len(lengths)):
        for axis in order:
            if fits(chosen):
                return tuple(chosen)

            def fits_with(size: int, axis: int = axis) -> bool:
                return fits([*chosen[:axis], size, *chosen[axis + 1 :]])

            size = largest(chosen[axis], multiple, fits_with) or largest(chosen[axis], 1, fits_with)
            chosen[axis] = max(size, min(least[axis], chosen[axis]))
    return tuple(chosen) if fits(chosen) else None


def spans(total: int, size: int) -> list[tuple[int, int]]:
    """Start and length of each block."""
    return [(start, min(size, total - start)) for start in range(0, total, size)]


def count(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """How many blocks a grid has."""
    return math.prod(-(-n // size) for n, size in zip(lengths, sizes))


def label(names: Sequence[str], lengths: Sequence[int], sizes: Sequence[int]) -> str:
    """A grid in words, such as "channels by 64, rows by 8"."""
    cut = [f"{name} by {size}" for name, n, size in zip(names, lengths, sizes) if size < n]
    return ", ".join(cut) or "whole"
