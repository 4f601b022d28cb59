"""Matrix products in parts: by columns and rows of the result, where sums stay whole.

Blocks are multiples of 64 where that is possible: BLAS kernels work on tiles, and a block that ends within one takes
another path than the whole takes (measured with MKL: multiples of 64 columns and of 4 rows were bit-identical).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import PRODUCTS, divides, divides_along
from ooc.pytorch.splitting.parts import Piece, along, bytes_of

_FACTORS = (("batch1", "batch2"), ("mat1", "mat2"), ("self", "mat2"))
LEAST_COLUMNS, LEAST_ROWS = (64, 32, 16, 16, 16), (64, 32, 16, 8, 4)


@divides("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", specials=PRODUCTS)
def product(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The product of [.., n, k] and [.., k, m]: by matrices of the batch, by columns (m), by rows (n)."""
    left, right = next(two for two in _FACTORS if two[0] in named)
    first, second = named[left], named[right]
    added = [] if left == "self" else ["self"]
    columns = Axis("columns", second.shape[-1], dict.fromkeys([right, *added], -1), {0: -1}, least=LEAST_COLUMNS)
    rows = Axis("rows", first.shape[-2], dict.fromkeys([left, *added], -2), {0: -2}, least=LEAST_ROWS)
    batch = []
    if first.dim() == 3:
        batch = [Axis("matrices", first.shape[0], {left: 0, right: 0} | dict.fromkeys(added, -3), {0: 0})]
    orders = [[*batch, columns, rows], [*batch, rows, columns]]
    if not batch and bytes_of(first) > bytes_of(second):  # so that the larger factor is read once
        orders.reverse()
    # BLAS copies a factor whose layout it does not take; oneDNN reorders both factors of short types.
    doubled = not (_blas(first) and _blas(second)) or first.element_size() < 4
    copied = (lambda part: part.operands + part.results) if doubled else (lambda part: 0)
    made = torch.empty(*first.shape[:-1], second.shape[-1], dtype=first.dtype, device="meta")
    axes = [*batch, columns, rows]
    return along(context, op, named, axes, orders=orders, workspace=copied, results=[made])


def _blas(matrix: Tensor) -> bool:
    rows, columns = matrix.stride()[-2:]
    return columns == 1 or rows == 1


def _rows(named: Named) -> list[Axis]:
    """The rows of a matrix [n, k] that is multiplied with a vector [k]."""
    takes = ("mat", "self") if "mat" in named else ("self",)
    return [Axis("rows", named[takes[0]].shape[0], dict.fromkeys(takes, 0), {0: 0}, least=LEAST_ROWS)]


divides_along("aten::mv", "aten::addmv", axes=_rows, specials=PRODUCTS)


def _sides(named: Named) -> list[Axis]:
    """The rows and the columns of a sum of products of matrices, or of the product of two vectors."""
    left, right = ("vec1", "vec2") if "vec1" in named else ("batch1", "batch2")
    rows = max(-2, -named[left].dim())
    return [
        Axis("columns", named[right].shape[-1], {right: -1, "self": -1}, {0: -1}, least=LEAST_COLUMNS),
        Axis("rows", named[left].shape[rows], {left: rows, "self": -2}, {0: -2}, least=LEAST_ROWS),
    ]


divides_along("aten::addbmm", "aten::addr", axes=_sides, specials=PRODUCTS)


def _distances(named: Named) -> list[Axis]:
    """The rows of the first and of the second tensor, in a table of distances between them."""
    first, second = named["x1"], named["x2"]
    return [Axis("rows", first.shape[-2], {"x1": -2}, {0: -2}), Axis("columns", second.shape[-2], {"x2": -2}, {0: -1})]


divides_along("aten::_cdist_forward", axes=_distances)
