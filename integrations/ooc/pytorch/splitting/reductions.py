"""Reductions in parts, cut along the dimensions that are kept, which leaves every sum whole.

A reduction to one number has no such dimension: its parts are joined by a reduction of the same kind, which changes
the rounding of sums and norms, but not a largest element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides
from ooc.pytorch.splitting.geometry import blocks, flat, narrowed
from ooc.pytorch.splitting.grids import count, spans
from ooc.pytorch.splitting.parts import Named, Piece, along, divisions, view_bytes
from ooc.pytorch.splitting.tables import beside

aten = torch.ops.aten

REMOVES = (
    "sum.dim_IntList", "mean.dim", "nansum", "amax", "amin", "logsumexp", "prod.dim_int", "all.dim", "any.dim",
    "all.dims", "any.dims", "var.correction", "std.correction", "var_mean.correction", "std_mean.correction",
    "linalg_vector_norm", "norm.ScalarOpt_dim", "argmax", "argmin", "max.dim", "min.dim", "median.dim", "nanmedian.dim",
    "mode", "kthvalue", "count_nonzero.dim_IntList",
)  # fmt: skip


@divides(*(f"aten::{name}" for name in REMOVES))
def reduction(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Reductions along some dimensions, or along all of them where none is given."""
    tensor, dims = named["self"], named["dim"]
    every = list(range(tensor.dim()))
    own = {d % max(tensor.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims or every)}
    found = along(context, op, named, beside(named, "self", own, removed=not named.get("keepdim", False)))
    return found or (joined(context, op, named) if every else [])


# ---- to one number --------------------------------------------------------------------------------------------------

_JOINED = {"sum", "prod", "max", "min", "all", "any", "linalg_vector_norm"}
_EXACT = {"max", "min", "all", "any"}  # these choose, and do not round


@divides(*(f"aten::{name}" for name in ("sum", "mean", "prod", "max", "min", "all", "any")))
def joined(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Reductions of all elements to one, in parts whose results are reduced in the same way. A mean divides at last."""
    name = op._schema.name.removeprefix("aten::")
    kind = {"mean": "sum", "amax": "max", "amin": "min"}.get(name, name)
    tensor, order = named["self"], {"ord": named["ord"]} if "ord" in named else {}
    if kind not in _JOINED or len(op._schema.returns) > 1 or flat(tensor) is None or order == {"ord": 0}:
        return []
    reduce = getattr(aten, kind)

    def need(sizes: Sequence[int]) -> int:
        return view_bytes(context, sizes[0] * tensor.element_size()) + 64 + 8 * count([tensor.numel()], sizes)

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
