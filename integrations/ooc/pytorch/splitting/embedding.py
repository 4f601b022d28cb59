"""Tables of rows larger than the device: embeddings, selections of rows, and the gradients of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import beside
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides
from ooc.pytorch.splitting.grids import spans
from ooc.pytorch.splitting.parts import Named, Piece, along, bytes_of, compact, divisions, own_bytes, view_bytes


@divides("aten::embedding", "aten::index_select", moves=True)
def select_rows(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Selects rows of a table [n, ...], by blocks of results and, for each, the blocks of the table with its rows."""
    source, wanted = ("weight", "indices") if "weight" in named else ("self", "index")
    table, indices = named[source], named[wanted]
    if table.dim() < 1 or named.get("dim", 0) % table.dim() != 0:
        return along(context, op, named, beside(named, source, named["dim"]), multiples=(1,))
    row = bytes_of(table) // max(table.shape[0], 1)
    lengths = (indices.numel(), table.shape[0])

    def need(sizes: Sequence[int]) -> int:
        return 2 * view_bytes(context, sizes[0] * row) + view_bytes(context, sizes[1] * row)

    def run(sizes: Sequence[int], call: Named) -> Tensor:
        rows = _gathered(context, call[source], call[wanted].reshape(-1), sizes)
        return rows.view(*call[wanted].shape, *rows.shape[1:]) if source == "weight" else rows

    half = [min(lengths[0], max(1, (context.part_bytes // 4 - 2 * context.chunk_bytes) // max(row, 1))), 1]
    return divisions(context, op, ("results", "table"), lengths, need, run, floors=[half]) if row else []


def _gathered(context: Context, table: Tensor, indices: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows at the indexes, in blocks of so many, from blocks of the table of so many rows."""
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= table.shape[0]):
        raise IndexError("index out of range in self")
    result = context.empty(size=[indices.numel(), *table.shape[1:]], dtype=table.dtype)
    for start, length in spans(indices.numel(), max(sizes[0], 1)):
        wanted = indices.narrow(0, start, length)
        of_block = wanted.div(sizes[1], rounding_mode="floor")
        for number in torch.unique(of_block).tolist():
            places, first = (of_block == number).nonzero().flatten(), int(number) * sizes[1]
            block = compact(context, table.narrow(0, first, min(sizes[1], table.shape[0] - first)))
            rows = block.index_select(0, wanted[places] - first)
            begin, end = int(places[0]), int(places[-1]) + 1
            target = result.narrow(0, start + begin, end - begin)
            if places.numel() == end - begin:
                context.move(target, rows)
            else:
                target.index_copy_(0, places - begin, rows)
    return result


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
    """Runs `embedding_dense_backward` for blocks of the table, with the gradients of their rows in their order."""
    indices, padding = named["indices"].reshape(-1), named["padding_idx"]
    grad = named["grad_output"].reshape(indices.numel(), -1)
    result = context.empty(size=[named["num_weights"], grad.shape[1]], dtype=grad.dtype)
    for first, rows in spans(result.shape[0], sizes[0]):
        places = ((indices >= first) & (indices < first + rows)).nonzero().flatten()
        own = indices[places] - first
        skipped = padding - first if first <= padding < first + rows else -1
        for column, width in spans(grad.shape[1], sizes[1]):
            block = (context.part_bytes - 3 * context.chunk_bytes) // (2 * width * grad.element_size())
            part = _gathered(context, grad.narrow(1, column, width), places, (places.numel(), max(block, 1)))
            made = op(part, own, rows, skipped, named["scale_grad_by_freq"])
            context.move(result.narrow(0, first, rows).narrow(1, column, width), made)
    return result
