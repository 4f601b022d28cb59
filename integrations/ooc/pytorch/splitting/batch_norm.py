"""Batch normalisation in parts.

It is cut by channels, which leaves each channel's sums whole. In an evaluation it is cut by samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.calls import Sample
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides, divides_along
from ooc.pytorch.splitting.parts import Piece, along, bind
from ooc.pytorch.splitting.verification import random_like

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
            made[name] = random_like(value, generator, Tensor.copy_) if isinstance(value, Tensor) else value
            if name in ("running_var", "save_var", "save_invstd") and isinstance(value, Tensor):
                made[name].abs_().add_(0.1)
        return (), made

    return make


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


def _of_gradients(named: Named) -> list[Axis]:
    mask = named["output_mask"]
    gives = {0: 1} | ({1: 0} if mask[1] else {}) | ({2: 0} if mask[2] else {})
    return [_channels(named, ["grad_out", "input"], gives)]


divides_along("aten::native_batch_norm_backward", axes=_of_gradients, multiples=(16, 8, 4, 1), sample=_sample)
