"""Reductions in parts, cut along the dimensions that are kept, which leaves every sum whole.

A reduction to one number has no such dimension: its parts are joined by a reduction of the same kind, which changes
the rounding of sums and norms, but not a largest element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.axes import beside
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides, divides_along
from ooc.pytorch.splitting.geometry import blocks, flat, narrowed
from ooc.pytorch.splitting.grids import spans
from ooc.pytorch.splitting.parts import Axis, Named, Piece, along, bind, view_bytes

aten = torch.ops.aten

REMOVES = (
    "sum.dim_IntList", "mean.dim", "nansum", "amax", "amin", "logsumexp", "prod.dim_int", "all.dim", "any.dim",
    "all.dims", "any.dims", "var.correction", "std.correction", "var_mean.correction", "std_mean.correction",
    "linalg_vector_norm", "norm.ScalarOpt_dim", "argmax", "argmin", "max.dim", "min.dim", "median.dim", "nanmedian.dim",
    "mode", "kthvalue", "count_nonzero.dim_IntList",
)  # fmt: skip
KEEPS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "sort.stable", "topk")


@divides(*(f"aten::{name}" for name in REMOVES))
def reduction(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Reductions along some dimensions, or along all of them where none is given."""
    tensor, dims = named["self"], named["dim"]
    every = list(range(tensor.dim()))
    own = {d % max(tensor.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims or every)}
    found = along(context, op, named, beside(named, "self", own, removed=not named.get("keepdim", False)))
    return found or (joined(context, op, named) if every else [])


# What goes along dimensions that it keeps: running sums and the like, sorting, Fourier transforms, cross products, ...
divides_along(
    *(f"aten::{name}" for name in KEEPS), "aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r", "aten::linalg_cross",
    axes=lambda named: beside(named, "self other", named["dim"]),
)  # fmt: skip
divides_along(
    "aten::index_add", "aten::index_copy", "aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor",
    axes=lambda named: beside(named, "self source", named["dim"]), multiples=(1,),
)  # fmt: skip
divides_along("aten::bucketize.Tensor", axes=lambda named: beside(named, "self", []), multiples=(1,))


def _unselected(named: Named) -> list[Axis]:
    """The dimensions in which all tensors are of one size, but the one that is gathered or scattered along."""
    shapes = [named[name].shape for name in ("self", "index", "src") if isinstance(named.get(name), Tensor)]
    unlike = [d for d, n in enumerate(shapes[0]) if any(shape[d] != n for shape in shapes)]
    return beside(named, "self index src", [named["dim"], *unlike])


divides_along(
    "aten::gather", "aten::scatter_add", "aten::scatter.src", "aten::scatter.value", "aten::scatter_reduce.two",
    axes=_unselected, multiples=(1,),
)  # fmt: skip


def _slices(named: Named) -> list[Axis]:
    d = named["dim"]
    return [Axis("slices", named["self"].shape[d], {"self": d}, {0: d})]


divides_along("aten::renorm", axes=_slices)


# ---- to one number --------------------------------------------------------------------------------------------------

_EXACT = ("max", "min", "all", "any")  # these choose, and do not round

# By operator: the kind of reduction of a part, and of the parts' results. A mean divides the sum at last.
_WHOLE = {
    "sum": "sum", "sum.dim_IntList": "sum", "mean": "sum", "mean.dim": "sum", "prod": "prod", "max": "max",
    "min": "min", "amax": "max", "amin": "min", "all": "all", "any": "any", "linalg_vector_norm": "linalg_vector_norm",
}  # fmt: skip


@divides(*(f"aten::{name}" for name in ("sum", "mean", "prod", "max", "min", "all", "any")))
def joined(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Reductions of all elements to one."""
    name = op._schema.name.removeprefix("aten::") + (f".{op._overloadname}" if op._overloadname != "default" else "")
    tensor: Tensor = named["self"]
    order = named.get("ord", 2)
    if name not in _WHOLE or flat(tensor) is None or (name == "linalg_vector_norm" and order == 0):
        return []
    kind = _WHOLE[name]
    item = tensor.element_size()
    elements = (context.part_bytes - 2 * context.chunk_bytes - 64) // item // 64 * 64
    if elements < 1 or view_bytes(context, item * min(elements, tensor.numel())) > context.part_bytes:
        return []
    parts = -(-tensor.numel() // elements)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        call = bind(op, args, kwargs)
        line = flat(call["self"])
        assert line is not None
        found = [_part(kind, line.narrow(0, start, length), call) for start, length in spans(line.numel(), elements)]
        made = _part(kind, torch.stack(found), {"ord": order})
        if name.startswith("mean"):
            made = made / line.numel()
        shape = [1] * tensor.dim() if call.get("keepdim") else []
        return made.to(found[0].dtype).view(shape)

    need = view_bytes(context, elements * item) + item * parts
    return [Piece(f"elements by {elements}", parts, run, need, rounds=kind not in _EXACT)]


def _part(kind: str, line: Tensor, call: Named) -> Tensor:
    options = {"dtype": call["dtype"]} if call.get("dtype") is not None else {}
    if kind == "linalg_vector_norm":
        return aten.linalg_vector_norm(line, call["ord"], **options)  # type: ignore[no-any-return]
    function: Callable[..., Tensor] = getattr(torch, kind)
    return function(line, **options)


@registry.handler("aten::equal")
def equal(context: Context, one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same sizes and elements."""
    if one.shape != other.shape or one.numel() == 0:
        return one.shape == other.shape
    indexes = list(blocks([one, other], context.part_bytes, context.chunk_bytes))
    context.used("blocks", len(indexes))
    return all(bool(aten.equal(narrowed(one, index), narrowed(other, index))) for index in indexes)
