"""Convolutions in parts: by samples, groups, channels of the result, and rows of the result with their halo.

Method: mmCNN (Li et al. 2019) divides a layer by output channels, so that a part needs a part of the weight;
micro-cuDNN (Oyama et al. 2018) by samples. Rows are cut where neither makes parts small enough: a part's rows of the
input are gathered into memory of their own, with zeros written out for the padding at the edge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.calls import CannotSplit, Specials
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.convolution_shapes import ConvolutionParameters, Rows, layout, strides_of
from ooc.pytorch.splitting.dividers import PRODUCTS, divides
from ooc.pytorch.splitting.grids import equal_spans, spans
from ooc.pytorch.splitting.parts import MOST_CANDIDATES, Named, Piece, divisions, own_bytes, view_bytes

aten = torch.ops.aten
IM2COL_ELEMENTS = 20480  # PyTorch takes no oneDNN kernel for one sample of up to so many elements
NAMES = ("samples", "groups", "channels", "rows")
SPECIALS = Specials(PRODUCTS.kinds, finite=frozenset({"weight"}))  # see _multiplied_by_zeros
Kernel = Callable[[ConvolutionParameters, Tensor, Tensor, Tensor | None, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Pass:
    """One pass, forward or to the data gradient, from `source` to `result`, both [N, C, rows, ...]."""

    shape: ConvolutionParameters
    source: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    backward: bool  # to the data gradient: the kernel is given memory of the result's size that it does not read

    @property
    def spread(self) -> bool:
        """Whether rows are spread, not gathered; see convolution_shapes."""
        return self.shape.transposed != self.backward

    @cached_property
    def rows(self) -> Rows:
        """The rows of both sides."""
        return self.shape.rows(self.result if self.backward else self.source)

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """The numbers of samples, groups, result channels of a group, and result rows."""
        groups = self.shape.groups
        return self.result[0], groups, self.result[1] // groups, self.result[2]

    def need(self, context: Context, blocks: Sequence[int]) -> int:
        """Bytes of the largest part: operands and result, and a copy of each in the kernel's own layout."""
        samples, groups, channels, rows = blocks
        source_rows, result_rows = self._rows(rows)
        rest, item = (math.prod(self.source[3:]), math.prod(self.result[3:])), self.dtype.itemsize
        source_channels = groups * (self.source[1] // self.shape.groups)
        source = samples * source_channels * source_rows * rest[0] * item
        result = samples * groups * channels * result_rows * rest[1] * item
        taps = math.prod(self.shape.weight[2:])
        weight = groups * channels * (self.source[1] // self.shape.groups) * taps * item
        total = sum(view_bytes(context, size) + own_bytes(context, size) for size in (source, weight, result))
        if self.backward:
            total += own_bytes(context, result)
        judged = result if self.backward else source
        if unfolds(self.dtype) or (samples == 1 and judged <= IM2COL_ELEMENTS * item):
            inner = channels * groups if self.spread else source_channels
            small = source_rows * rest[0] if self.spread else result_rows * rest[1]
            total += own_bytes(context, samples * inner * taps * small * item)
        return total

    def _rows(self, rows: int) -> tuple[int, int]:
        """How many rows of the source, and of the kernel's result, a block of result rows takes."""
        if rows >= self.result[2]:
            return self.source[2], self.result[2]
        if self.spread:
            met = self.rows.most_met(rows)
            return met, (met - 1) * self.rows.stride + self.rows.reach
        return (rows - 1) * self.rows.stride + self.rows.reach, rows

    def divisions(self, context: Context, op: OpOverload, run: Callable[[Sequence[int], Named], Any]) -> list[Piece]:
        """Candidates, the preferred ones first."""
        found = divisions(
            context,
            op,
            NAMES,
            self.lengths,
            lambda blocks: self.need(context, blocks),
            run,
            floors=(self._floor(32), self._floor(8), (1, 1, 32, 8), (1, 1, 32, 1), (1, 1, 8, 1)),
            # Blocks of samples and channels are used as they lie in memory; blocks of rows need copies.
            orders=((0, 1, 2, 3), (0, 1, 3, 2), (1, 2, 3, 0), (3, 2, 0, 1)),
            multiples=(16, 8, 1),
            # Channels of a group are only cut where groups are taken one by one.
            allowed=lambda sizes: sizes[1] == 1 or sizes[2] == self.lengths[2],
        )
        return found[:MOST_CANDIDATES]

    def _floor(self, channels: int) -> tuple[int, int, int, int]:
        """The smallest blocks for which PyTorch takes the same kernel as for the whole; see IM2COL_ELEMENTS."""
        judged = (self.result[0], channels, *self.result[2:]) if self.backward else self.source
        row = max(1, judged[1] * math.prod(judged[3:]))
        if self.result[0] > 1 and (self.backward or row * judged[2] <= IM2COL_ELEMENTS):
            return 2, 1, channels, 8
        step = 1 if self.spread == self.backward else self.rows.stride  # rows of `judged` for one of the result
        return 1, 1, channels, max(8, IM2COL_ELEMENTS // (row * step) + 1)


# ---- running one pass -----------------------------------------------------------------------------------------------


def run_pass(
    context: Context,
    way: Pass,
    sizes: Sequence[int],
    source: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: torch.memory_format,
    kernel: Kernel,
) -> Tensor:
    """Computes the result of one pass, part by part.

    `kernel(shape, source, weight, bias, result_size)` computes a part; where rows are cut, `shape` does not pad them.
    """
    result = context.empty(size=way.result, stride=strides_of(way.result, order), dtype=source.dtype)
    per = way.source[1] // way.shape.groups, way.lengths[2]
    weights, sources, looked_at = _Last(), _Last(), _Last()  # what the next part may need again
    for box in _boxes(way, sizes, weight):
        (n0, n), (g0, g), (c0, c), (r0, r) = box
        channels = (g0 * per[1] + c0, c) if g == 1 else (g0 * per[1], g * per[1])
        target = result.narrow(0, n0, n).narrow(1, *channels).narrow(2, r0, r)
        given = source.narrow(0, n0, n).narrow(1, g0 * per[0], g * per[0])
        part_bias = None if bias is None else bias.narrow(0, *channels)
        part = weight.narrow(0, g0 * per[0], g * per[0]).narrow(1, c0, c) if way.spread else weight.narrow(0, *channels)
        part = weights.get(box[1:3], in_order, context, part, layout(weight))
        shape = replace(way.shape, groups=g, weight=tuple(part.shape))
        if r == way.result[2]:
            given = sources.get((box[0], box[1]), in_order, context, given, order)
            context.move(target, kernel(shape, given, part, part_bias, target.shape))
            continue
        start, length = way.rows.met_by(r0, r) if way.spread else way.rows.window(r0, r)
        slab = sources.get((box[0], box[1], start, length), _rows_with_zeros, context, given, start, length, order)
        compute = partial(kernel, _rows_unpadded(shape), slab, part, part_bias)
        if way.spread:
            window = way.rows.window(start, length) if length else (r0, 0)
            _spread_rows(context, target, (r0, r), window, compute, part_bias)
        else:
            if start < 0 or start + length > way.source[2]:
                looked_at.get(box[1:3], _multiplied_by_zeros, part)
            context.move(target, compute(target.shape))
    return result


class _Last:
    """The tensor that was made last, and the key that it was made for."""

    def __init__(self) -> None:
        self._key: Any = None
        self._made: Tensor | None = None

    def get(self, key: Any, make: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self._made is None or key != self._key:
            self._made = None  # frees its memory before more is taken
            self._key, self._made = key, make(*arguments)
        return self._made


def _boxes(way: Pass, sizes: Sequence[int], weight: Tensor) -> Iterator[tuple[tuple[int, int], ...]]:
    """All parts, in the better one of two orders.

    One reads the weight again for each block of samples and rows, the other the source for each block of channels.
    Blocks of samples and rows are of one size, so that the same kernel does them all; what overlaps is computed twice.
    """
    n, g, c, r = way.lengths
    samples, rows = equal_spans(n, sizes[0]), equal_spans(r, sizes[3])
    groups, channels = spans(g, sizes[1]), spans(c, sizes[2])
    if len(samples) * len(rows) * weight.numel() <= len(channels) * math.prod(way.source):
        for a, b, d, e in itertools.product(samples, groups, rows, channels):
            yield a, b, e, d
    else:
        for b, d, a, e in itertools.product(groups, channels, samples, rows):
            yield a, b, d, e


def _multiplied_by_zeros(weight: Tensor) -> Tensor:
    """Raises CannotSplit for a weight that is not finite.

    A part multiplies the weight by the zeros beyond an edge, which would give NaN; the undivided one leaves them out.
    """
    bounds = torch.stack(torch.aminmax(weight))
    if not bool(bounds.isfinite().all()):
        raise CannotSplit("its weight is not finite, and parts of its rows would multiply that by zeros at the edges")
    return bounds


def _rows_unpadded(shape: ConvolutionParameters) -> ConvolutionParameters:
    return replace(shape, padding=(0, *shape.padding[1:]), output_padding=(0, *shape.output_padding[1:]))


def in_order(context: Context, view: Tensor, order: torch.memory_format) -> Tensor:
    """The view, or a copy of it where it is scattered or in another layout."""
    if view.is_contiguous(memory_format=order):
        return view
    made = context.empty(size=view.shape, stride=strides_of(view.shape, order), dtype=view.dtype)
    context.move(made, view)
    return made


def _rows_with_zeros(context: Context, source: Tensor, start: int, length: int, order: torch.memory_format) -> Tensor:
    """Rows of the source from `start` on, with zeros for those that it does not have."""
    first, last = max(start, 0), min(start + length, source.shape[2])
    if first == start and last == start + length:
        return in_order(context, source.narrow(2, start, length), order)
    size = [*source.shape[:2], length, *source.shape[3:]]
    made = context.empty(size=size, stride=strides_of(size, order), dtype=source.dtype)
    for begin, rows in ((0, min(max(first - start, 0), length)), (max(last - start, 0), length - max(last - start, 0))):
        if rows > 0:
            _fill(context, made.narrow(2, begin, rows), None)
    if last > first:
        context.move(made.narrow(2, first - start, last - first), source.narrow(2, first, last - first))
    return made


def _fill(context: Context, view: Tensor, bias: Tensor | None) -> None:
    """Fills a view with zeros, or with each channel's bias."""
    value = view.new_zeros(()) if bias is None else bias.view(-1, *[1] * (view.dim() - 2))
    context.move(view, value.expand(view.shape))


def _spread_rows(
    context: Context,
    target: Tensor,
    block: tuple[int, int],
    window: tuple[int, int],
    compute: Callable[[Sequence[int]], Tensor],
    bias: Tensor | None,
) -> None:
    """Computes the result rows of a window, if it has any, and copies those of the block to `target`."""
    (start, length), (top, reached) = block, window
    covered = (start, start)
    if reached:
        covered = max(start, top), min(start + length, top + reached)
        made = compute([*target.shape[:2], reached, *target.shape[3:]])
        count_covered = covered[1] - covered[0]
        context.move(
            target.narrow(2, covered[0] - start, count_covered), made.narrow(2, covered[0] - top, count_covered)
        )
    for begin, end in ((start, covered[0]), (covered[1], start + length)):
        if end > begin:  # rows that no window reaches
            _fill(context, target.narrow(2, begin - start, end - begin), bias)


# ---- forward --------------------------------------------------------------------------------------------------------


def unfolds(dtype: torch.dtype) -> bool:
    """Whether there is no oneDNN kernel for a type, so that the one that runs makes columns of all windows."""
    return dtype not in (torch.float32, torch.bfloat16, torch.float16)


def _forward(
    shape: ConvolutionParameters, source: Tensor, weight: Tensor, bias: Tensor | None, size: Sequence[int]
) -> Tensor:
    made: Tensor = aten.convolution(source, weight, bias, *shape.parameters)
    return made


@divides("aten::convolution", "aten::_convolution", specials=SPECIALS)
def convolution(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Convolutions of one, two or three spatial dimensions, ordinary or transposed."""
    given, weight = named["input"], named["weight"]
    if given.dim() != weight.dim():
        return []  # it has no samples: composite operators add that dimension before they call this one
    shape = ConvolutionParameters.of(weight, named)

    def along(shape: ConvolutionParameters, seen: Callable[[Tensor], Tensor]) -> list[Piece]:
        source = seen(given)
        way = Pass(shape, tuple(source.shape), shape.output_size(source.shape), source.dtype, backward=False)

        def run(sizes: Sequence[int], call: Named) -> Tensor:
            order = layout(call["input"], call["weight"])
            return run_pass(context, way, sizes, seen(call["input"]), call["weight"], call["bias"], order, _forward)

        return way.divisions(context, op, run)

    found = along(shape, lambda source: source)
    if shape.skips:
        # The convolution skips most of its input. One of stride 1 over what is left has kernels that divide well.
        steps = (slice(None), slice(None), *(slice(None, None, step) for step in shape.stride))
        dense = along(replace(shape, stride=(1,) * len(shape.stride)), lambda source: source[steps])
        found = [replace(piece, how=f"subsampled, {piece.how}") for piece in dense] + found
    return found
