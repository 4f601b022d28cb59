"""Matrix products in parts: by columns and rows of the result, where sums stay whole, or by the reduced dimension.

Blocks are multiples of 64 where that is possible: BLAS kernels work on tiles, and a block that ends within one takes
another path than the whole takes (measured with MKL: multiples of 64 columns and of 4 rows were bit-identical).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import PRODUCTS, divides
from ooc.pytorch.splitting.grids import largest, spans
from ooc.pytorch.splitting.parts import (
    PREFERRED,
    Axis,
    Named,
    Piece,
    along,
    bind,
    bytes_of,
    compact,
    own_bytes,
    view_bytes,
)

aten = torch.ops.aten
LEAST_COLUMNS, LEAST_ROWS = (64, 32, 16, 16, 16), (64, 32, 16, 8, 4)


def _names(op: OpOverload) -> tuple[str, str]:
    """The names of the two factors."""
    names = [argument.name for argument in op._schema.arguments]
    return ("batch1", "batch2") if "batch1" in names else ("mat1", "mat2") if "mat1" in names else ("self", names[1])


def _added(op: OpOverload) -> dict[str, int]:
    return {"self": 1} if "self" not in _names(op) else {}


@divides("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", specials=PRODUCTS)
def product(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The product of [.., n, k] and [.., k, m]: by matrices of the batch, by columns (m), by rows (n)."""
    left, right = _names(op)
    first, second = named[left], named[right]
    batched = first.dim() == 3
    added = _added(op)
    columns = Axis("columns", second.shape[-1], {right: -1} | dict.fromkeys(added, -1), {0: -1}, least=LEAST_COLUMNS)
    rows = Axis("rows", first.shape[-2], {left: -2} | dict.fromkeys(added, -2), {0: -2}, least=LEAST_ROWS)
    axes = [columns, rows]
    orders: list[list[int]] = [[0, 1], [1, 0]]
    if batched:
        axes = [Axis("matrices", first.shape[0], {left: 0, right: 0} | dict.fromkeys(added, -3), {0: 0}), columns, rows]
        orders = [[0, 1, 2], [0, 2, 1]]
    elif bytes_of(first) > bytes_of(second):  # so that the larger factor is read once
        orders.reverse()
    if batched and added and named["self"].dim() < 3:
        axes[0] = Axis("matrices", first.shape[0], {left: 0, right: 0}, {0: 0})
    # BLAS copies a factor whose layout it does not take; oneDNN reorders both factors of short types.
    doubled = not (_blas(first) and _blas(second)) or first.element_size() < 4
    alive = [axis for axis in axes if axis.length > 1]
    mapped = [[alive.index(axes[place]) for place in order if axes[place] in alive] for order in orders]
    found = along(
        context,
        op,
        named,
        axes,
        orders=mapped,
        workspace=lambda operands, results: operands + results if doubled else 0,
    )
    if not batched:
        found += _by_reduction(context, op, named)
    return found


def _blas(matrix: Tensor) -> bool:
    rows, columns = matrix.stride()[-2:]
    return columns == 1 or rows == 1


def _by_reduction(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """By the reduced dimension: each part is added to the result, so rounding differs."""
    left, right = _names(op)
    first, second = named[left], named[right]
    if op is aten._addmm_activation.default:
        return []
    whole, item = first.shape[1], first.element_size()
    result = own_bytes(context, first.shape[0] * second.shape[1] * item)
    added = view_bytes(context, bytes_of(named["self"])) if "self" not in (left, right) else 0

    def need(size: int) -> int:
        factors = first.shape[0] * size * item, size * second.shape[1] * item
        return sum(view_bytes(context, factor) for factor in factors) + 2 * result + added

    size = largest(whole, PREFERRED[0], lambda n: need(n) <= context.part_bytes)
    if not size:
        return []

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = bind(op, args, kwargs)
        a, b = given[left], given[right]
        total: Tensor | None = None
        for start, length in spans(a.shape[1], size):
            pieces = compact(context, a.narrow(1, start, length)), compact(context, b.narrow(0, start, length))
            if total is None:
                total = op(**(given | {left: pieces[0], right: pieces[1]}))
            else:
                total.addmm_(*pieces, beta=1, alpha=given.get("alpha", 1))
        assert total is not None
        return total

    return [Piece(f"reduced dimension by {size}", -(-whole // size), run, need(size), rounds=True)]


@divides("aten::mv", "aten::addmv", specials=PRODUCTS)
def matrix_vector(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The product of [n, k] and [k]: by rows."""
    matrix = "mat" if "mat" in named else "self"
    added = {"self": 0} if matrix == "mat" else {}
    rows = Axis("rows", named[matrix].shape[0], {matrix: 0} | added, {0: 0}, least=LEAST_ROWS)
    return along(context, op, named, [rows])
