"""Padding, and gradients of slices: results with one value everywhere but where a tensor is. Data are only moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.geometry import layout

aten = torch.ops.aten


def _around(
    context: Context, size: Sequence[int], like: Tensor, value: Any, place: Callable[[Tensor], Tensor], source: Tensor
) -> Tensor:
    """A new tensor with the same value everywhere but at a place in it, which `place` finds and `source` is for."""
    order = layout(like) if len(size) == like.dim() else torch.contiguous_format
    made = context.empty(like=torch.empty(size, dtype=like.dtype, device="meta", memory_format=order))
    parts = context.move(made, torch.full((), value, dtype=like.dtype, device=made.device).expand(made.shape))
    parts += context.move(place(made), source) if source.numel() else 0
    context.used("blocks", parts)
    return made


@registry.handler("aten::constant_pad_nd")
def constant_pad(context: Context, given: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Pads by pairs of lengths, those of the last dimension first; negative lengths cut off."""
    size, source, inside = list(given.shape), given, []
    for pair in range(len(pad) // 2):
        d, before, after = given.dim() - 1 - pair, pad[2 * pair], pad[2 * pair + 1]
        size[d] += before + after
        start, end = max(-before, 0), given.shape[d] - max(-after, 0)
        source = source.narrow(d, start, max(end - start, 0))
        inside.append((d, max(before, 0)))
    if min(size, default=0) < 0:
        result: Tensor = aten.constant_pad_nd(given, pad, value)  # raises, and says what is wrong
        return result

    def place(made: Tensor) -> Tensor:
        for d, start in inside:
            made = made.narrow(d, start, source.shape[d])
        return made

    return _around(context, size, given, value, place, source)


@registry.handler("aten::slice_backward")
def slice_backward(
    context: Context, grad: Tensor, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """The gradient: zeros but where the slice was."""
    return _around(context, input_sizes, grad, 0, lambda made: aten.slice(made, dim, start, end, step), grad)


@registry.handler("aten::select_backward")
def select_backward(context: Context, grad: Tensor, input_sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """The gradient: zeros but where the element was."""
    return _around(context, input_sizes, grad, 0, lambda made: made.select(dim, index), grad)
