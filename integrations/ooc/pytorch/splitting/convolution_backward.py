"""Gradients of convolutions in parts.

The data gradient is the convolution the other way round (`convolution.Pass`). The filter gradient is cut by the two
dimensions of channels that the weight has, which leaves each sum as it was. Where that does not suffice, it is cut by
samples, which adds up sums of parts (micro-cuDNN, section III-B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.convolution import IM2COL_ELEMENTS, SPECIALS, Pass, in_order, run_pass, unfolds
from ooc.pytorch.splitting.convolution_shapes import ConvolutionParameters, layout, strides_of
from ooc.pytorch.splitting.dividers import Stage, divides_stages, with_mask
from ooc.pytorch.splitting.grids import boxes, count, grid, label, spans
from ooc.pytorch.splitting.parts import Named, Piece, bind, own_bytes, view_bytes

aten = torch.ops.aten


@divides_stages("aten::convolution_backward", specials=SPECIALS)
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
    way = Pass(
        shape,
        shape.rows(given.shape),
        tuple(grad.shape),
        tuple(given.shape),
        not shape.transposed,
        given.element_size(),
        unfolds(given),
        placeholder=True,
    )

    def run(sizes: Sequence[int]) -> Callable[..., Any]:
        def in_parts(*args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
            call = bind(op, args, kwargs)
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

        return in_parts

    return way.divisions(context, run)


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
    item: int
    unfolds: bool
    wants: tuple[bool, bool]  # whether the gradients of weight and bias are wanted

    @classmethod
    def of(cls, shape: ConvolutionParameters, given: Tensor, grad: Tensor, mask: Sequence[bool]) -> _FilterGradient:
        outer, inner = (given, grad) if shape.transposed else (grad, given)
        planes = math.prod(outer.shape[2:]), math.prod(inner.shape[2:])
        return cls(shape, given.shape[0], *planes, given.element_size(), unfolds(given), (mask[1], mask[2]))

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
        taps = math.prod(self.shape.weight[2:])
        tensors = (
            samples * groups * outer * self.outer_plane * self.item,
            samples * groups * inner * self.inner_plane * self.item,
            groups * outer * inner * taps * self.item,
        )
        total = sum(view_bytes(context, size) + own_bytes(context, size) for size in tensors)
        total += own_bytes(context, tensors[2])
        if self.unfolds or self.samples == 1:
            small = self.inner_plane if self.shape.transposed else self.outer_plane
            channels = outer if self.shape.transposed else inner
            total += own_bytes(context, samples * groups * channels * taps * small * self.item)
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
        found: dict[tuple[int, ...], Piece] = {}

        def fits(blocks: Sequence[int]) -> bool:
            return self.need(context, blocks) <= context.part_bytes

        for order in ((1, 2, 3), (1, 3, 2), (0, 1, 2, 3)):
            for multiple in (64, 32, 16):
                floors = [(1, 1, 64, 64), (1, 1, 32, 32), (1, 1, *self._floor())]
                floors += [(1, 1, n, n) for n in (16, 8, 4, 2)]
                sizes = grid(lengths, floors, order, multiple, fits)
                cut = sizes is not None and (sizes[2] < lengths[2] or sizes[3] < lengths[3])
                if sizes is None or sizes in found or (cut and sizes[1] > 1):
                    continue
                how = label(NAMES, lengths, sizes)
                run, need = _run(self, context, op, sizes), self.need(context, sizes)
                found[sizes] = Piece(how, count(lengths, sizes), run, need, rounds=sizes[0] < lengths[0])
        return list(found.values())


def _run(way: _FilterGradient, context: Context, op: OpOverload, sizes: Sequence[int]) -> Callable[..., Any]:
    def in_parts(*args: Any, **kwargs: Any) -> tuple[None, Tensor | None, Tensor | None]:
        call = bind(op, args, kwargs)
        weight, transposed = call["weight"], way.shape.transposed
        order = layout(call["input"], weight)
        outer, inner = (call["input"], call["grad_output"]) if transposed else (call["grad_output"], call["input"])
        channels = call["grad_output"].shape[1]
        stride = strides_of(weight.shape, order)
        made = context.empty(size=weight.shape, stride=stride, dtype=weight.dtype) if way.wants[0] else None
        bias = context.empty(size=[channels], dtype=weight.dtype) if way.wants[1] else None
        for (g0, g), (o0, o), (i0, i) in boxes(way.lengths[1:], sizes[1:]):
            first = (o0 if transposed else i0) == 0  # the bias is computed once
            block = _Block(way, (g0 * way.lengths[2] + o0, g * o), (g0 * way.lengths[3] + i0, g * i), (i0, i), g)
            parts = block.accumulated(context, outer, inner, order, sizes[0], bias is not None and first)
            if made is not None:
                context.move(made.narrow(0, *block.outer).narrow(1, *block.columns), parts[0])
            if bias is not None and first:
                context.move(bias.narrow(0, *(block.inner if transposed else block.outer)), parts[1])
        return None, made, bias

    return in_parts


@dataclass(frozen=True)
class _Block:
    """A block of outer and inner channels, each given by the first one and their number."""

    way: _FilterGradient
    outer: tuple[int, int]
    inner: tuple[int, int]  # as numbered in the tensor
    columns: tuple[int, int]  # the inner channels as numbered in the weight
    groups: int

    def accumulated(self, context: Context, outer: Tensor, inner: Tensor, order: torch.memory_format, samples: int,
                    with_bias: bool) -> list[Tensor]:  # fmt: skip
        """Gradients of this part of the weight and, if wanted, of the bias, over all samples."""
        total: list[Tensor] = []
        for parts in self._each(context, outer, inner, order, samples, with_bias):
            if total:
                for sum_, part in zip(total, parts):
                    if part is not None:
                        sum_.add_(part)
            else:
                total = parts
        return total

    def _each(self, context: Context, outer: Tensor, inner: Tensor, order: torch.memory_format, samples: int,
              with_bias: bool) -> Iterator[list[Any]]:  # fmt: skip
        taps = self.way.shape.weight[2:]
        size = [self.outer[1], self.columns[1], *taps]
        shape = replace(self.way.shape, groups=self.groups, weight=tuple(size))
        for start, length in spans(self.way.samples, samples):
            one = in_order(context, outer.narrow(0, start, length).narrow(1, *self.outer), order)
            other = in_order(context, inner.narrow(0, start, length).narrow(1, *self.inner), order)
            given, grad = (one, other) if shape.transposed else (other, one)
            like = context.empty(size=size, stride=strides_of(size, order), dtype=one.dtype)
            mask = [False, self.way.wants[0], with_bias]
            made = aten.convolution_backward(grad, given, like, [grad.shape[1]], *shape.parameters, mask)
            yield list(made[1:])
