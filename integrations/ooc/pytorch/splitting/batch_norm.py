"""Batch normalisation in parts.

It is cut by channels, which leaves each channel's sums whole and takes one pass. Where one channel of the whole batch
does not fit, it is cut by samples and takes two passes, the first for the sums (those of parts are joined as in Chan,
Golub and LeVeque, 1979). In an evaluation it is cut by samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context, Sample
from ooc.pytorch.splitting.dividers import divides
from ooc.pytorch.splitting.grids import boxes, count, grid, label
from ooc.pytorch.splitting.parts import Axis, Named, Piece, along, bind, bytes_of, compact, own_bytes, view_bytes
from ooc.pytorch.splitting.verification import random_like

aten = torch.ops.aten
PER_CHANNEL = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_var", "save_invstd")
RUNNING = ("running_mean", "running_var")
FORWARD = (
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.no_stats",
    "aten::_native_batch_norm_legit_no_training",
)


def _sample(named: Named) -> Sample:
    """Random arguments, of which the variances are positive."""

    def make(generator: torch.Generator) -> tuple[tuple[Any, ...], Named]:
        made = {}
        for name, value in named.items():
            made[name] = random_like(value, generator, _no_copy) if isinstance(value, Tensor) else value
            if name in ("running_var", "save_var", "save_invstd") and isinstance(value, Tensor):
                made[name].abs_().add_(0.1)
        return (), made

    return make


def _no_copy(target: Tensor, source: Tensor) -> None:
    raise TypeError(f"batch normalisation of {source.dtype}")


def _channels(named: Named, tensors: Sequence[str], gives: dict[int, int]) -> Axis:
    takes = dict.fromkeys(tensors, 1) | {
        n: 0 for n in PER_CHANNEL if isinstance(named.get(n), Tensor) and named[n].numel()
    }
    return Axis("channels", named["input"].shape[1], takes, gives)


@divides(*FORWARD, sample=_sample)
def batch_norm(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Result, means and inverse deviations for an input [N, C, ...]; the last two are empty in an evaluation."""
    given, training = named["input"], named.get("training", False)
    if not training:
        samples = Axis("samples", given.shape[0], {"input": 0}, {0: 0})
        return along(context, op, named, [samples, _channels(named, ["input"], {0: 1})], multiples=(1,))
    found = along(context, op, named, [_channels(named, ["input"], {0: 1, 1: 0, 2: 0})], multiples=(16, 8, 4, 1))
    found += _two_passes(context, op, named, 3, _forward_two_passes)
    return [replace(piece, run=_running_once(op, piece.run)) for piece in found]


def _running_once(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Writes running statistics only when all parts are done: the parts may be tried again with less memory."""

    def once(*args: Any, **kwargs: Any) -> Any:
        named = bind(op, args, kwargs)
        kept = {name: named[name] for name in RUNNING if isinstance(named.get(name), Tensor)}
        copies = {name: tensor.clone() for name, tensor in kept.items()}
        result = run(**(named | copies))
        for name, tensor in kept.items():
            tensor.copy_(copies[name])
        return result

    return once


@divides("aten::native_batch_norm_backward", sample=_sample)
def batch_norm_backward(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Gradients of input, weight and bias."""
    mask = named["output_mask"]
    gives = {0: 1} | ({1: 0} if mask[1] else {}) | ({2: 0} if mask[2] else {})
    axis = _channels(named, ["grad_out", "input"], gives)
    found = along(context, op, named, [axis], multiples=(16, 8, 4, 1))
    return found + (_two_passes(context, op, named, 5, _backward_two_passes) if named["train"] else [])


# ---- two passes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """A grid of blocks, samples by channels."""

    context: Context
    sizes: Sequence[int]

    def channels(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """The first channel and the number of channels of each block."""
        for (block,) in boxes(tensor.shape[1:2], self.sizes[1:]):
            yield block

    def parts(self, channels: tuple[int, int], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """The first sample and the number of samples of each block, with that part of each tensor."""
        for ((start, length),) in boxes(tensors[0].shape[:1], self.sizes[:1]):
            views = (tensor.narrow(0, start, length).narrow(1, *channels) for tensor in tensors)
            yield ((start, length), *(compact(self.context, view) for view in views))


def _two_passes(context: Context, op: OpOverload, named: Named, tensors: int,
                run: Callable[[OpOverload, _Blocks, Named], Any]) -> list[Piece]:  # fmt: skip
    """The division by samples and channels; `tensors` tensors of a part's size are in memory at once."""
    given = named["input"]
    lengths = given.shape[:2]
    if lengths[0] < 2:
        return []
    each = bytes_of(given) // max(1, math.prod(lengths))

    def need(sizes: Sequence[int]) -> int:
        part = math.prod(sizes) * each
        return tensors * max(own_bytes(context, part), view_bytes(context, part)) + 64 * sizes[1]

    sizes = grid(lengths, [(1, lengths[1])], (0, 1), 1, lambda blocks: need(blocks) <= context.part_bytes)
    if sizes is None:
        return []

    def in_parts(*args: Any, **kwargs: Any) -> Any:
        return run(op, _Blocks(context, sizes), bind(op, args, kwargs))

    how = "two passes, " + label(("samples", "channels"), lengths, sizes)
    return [Piece(how, 2 * count(lengths, sizes), in_parts, need(sizes), rounds=True)]


def _along_channels(vector: Tensor, like: Tensor) -> Tensor:
    return vector.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _cut(tensor: Tensor | None, channels: tuple[int, int]) -> Tensor | None:
    return None if tensor is None else tensor.narrow(0, *channels)


def _forward_two_passes(op: OpOverload, blocks: _Blocks, named: Named) -> tuple[Tensor, Tensor, Tensor]:
    given: Tensor = named["input"]
    weight, bias = named["weight"], named["bias"]
    result = blocks.context.empty(size=given.shape, stride=given.stride(), dtype=given.dtype)
    kind = weight.dtype if weight is not None else given.dtype
    mean_of, inverse_of = (torch.empty(given.shape[1], dtype=kind) for _ in range(2))
    number = given.numel() // given.shape[1]
    for channels in blocks.channels(given):
        mean, squares = _statistics(blocks, channels, given)
        variance = squares / number
        mean_of.narrow(0, *channels).copy_(mean)
        inverse_of.narrow(0, *channels).copy_((variance + named["eps"]).rsqrt())
        for (start, length), part in blocks.parts(channels, given):
            made = aten.native_batch_norm(
                part,
                _cut(weight, channels),
                _cut(bias, channels),
                mean.to(kind),
                variance.to(kind),
                False,
                0.0,
                named["eps"],
            )
            blocks.context.move(result.narrow(0, start, length).narrow(1, *channels), made[0])
        for name, value in (("running_mean", mean), ("running_var", squares / max(number - 1, 1))):
            running = _cut(named.get(name), channels)
            if running is not None:
                running.copy_(running.double().lerp(value, named["momentum"]))
    return result, mean_of, inverse_of


def _statistics(blocks: _Blocks, channels: tuple[int, int], given: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of each channel, as float64."""
    dims = [0, *range(2, given.dim())]
    number, mean, squares = (
        0,
        torch.zeros(channels[1], dtype=torch.float64),
        torch.zeros(channels[1], dtype=torch.float64),
    )
    for _, part in blocks.parts(channels, given):
        variance, average = torch.var_mean(part, dims, correction=0)
        own = part.numel() // channels[1]
        apart = average.double() - mean
        squares += variance.double() * own + apart.square() * (number * own / (number + own))
        mean += apart * (own / (number + own))
        number += own
    return mean, squares


def _backward_two_passes(op: OpOverload, blocks: _Blocks, named: Named) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """With z = x - mean, s = save_invstd: dx = w s (g - mean(g) - z s^2 mean(g z)), dw = s sum(g z), db = sum(g)."""
    grad, given, weight = named["grad_out"], named["input"], named["weight"]
    context, dims = blocks.context, [0, *range(2, given.dim())]
    kind = weight.dtype if weight is not None else given.dtype
    result = context.empty(size=given.shape, stride=given.stride(), dtype=given.dtype)
    of_weight, of_bias = (torch.empty(given.shape[1], dtype=kind) for _ in range(2))
    number = given.numel() // given.shape[1]
    for channels in blocks.channels(given):
        mean, inverse = (named[name].narrow(0, *channels).double() for name in ("save_mean", "save_invstd"))
        total, product = (torch.zeros(channels[1], dtype=torch.float64) for _ in range(2))
        for _, one, other in blocks.parts(channels, grad, given):
            total += one.sum(dims).double()
            product += (other - _along_channels(mean, other)).mul_(one).sum(dims).double()
        of_weight.narrow(0, *channels).copy_(product * inverse)
        of_bias.narrow(0, *channels).copy_(total)
        scale = inverse if weight is None else inverse * weight.narrow(0, *channels).double()
        slope = -inverse.square() * product / number
        for (start, length), one, other in blocks.parts(channels, grad, given):
            made = (other - _along_channels(mean, other)).mul_(_along_channels(slope, other))
            made.add_(one).sub_(_along_channels(total / number, other)).mul_(_along_channels(scale, other))
            context.move(result.narrow(0, start, length).narrow(1, *channels), made)
    mask = named["output_mask"]
    return result, of_weight if mask[1] else None, of_bias if mask[2] else None
