"""What indexes select: rows of tables larger than the device, elements, and numbers of targets; and the gradients.

The negative log likelihood gathers its targets' numbers by rows, and one call adds them up: so the sum is made of the
same numbers in the same order as in one piece.
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
from ooc.pytorch.splitting.axes import Named, spans
from ooc.pytorch.splitting.blocks import compact
from ooc.pytorch.splitting.calls import CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import on_meta
from ooc.pytorch.splitting.dividers import divides, divides_along
from ooc.pytorch.splitting.geometry import rounded
from ooc.pytorch.splitting.movement import strided
from ooc.pytorch.splitting.parts import along, bind, divisions
from ooc.pytorch.splitting.tables import beside, table

aten = torch.ops.aten


@divides("aten::embedding", "aten::index_select", moves=True)
def select_rows(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """Selects rows of a table [n, ...], by blocks of results and, for each, the blocks of the table with its rows."""
    source, wanted = ("weight", "indices") if "weight" in named else ("self", "index")
    given = named[source]
    if given.dim() < 1 or named.get("dim", 0) % given.dim() != 0:
        return along(context, op, named, beside(named, source, named["dim"]), multiples=(1,))
    row = given.nbytes // max(given.shape[0], 1)
    lengths = (named[wanted].numel(), given.shape[0])

    def need(sizes: Sequence[int]) -> int:
        return 2 * rounded(sizes[0] * row, context.chunk_bytes) + rounded(sizes[1] * row, context.chunk_bytes)

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


@registry.handler("aten::index.Tensor")
def index(context: Context, source: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Elements at places that one tensor of indexes or of truth values gives, which is a selection of rows."""
    strided(context, [source])
    given = [(d, tensor) for d, tensor in enumerate(indices) if tensor is not None]
    if len(given) != 1 or not source.is_contiguous():
        raise CannotSplit("it has several tensors of indexes, or is not contiguous")
    (d, places), rows = given[0], source
    if places.dtype in (torch.bool, torch.uint8):
        if places.shape != source.shape[d : d + places.dim()]:
            on_meta(context, aten.index.Tensor, source, indices)  # raises, and says what is wrong
        rows = source.flatten(d, d + places.dim() - 1) if places.dim() > 1 else source
        places = places.flatten().nonzero().flatten()
    wanted = places.flatten().to(torch.int64)
    size = rows.shape[d]
    if wanted.numel() and not -size <= int(wanted.min()) <= int(wanted.max()) < size:
        raise IndexError(f"index is out of bounds for dimension {d} with size {size}")
    made: Any = aten.index_select(rows, d, torch.where(wanted < 0, wanted + size, wanted))
    context.used("selected rows", 1)
    return made.view(*rows.shape[:d], *places.shape, *rows.shape[d + 1 :])  # type: ignore[no-any-return]


@divides("aten::embedding_dense_backward")
def embedding_backward(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """The table's gradient, by its rows and columns; the gradients of each row are added up in their order."""
    grad, number, rows = named["grad_output"], named["indices"].numel(), named["num_weights"]
    columns, item = grad.shape[-1], grad.element_size()

    def need(sizes: Sequence[int]) -> int:
        gathered, made = number * sizes[1] * item, sizes[0] * sizes[1] * item
        return context.own_bytes(gathered) + context.own_bytes(made) + rounded(8 * number, context.chunk_bytes)

    def run(sizes: Sequence[int], call: Named) -> Tensor:
        indices, padding = call["indices"].reshape(-1), call["padding_idx"]
        given = call["grad_output"].reshape(number, columns)
        result = context.empty(size=[rows, columns], dtype=given.dtype)
        for first, length in spans(rows, sizes[0]):
            places = ((indices >= first) & (indices < first + length)).nonzero().flatten()
            own = indices[places] - first
            skipped = padding - first if first <= padding < first + length else -1
            for column, width in spans(columns, sizes[1]):
                block = max((context.part_bytes - 3 * context.chunk_bytes) // (2 * width * item), 1)
                part = _gathered(context, given.narrow(1, column, width), places, (number, block))
                made = op(part, own, length, skipped, call["scale_grad_by_freq"])
                context.move(result.narrow(0, first, length).narrow(1, column, width), made)
        return result

    floors = [(min(rows, 64), columns), (64, 16)]
    return divisions(context, op, ("rows", "columns"), (rows, columns), need, run, floors=floors, multiples=(16, 1))


# ---- losses ---------------------------------------------------------------------------------------------------------

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
IGNORED = -100

# Logarithms are [N, C, ...], targets [N, ...].
_of_losses = table("samples self target:0 -> 0", "rows self:2 target:1 -> 1")
_of_gathered = table("samples self index:0 -> 0", "rows self index:2 -> 2")
_of_gradient = table("samples self target grad_output:0 -> 0", "rows self:2 target grad_output:1 -> 2")


@divides("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """The loss and the sum of the targets' weights."""
    given, target = named["self"], named["target"]
    if given.dim() < 2 or target.dim() == 0:
        return []
    if named["reduction"] == NONE:
        return along(context, op, named, _of_losses(named), multiples=(16, 1))
    # The last call needs all that was gathered.
    last = 2 * context.own_bytes(target.numel() * (target.element_size() + given.element_size()))
    size = target.unsqueeze(1).shape
    index, found = (torch.empty(size, dtype=tensor.dtype, device="meta") for tensor in (target, given))
    gather = {"self": given, "dim": 1, "index": index, "sparse_grad": False}
    pieces = along(
        context, aten.gather.default, gather, _of_gathered(gather), multiples=(1,), results=[found],
        workspace=lambda part: max(last - part.operands - part.results, part.results),
    )  # fmt: skip
    return [replace(each, how=f"targets gathered, {each.how}", run=partial(_loss, op, each.run)) for each in pieces]


def _loss(op: OpOverload, gather: Callable[..., Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    named = bind(op, args, kwargs)
    given, target, weight = named["self"], named["target"], named["weight"]
    classes, ignored = given.shape[1], target == named["ignore_index"]
    outside = ((target < 0) | (target >= classes)) & ~ignored
    if bool(outside.any()):  # as the kernel says
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
    index = target.clamp(0, classes - 1)
    found = gather(given, 1, index.unsqueeze(1))
    first = torch.where(ignored, IGNORED, 0)
    if weight is None:
        return op(found, first, None, named["reduction"], IGNORED)  # type: ignore[no-any-return]
    weights = weight.index_select(0, index.flatten()).view(found.shape)
    loss, weight_sum = (op(each, first, None, SUM, IGNORED)[0] for each in (found * weights, -weights))
    return (loss / weight_sum if named["reduction"] == MEAN else loss), weight_sum


def _sizes_only(named: Named) -> Named:
    given: Tensor = named["self"]
    return named | {"self": torch.empty(1, dtype=given.dtype, device=given.device).expand(given.shape)}


# Of the logarithms only the sizes are looked at.
divides_along(
    "aten::nll_loss_backward",
    "aten::nll_loss2d_backward",
    axes=lambda named: _of_gradient(named) if named["self"].dim() > 1 else [],
    multiples=(16, 1),
    before=_sizes_only,
    unread=("self",),
)
