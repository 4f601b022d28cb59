"""Padding, and gradients of slices: results with one value everywhere but where a tensor is. Data are only moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.context import Context

aten = torch.ops.aten


def _filled(context: Context, size: Sequence[int], like: Tensor, value: Any) -> tuple[Tensor, int]:
    """A new tensor with the same value everywhere, and the number of parts in which it was written."""
    format_of = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim(), torch.contiguous_format)
    meta = torch.empty_strided(like.shape, like.stride(), device="meta", dtype=like.dtype)
    last = not meta.is_contiguous() and meta.is_contiguous(memory_format=format_of)
    order = format_of if last and len(size) == like.dim() else torch.contiguous_format
    made = context.empty(like=torch.empty(size, dtype=like.dtype, device="meta", memory_format=order))
    number = torch.full((), value, dtype=like.dtype)
    return made, context.move(made, number.expand(made.shape))


def _placed(context: Context, made: Tensor, place: Tensor, source: Tensor, parts: int) -> Tensor:
    parts += context.move(place, source) if source.numel() else 0
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
    made, parts = _filled(context, size, given, value)
    place = made
    for d, start in inside:
        place = place.narrow(d, start, source.shape[d])
    return _placed(context, made, place, source, parts)


@registry.handler("aten::slice_backward")
def slice_backward(
    context: Context, grad: Tensor, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """The gradient: zeros but where the slice was."""
    made, parts = _filled(context, input_sizes, grad, 0)
    return _placed(context, made, aten.slice(made, dim, start, end, step), grad, parts)


@registry.handler("aten::select_backward")
def select_backward(context: Context, grad: Tensor, input_sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """The gradient: zeros but where the element was."""
    made, parts = _filled(context, input_sizes, grad, 0)
    return _placed(context, made, made.select(dim, index), grad, parts)
