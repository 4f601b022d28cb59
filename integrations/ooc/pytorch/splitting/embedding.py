"""Tables of rows larger than the device: embeddings, their gradients, other ways to select and to spread elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.blocks import compact
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides, divides_along
from ooc.pytorch.splitting.grids import spans
from ooc.pytorch.splitting.parts import Piece, along, bytes_of, divisions, other_dimensions, own_bytes, view_bytes

aten = torch.ops.aten


@divides("aten::embedding", "aten::index_select", moves=True)
def select_rows(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Selects rows of a table [n, ...], by blocks of results and, for each, the blocks of the table with its rows."""
    table, indices = (named["weight"], named["indices"]) if "weight" in named else (named["self"], named["index"])
    if table.dim() < 1 or named.get("dim", 0) % table.dim() != 0:
        return along(context, op, named, other_dimensions(table.shape, named["dim"], ["self"]), multiples=(1,))
    row = bytes_of(table) // max(table.shape[0], 1)
    lengths = (indices.numel(), table.shape[0])

    def need(sizes: Sequence[int]) -> int:
        return 2 * view_bytes(context, sizes[0] * row) + view_bytes(context, sizes[1] * row)

    def run(sizes: Sequence[int], call: Named) -> Tensor:
        source, wanted = (call["weight"], call["indices"]) if "weight" in call else (call["self"], call["index"])
        made = wanted.shape if "weight" in call else [wanted.numel()]
        result = context.empty(size=[*made, *source.shape[1:]], dtype=source.dtype)
        _gather_rows(context, source, wanted.reshape(-1), result.view(-1, *source.shape[1:]), sizes)
        return result

    half = [min(lengths[0], max(1, (context.part_bytes // 4 - 2 * context.chunk_bytes) // max(row, 1))), 1]
    return divisions(context, op, ("results", "table"), lengths, need, run, floors=[half]) if row else []


def _gather_rows(context: Context, table: Tensor, indices: Tensor, result: Tensor, sizes: Sequence[int]) -> None:
    number = table.shape[0]
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= number):
        raise IndexError("index out of range in self")
    for start, length in spans(indices.numel(), sizes[0]):
        target, wanted = result.narrow(0, start, length), indices.narrow(0, start, length)
        for first, places in _by_block(wanted, sizes[1]):
            block = compact(context, table.narrow(0, first, min(sizes[1], number - first)))
            rows = block.index_select(0, wanted[places] - first)
            target.index_copy_(0, places, rows) if places.numel() < length else context.move(target, rows)


def _by_block(indices: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """The first row of each needed block of the table, and the places in `indices` that point into it, in order."""
    block = indices.div(size, rounding_mode="floor")
    for number in torch.unique(block).tolist():
        yield int(number) * size, (block == number).nonzero().flatten()


@divides("aten::embedding_dense_backward")
def embedding_backward(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The table's gradient, by its rows and columns; the gradients of each row are added up in their order."""
    grad, indices, rows = named["grad_output"], named["indices"], named["num_weights"]
    columns, item, number = grad.shape[-1], grad.element_size(), indices.numel()
    lengths = (rows, columns)

    def need(sizes: Sequence[int]) -> int:
        gathered, made = number * sizes[1] * item, sizes[0] * sizes[1] * item
        return own_bytes(context, gathered) + own_bytes(context, made) + view_bytes(context, 8 * number)

    floors, run = [(min(rows, 64), columns), (64, 16)], partial(_spread, context, op)
    return divisions(context, op, ("rows", "columns"), lengths, need, run, floors=floors, multiples=(16, 1))


def _spread(context: Context, op: OpOverload, sizes: Sequence[int], named: Named) -> Tensor:
    """Runs `embedding_dense_backward` for blocks of the table."""
    indices, padding = named["indices"].reshape(-1), named["padding_idx"]
    grad = named["grad_output"].reshape(indices.numel(), -1)
    result = context.empty(size=[named["num_weights"], grad.shape[1]], dtype=grad.dtype)
    for first, rows in spans(result.shape[0], sizes[0]):
        places = ((indices >= first) & (indices < first + rows)).nonzero().flatten()
        own = indices[places] - first
        skipped = padding - first if first <= padding < first + rows else -1
        for column, width in spans(grad.shape[1], sizes[1]):
            part = _rows(context, grad.narrow(1, column, width), places)
            made = op(part, own, rows, skipped, named["scale_grad_by_freq"])
            context.move(result.narrow(0, first, rows).narrow(1, column, width), made)
    return result


def _rows(context: Context, grad: Tensor, places: Tensor) -> Tensor:
    """Gathers the rows of a gradient at `places`, in their order, block by block."""
    made = context.empty(size=[places.numel(), grad.shape[1]], dtype=grad.dtype)
    row = 2 * max(1, grad.shape[1] * grad.element_size())
    size = max(1, (context.part_bytes - 3 * context.chunk_bytes) // row)
    done = 0
    for start, length in spans(grad.shape[0], size):
        here = places[(places >= start) & (places < start + length)] - start
        if here.numel():
            block = compact(context, grad.narrow(0, start, length))
            made.narrow(0, done, here.numel()).copy_(block.index_select(0, here))
            done += here.numel()
    return made


def _unselected(named: Named) -> list[Axis]:
    """The dimensions in which all tensors are of one size, but the one that is gathered or scattered along."""
    tensors = [name for name in ("self", "index", "src") if isinstance(named.get(name), Tensor)]
    shapes = [named[name].shape for name in tensors]
    unlike = [d for d, n in enumerate(shapes[0]) if any(shape[d] != n for shape in shapes)]
    return other_dimensions(shapes[0], [named["dim"], *unlike], tensors)


divides_along(
    "aten::gather", "aten::scatter_add", "aten::scatter.src", "aten::scatter.value", "aten::scatter_reduce.two",
    axes=_unselected, multiples=(1,),
)  # fmt: skip


def _beside(named: Named) -> list[Axis]:
    """The dimensions but that in which the index counts."""
    tensors = [name for name in ("self", "source") if isinstance(named.get(name), Tensor)]
    return other_dimensions(named["self"].shape, named["dim"], tensors)


divides_along(
    "aten::index_add", "aten::index_copy", "aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor",
    axes=_beside, multiples=(1,),
)  # fmt: skip
divides_along(
    "aten::bucketize.Tensor", axes=lambda named: other_dimensions(named["self"].shape, [], ["self"]), multiples=(1,)
)
