"""Gradients of convolutions in parts.

The data gradient is the convolution the other way round (`convolution.Pass`). The filter gradient is cut by the two
dimensions of channels that the weight has, which leaves each sum as it was. Where that does not suffice, it is cut by
samples, which adds up sums of parts (micro-cuDNN, section III-B).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.convolution import IM2COL_ELEMENTS, SPECIALS, Pass, in_order, run_pass, unfolds
from ooc.pytorch.splitting.convolution_shapes import ConvolutionParameters, layout, strides_of
from ooc.pytorch.splitting.dividers import Stage, divides, with_mask
from ooc.pytorch.splitting.grids import boxes, spans
from ooc.pytorch.splitting.parts import Named, Piece, divisions, own_bytes, view_bytes

aten = torch.ops.aten


@divides("aten::convolution_backward", specials=SPECIALS)
def convolution_backward(context: Context, op: OpOverload, named: Named) -> list[Stage]:
    """Those gradients of input, weight and bias that `output_mask` asks for."""
    given, weight, mask = named["input"], named["weight"], named["output_mask"]
    if given.dim() != weight.dim():
        return [Stage("", (0, 1, 2), op, [])]
    shape = ConvolutionParameters.of(weight, named)
    stages = []
    if mask[0]:
        found = _data_gradient(context, op, shape, given, named["grad_output"])
        stages.append(Stage("data gradient", (0,), with_mask(op, [True, False, False]), found))
    if mask[1] or mask[2]:
        found = _FilterGradient.of(shape, given, named["grad_output"], mask).divisions(context, op)
        stages.append(Stage("filter gradient", (1, 2), with_mask(op, [False, *mask[1:]]), found))
    return stages


# ---- data gradient --------------------------------------------------------------------------------------------------


def _data_gradient(
    context: Context, op: OpOverload, shape: ConvolutionParameters, given: Tensor, grad: Tensor
) -> list[Piece]:
    way = Pass(shape, tuple(grad.shape), tuple(given.shape), given.dtype, backward=True)

    def run(sizes: Sequence[int], call: Named) -> tuple[Tensor, None, None]:
        order = layout(call["input"], call["weight"])

        def kernel(
            part: ConvolutionParameters, source: Tensor, weight: Tensor, _: Tensor | None, size: Sequence[int]
        ) -> Tensor:
            # The kernel looks at the placeholder's sizes and layout, not at its contents.
            like = context.empty(size=size, stride=strides_of(size, order), dtype=source.dtype)
            mask = [True, False, False]
            made: Tensor = aten.convolution_backward(source, like, weight, None, *part.parameters, mask)[0]
            return made

        made = run_pass(context, way, sizes, call["grad_output"], call["weight"], None, order, kernel)
        return made, None, None

    return way.divisions(context, op, run)


# ---- filter gradient ------------------------------------------------------------------------------------------------

NAMES = ("samples", "groups", "channels", "inner channels")


@dataclass(frozen=True)
class _FilterGradient:
    """The gradients of weight [outer, inner / groups, ...] and bias.

    Outer channels are those of the result's gradient, inner ones those of the input. In a transposed convolution it is
    the other way round.
    """

    shape: ConvolutionParameters
    samples: int
    outer_plane: int  # elements of a channel of the tensor with the outer channels
    inner_plane: int
    dtype: torch.dtype
    wants: tuple[bool, bool]  # whether the gradients of weight and bias are wanted

    @classmethod
    def of(cls, shape: ConvolutionParameters, given: Tensor, grad: Tensor, mask: Sequence[bool]) -> _FilterGradient:
        outer, inner = (given, grad) if shape.transposed else (grad, given)
        planes = math.prod(outer.shape[2:]), math.prod(inner.shape[2:])
        return cls(shape, given.shape[0], *planes, given.dtype, (mask[1], mask[2]))

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        """The numbers of samples, groups, and outer and inner channels of a group.

        If only the bias is wanted, the channels that it does not have count as one.
        """
        groups = self.shape.groups
        outer, inner = self.shape.weight[0] // groups, self.shape.weight[1]
        if not self.wants[0]:
            outer, inner = (1, inner) if self.shape.transposed else (outer, 1)
        return self.samples, groups, outer, inner

    def need(self, context: Context, blocks: Sequence[int]) -> int:
        """Bytes of the largest part: operands, result, a copy of each in the kernel's layout, and a placeholder."""
        samples, groups, outer, inner = blocks
        taps, item = math.prod(self.shape.weight[2:]), self.dtype.itemsize
        tensors = (
            samples * groups * outer * self.outer_plane * item,
            samples * groups * inner * self.inner_plane * item,
            groups * outer * inner * taps * item,
        )
        total = sum(view_bytes(context, size) + own_bytes(context, size) for size in tensors)
        total += own_bytes(context, tensors[2])
        if unfolds(self.dtype) or self.samples == 1:
            small = self.inner_plane if self.shape.transposed else self.outer_plane
            channels = outer if self.shape.transposed else inner
            total += own_bytes(context, samples * groups * channels * taps * small * item)
        return total

    def _floor(self) -> tuple[int, int]:
        """The fewest channels for which PyTorch takes the same kernel as for the whole; see IM2COL_ELEMENTS."""
        if self.samples > 1:
            return 16, 16
        if self.shape.transposed:
            return max(16, IM2COL_ELEMENTS // self.outer_plane + 1), 16
        return 16, max(16, IM2COL_ELEMENTS // self.inner_plane + 1)

    def divisions(self, context: Context, op: OpOverload) -> list[Piece]:
        """The divisions by channels, then those by samples too."""
        lengths = self.lengths

        def allowed(sizes: Sequence[int]) -> bool:
            return sizes[1] == 1 or (sizes[2] == lengths[2] and sizes[3] == lengths[3])

        return divisions(
            context,
            op,
            NAMES,
            lengths,
            lambda blocks: self.need(context, blocks),
            partial(self.run, context),
            floors=[(1, 1, 64, 64), (1, 1, 32, 32), (1, 1, *self._floor()), *((1, 1, n, n) for n in (16, 8, 4, 2))],
            orders=((1, 2, 3), (1, 3, 2), (0, 1, 2, 3)),
            multiples=(64, 32, 16),
            allowed=allowed,
            rounds=lambda sizes: sizes[0] < lengths[0],
        )

    def run(self, context: Context, sizes: Sequence[int], call: Named) -> tuple[None, Tensor | None, Tensor | None]:
        """The gradients of the whole weight and bias, block by block."""
        weight, transposed = call["weight"], self.shape.transposed
        order = layout(call["input"], weight)
        outer, inner = (call["input"], call["grad_output"]) if transposed else (call["grad_output"], call["input"])
        channels = call["grad_output"].shape[1]
        stride = strides_of(weight.shape, order)
        made = context.empty(size=weight.shape, stride=stride, dtype=weight.dtype) if self.wants[0] else None
        bias = context.empty(size=[channels], dtype=weight.dtype) if self.wants[1] else None
        for (g0, g), (o0, o), (i0, i) in boxes(self.lengths[1:], sizes[1:]):
            of_outer, of_inner = (g0 * self.lengths[2] + o0, g * o), (g0 * self.lengths[3] + i0, g * i)
            first = (o0 if transposed else i0) == 0  # the bias is computed once
            mask = [False, made is not None, bias is not None and first]
            shape = replace(self.shape, groups=g, weight=(g * o, i, *weight.shape[2:]))
            views = outer.narrow(1, *of_outer), inner.narrow(1, *of_inner)
            parts = self._over_samples(context, *views, shape, order, sizes[0], mask)
            if made is not None:
                context.move(made.narrow(0, *of_outer).narrow(1, i0, i), parts[0])
            if bias is not None and first:
                context.move(bias.narrow(0, *(of_inner if transposed else of_outer)), parts[1])
        return None, made, bias

    def _over_samples(self, context: Context, outer: Tensor, inner: Tensor, shape: ConvolutionParameters,
                      order: torch.memory_format, samples: int, mask: list[bool]) -> list[Any]:  # fmt: skip
        """The gradients of one block, added up over parts of `samples` samples."""
        total: list[Any] = []
        for start, length in spans(self.samples, samples):
            one = in_order(context, outer.narrow(0, start, length), order)
            other = in_order(context, inner.narrow(0, start, length), order)
            given, grad = (one, other) if shape.transposed else (other, one)
            like = context.empty(size=shape.weight, stride=strides_of(shape.weight, order), dtype=one.dtype)
            parts = aten.convolution_backward(grad, given, like, [grad.shape[1]], *shape.parameters, mask)[1:]
            for sum_, part in zip(total, parts):
                if part is not None:
                    sum_.add_(part)
            total = total or list(parts)
        return total
