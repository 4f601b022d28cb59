"""Operators that put elements of a tensor into other places, or select some: turned round, shifted, indexed.

Data are only moved, which is exact however they are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.calls import CannotSplit, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import meta
from ooc.pytorch.splitting.dividers import divides_along
from ooc.pytorch.splitting.movement import strided
from ooc.pytorch.splitting.parts import other_dimensions

aten = torch.ops.aten


def _turned(named: Named) -> list[Axis]:
    """Every dimension; what is turned round in one is cut from the other end."""
    shape = named["self"].shape
    turned = {d % max(len(shape), 1) for d in named["dims"]}
    return [Axis(f"dimension {d}", n, {"self": d}, {0: d}, mirrored=d in turned) for d, n in enumerate(shape)]


def _triangle(named: Named) -> list[Axis]:
    """Matrices of a batch, then rows: further down, the diagonal lies further to the right."""
    shape = named["self"].shape
    rows = Axis("rows", shape[-2], {"self": -2}, {0: -2}, offsets={"diagonal": 1})
    return [*other_dimensions(shape, (-1, -2), ["self"]), rows]


divides_along("aten::flip", axes=_turned, multiples=(1,), moves=True)
divides_along("aten::tril", "aten::triu", axes=_triangle, multiples=(1,), moves=True)


@registry.handler("aten::roll")
def roll(context: Context, source: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Shifts elements around the end of dimensions, or of the flattened tensor where none is given."""
    strided(context, source)
    if not dims and (len(shifts) != 1 or not source.is_contiguous()):
        raise CannotSplit("it is flattened, and not contiguous")
    line, along = (source, dims) if dims else (source.view(-1), [0])
    if len(shifts) != len(along) or not line.numel():
        with its_own_errors():
            return aten.roll(source, shifts, dims)  # type: ignore[no-any-return]
    total = [0] * line.dim()
    for shift, d in zip(shifts, along):
        total[d] += shift
    with context.plain():  # PyTorch joins two pieces for each dimension, which decides how the result lies
        like = meta(line)
        for shift, d in zip(shifts, along):
            start = -shift % like.shape[d]
            like = aten.cat([like.narrow(d, start, like.shape[d] - start), like.narrow(d, 0, start)], d)
    result, parts = context.empty(like=like), 0
    # In each dimension what comes from the end, and what comes from the start: source, result, length.
    pieces = [[(n - shift % n, 0, shift % n), (0, shift % n, n - shift % n)] for n, shift in zip(line.shape, total)]
    for box in itertools.product(*pieces):
        of, to = line, result
        for d, (start, place, length) in enumerate(box):
            of, to = of.narrow(d, start, length), to.narrow(d, place, length)
        parts += context.move(to, of) if of.numel() else 0
    context.used("blocks", parts)
    return result.view(source.shape) if not dims else result


@registry.handler("aten::index.Tensor")
def index(context: Context, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Elements at places that one tensor of indexes or of truth values gives, which is a selection of rows."""
    strided(context, source)
    given = [(d, tensor) for d, tensor in enumerate(indices) if tensor is not None]
    if len(given) != 1 or not source.is_contiguous():
        raise CannotSplit("it has several tensors of indexes, or is not contiguous")
    (d, places), rows = given[0], source
    if places.dtype in (torch.bool, torch.uint8):
        if places.shape != source.shape[d : d + places.dim()]:
            with its_own_errors():
                return aten.index.Tensor(source, indices)  # type: ignore[no-any-return]
        rows = source.flatten(d, d + places.dim() - 1) if places.dim() > 1 else source
        places = places.flatten().nonzero().flatten()
    wanted = places.flatten().to(torch.int64)
    size = rows.shape[d]
    if wanted.numel() and not -size <= int(wanted.min()) <= int(wanted.max()) < size:
        raise IndexError(f"index is out of bounds for dimension {d} with size {size}")
    made: Any = aten.index_select(rows, d, torch.where(wanted < 0, wanted + size, wanted))
    context.used("selected rows", 1)
    return made.view(*rows.shape[:d], *places.shape, *rows.shape[d + 1 :])  # type: ignore[no-any-return]
