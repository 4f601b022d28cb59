"""Cuts the lengths of axes into blocks: finds block sizes that fit, and lists the blocks of a grid."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence


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


def equal_spans(total: int, size: int) -> list[tuple[int, int]]:
    """Start and length of each block, all of the same length: the last one overlaps the one before it where it must."""
    return [(min(start, total - size), size) for start in range(0, total, size)] if size < total else [(0, total)]


def count(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """How many blocks a grid has."""
    return math.prod(-(-n // size) for n, size in zip(lengths, sizes))


def label(names: Sequence[str], lengths: Sequence[int], sizes: Sequence[int]) -> str:
    """A grid in words, such as "channels by 64, rows by 8"."""
    cut = [f"{name} by {size}" for name, n, size in zip(names, lengths, sizes) if size < n]
    return ", ".join(cut) or "whole"
