"""Batch, layer and group normalisation, forward and backward, and softmax: what is normalised together stays whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.calls import Given, Sample
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import Stage, divides, divides_along, with_mask
from ooc.pytorch.splitting.parts import PREFERRED, Axis, Named, Piece, along, bind
from ooc.pytorch.splitting.tables import beside, table
from ooc.pytorch.splitting.verification import map_tensors, random_like

ROWS = (16, 1)  # multiples
CHANNELS = (16, 8, 4, 1)


# ---- batch normalisation --------------------------------------------------------------------------------------------

_trained = table("channels input:1 weight bias running_mean running_var:0 -> 1 0 0")
_evaluated = table("samples input:0 -> 0", "channels input:1 weight bias running_mean running_var:0 -> 1")


def _sample(named: Named) -> Sample:
    """Random arguments, of which the variances are positive."""

    def make(generator: torch.Generator) -> Given:
        made = map_tensors(dict(named), lambda tensor: random_like(tensor, generator, Tensor.copy_))
        for name in ("running_var", "save_var", "save_invstd"):
            if isinstance(made.get(name), Tensor):
                made[name].abs_().add_(0.1)
        return (), made

    return make


@divides(
    "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit.no_stats",
    "aten::_native_batch_norm_legit_no_training", sample=_sample,
)  # fmt: skip
def batch_norm(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Result, means and inverse deviations for an input [N, C, ...]; the last two are empty in an evaluation."""
    if not named.get("training", False):
        return along(context, op, named, _evaluated(named), multiples=(1,))
    found = along(context, op, named, _trained(named), multiples=CHANNELS)
    return [replace(piece, run=_running_once(op, piece.run)) for piece in found]


def _running_once(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Writes running statistics only when all parts are done: the parts may be tried again with less memory."""

    def once(*args: Any, **kwargs: Any) -> Any:
        named = bind(op, args, kwargs)
        kept = [name for name in ("running_mean", "running_var") if isinstance(named.get(name), Tensor)]
        copies = {name: named[name].clone() for name in kept}
        result = run(**(named | copies))
        for name, copy in copies.items():
            named[name].copy_(copy)
        return result

    return once


divides_along(
    "aten::native_batch_norm_backward",
    axes=table("channels grad_out input:1 weight running_mean running_var save_mean save_invstd:0 -> 1 0 0"),
    multiples=CHANNELS,
    sample=_sample,
)


# ---- layer normalisation --------------------------------------------------------------------------------------------

_columns = table("columns grad_out input:-1 weight bias:0 -> - 0 0")


@divides("aten::native_layer_norm_backward")
def layer_norm_backward(context: Context, op: OpOverload, named: Named) -> list[Stage]:
    """The input's gradient by rows; those of weight and bias, sums over rows, by columns, so that sums stay whole."""
    rows = beside(named, "input grad_out mean rstd", range(-len(named["normalized_shape"]), 0), results=1)
    columns = _columns(named) if len(named["normalized_shape"]) == 1 else []
    columns = [replace(axis, entries={"normalized_shape": 0}) for axis in columns]

    def stage(name: str, results: Sequence[int], axes: list[Axis], multiples: Sequence[int]) -> list[Stage]:
        mask = [wanted and place in results for place, wanted in enumerate(named["output_mask"])]
        if not any(mask):
            return []
        found = along(context, op, named, axes, multiples=multiples, before=lambda given: given | {"output_mask": mask})
        return [Stage(name, tuple(results), with_mask(op, mask), found)]

    return [*stage("data gradient", [0], rows, ROWS), *stage("weight gradient", [1, 2], columns, PREFERRED)]


# ---- group normalisation --------------------------------------------------------------------------------------------


def _groups(named: Named) -> list[Axis]:
    """Samples, and groups of channels, in tensors [N, C, ...] and statistics [N, groups]; of gradients groups alone.

    The sums for weight and bias go over samples.
    """
    unit, backward = named["C"] // named["group"], "grad_out" in named
    images, vectors, statistics = (1, unit), (0, unit), (1, 1)
    places = dict.fromkeys(("input", "grad_out"), images) | dict.fromkeys(("weight", "bias"), vectors)
    places |= dict.fromkeys(("mean", "rstd"), statistics)
    takes = {name: place for name, place in places.items() if isinstance(named.get(name), Tensor)}
    gives = {0: images} | dict.fromkeys((1, 2), vectors if backward else statistics)
    samples = Axis("samples", named["N"], {"input": 0}, dict.fromkeys(range(3), 0), {"N": 1})
    return [*([] if backward else [samples]), Axis("groups", named["group"], takes, gives, {"group": 1, "C": unit})]


divides_along("aten::native_group_norm", "aten::native_group_norm_backward", axes=_groups, multiples=(1,))
