"""Reductions in parts, cut along the dimensions that are kept, which leaves every sum whole; and normalisations.

A reduction to one number has no such dimension: its parts are joined by a reduction of the same kind, which changes
the rounding of sums and norms, but not a largest element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.axes import Axis, Named, count, spans
from ooc.pytorch.splitting.calls import Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import Stage, divides, divides_along, with_mask
from ooc.pytorch.splitting.geometry import blocks, flat, narrowed, rounded
from ooc.pytorch.splitting.parts import PREFERRED, along, bind, divisions
from ooc.pytorch.splitting.tables import beside, table

aten = torch.ops.aten

REMOVES = (
    "sum.dim_IntList", "mean.dim", "nansum", "amax", "amin", "logsumexp", "prod.dim_int", "all.dim", "any.dim",
    "all.dims", "any.dims", "var.correction", "std.correction", "var_mean.correction", "std_mean.correction",
    "linalg_vector_norm", "norm.ScalarOpt_dim", "argmax", "argmin", "max.dim", "min.dim", "median.dim", "nanmedian.dim",
    "mode", "kthvalue", "count_nonzero.dim_IntList",
)  # fmt: skip


@divides(*(f"aten::{name}" for name in REMOVES))
def reduction(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """Reductions along some dimensions, or along all of them where none is given."""
    tensor, dims = named["self"], named["dim"]
    own = dims if isinstance(dims, int) else dims or range(tensor.dim())
    found = along(context, op, named, beside(named, "self", own, removed=not named.get("keepdim", False)))
    return found or (joined(context, op, named) if tensor.dim() else [])


# ---- to one number --------------------------------------------------------------------------------------------------

_JOINED = {"sum", "prod", "max", "min", "all", "any", "linalg_vector_norm"}
_EXACT = {"max", "min", "all", "any"}  # these choose, and do not round


@divides(*(f"aten::{name}" for name in ("sum", "mean", "prod", "max", "min", "all", "any")))
def joined(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """Reductions of all elements to one, in parts whose results are reduced in the same way. A mean divides at last."""
    name = op._schema.name.removeprefix("aten::")
    kind = {"mean": "sum", "amax": "max", "amin": "min"}.get(name, name)
    tensor, order = named["self"], {"ord": named["ord"]} if "ord" in named else {}
    if kind not in _JOINED or len(op._schema.returns) > 1 or flat(tensor) is None or order == {"ord": 0}:
        return []
    reduce = getattr(aten, kind)

    def need(sizes: Sequence[int]) -> int:
        return rounded(sizes[0] * tensor.element_size(), context.chunk_bytes) + 64 + 8 * count([tensor.numel()], sizes)

    def run(sizes: Sequence[int], call: Named) -> Tensor:
        line = flat(call["self"])
        assert line is not None
        options = order | ({"dtype": call["dtype"]} if call.get("dtype") is not None else {})
        found = [reduce(line.narrow(0, *span), **options) for span in spans(line.numel(), sizes[0])]
        made = reduce(torch.stack(found), **order)
        if name == "mean":
            made = made / line.numel()
        return made.to(found[0].dtype).view([1] * tensor.dim() if call.get("keepdim") else [])  # type: ignore[no-any-return]

    lengths, rounds = [tensor.numel()], kind not in _EXACT
    return divisions(context, op, ["elements"], lengths, need, run, multiples=[64], rounds=lambda sizes: rounds)


@registry.handler("aten::equal")
def equal(context: Context, one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same sizes and elements."""
    if one.shape != other.shape or one.numel() == 0:
        return one.shape == other.shape
    indexes = list(blocks([one, other], context.part_bytes, context.chunk_bytes))
    context.used("blocks", len(indexes))
    return all(bool(aten.equal(narrowed(one, index), narrowed(other, index))) for index in indexes)


# ---- normalisation --------------------------------------------------------------------------------------------------

_CHANNELS = (16, 8, 4, 1)  # multiples
_trained = table("channels input:1 weight bias running_mean running_var:0 -> 1 0 0")
_evaluated = table("samples input:0 -> 0", "channels input:1 weight bias running_mean running_var:0 -> 1")


def _positive_variances(named: Named) -> Named:
    for name in ("running_var", "save_var", "save_invstd"):
        if isinstance(named.get(name), Tensor):
            named[name].abs_().add_(0.1)
    return named


@divides(
    "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit.no_stats",
    "aten::_native_batch_norm_legit_no_training", sample=_positive_variances,
)  # fmt: skip
def batch_norm(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """Result, means and inverse deviations for an input [N, C, ...]; the last two are empty in an evaluation."""
    if not named.get("training", False):
        return along(context, op, named, _evaluated(named), multiples=(1,))

    def once(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Writes running statistics only when all parts are done: the parts may be tried again with less memory."""
        call = bind(op, args, kwargs)
        copies = {n: call[n].clone() for n in ("running_mean", "running_var") if isinstance(call.get(n), Tensor)}
        result = run(**(call | copies))
        for name, copy in copies.items():
            call[name].copy_(copy)
        return result

    found = along(context, op, named, _trained(named), multiples=_CHANNELS)
    return [replace(piece, run=partial(once, piece.run)) for piece in found]


divides_along(
    "aten::native_batch_norm_backward",
    axes=table("channels grad_out input:1 weight running_mean running_var save_mean save_invstd:0 -> 1 0 0"),
    multiples=_CHANNELS,
    sample=_positive_variances,
)


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

    return [*stage("data gradient", [0], rows, [16, 1]), *stage("weight gradient", [1, 2], columns, PREFERRED)]


def _groups(named: Named) -> list[Axis]:
    """Samples, unless gradients are sums over them, and groups of channels: of images and of statistics [N, groups]."""
    backward = "grad_out" in named
    takes = {"input": 1, "grad_out": 1, "weight": 0, "bias": 0, "mean": 1, "rstd": 1}
    gives = {0: 1} | dict.fromkeys((1, 2), 0 if backward else 1)
    samples = Axis("samples", named["N"], {"input": 0}, dict.fromkeys(range(3), 0), ["N"])
    return [*([] if backward else [samples]), Axis("groups", named["group"], takes, gives, ["group", "C"])]


divides_along("aten::native_group_norm", "aten::native_group_norm_backward", axes=_groups, multiples=(1,))
