"""The negative log likelihood in parts: the targets' numbers are gathered by rows, and one call adds them up.

So the sum is made of the same numbers in the same order as in one piece. Gradients are cut by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import table
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides, divides_along
from ooc.pytorch.splitting.parts import Named, Piece, along, bind, own_bytes

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
IGNORED = -100

# Logarithms are [N, C, ...], targets [N, ...].
_of_losses = table("samples self target:0 -> 0", "rows self:2 target:1 -> 1")
_of_gathered = table("samples self index:0 -> 0", "rows self index:2 -> 2")
_of_gradient = table("samples self target grad_output:0 -> 0", "rows self:2 target grad_output:1 -> 2")


@divides("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The loss and the sum of the targets' weights."""
    given, target = named["self"], named["target"]
    if given.dim() < 2 or target.dim() == 0:
        return []
    if named["reduction"] == NONE:
        return along(context, op, named, _of_losses(named), multiples=(16, 1))
    # The last call needs all that was gathered.
    last = 2 * own_bytes(context, target.numel() * (target.element_size() + given.element_size()))
    found = given.new_empty(_column(target).shape, device="meta")
    gather = {"self": given, "dim": 1, "index": found.to(torch.int64), "sparse_grad": False}
    pieces = along(
        context, aten.gather.default, gather, _of_gathered(gather), multiples=(1,), results=[found],
        workspace=lambda operands, results: max(last - operands - results, results),
    )  # fmt: skip
    return [replace(each, how=f"targets gathered, {each.how}", run=partial(_loss, op, each.run)) for each in pieces]


def _column(target: Tensor) -> Tensor:
    """Targets as the logarithms lie, with one class."""
    return target.unsqueeze(1)


def _loss(op: OpOverload, gather: Callable[..., Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    named = bind(op, args, kwargs)
    given, target, weight = named["self"], named["target"], named["weight"]
    classes, ignored = given.shape[1], target == named["ignore_index"]
    _check(target, ignored, classes)
    index = target.clamp(0, classes - 1)
    found = gather(given, 1, _column(index))
    first = torch.where(ignored, IGNORED, 0)

    def total(values: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = op(values, first, None, reduction, IGNORED)
        return made

    if weight is None:
        return total(found, named["reduction"])
    weights = weight.index_select(0, index.flatten()).view(found.shape)
    loss, weight_sum = total(found * weights, SUM)[0], total(-weights, SUM)[0]
    return (loss / weight_sum if named["reduction"] == MEAN else loss), weight_sum


def _check(target: Tensor, ignored: Tensor, classes: int) -> None:
    """Raises IndexError for a target out of bounds, as the kernel does."""
    outside = ((target < 0) | (target >= classes)) & ~ignored
    if bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")


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
