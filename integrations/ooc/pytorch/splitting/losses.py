"""The negative log likelihood in parts: the targets' numbers are gathered by rows, and one call adds them up.

So the sum is made of the same numbers in the same order as in one piece. Gradients are cut by rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.blocks import compact
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides, divides_along
from ooc.pytorch.splitting.grids import boxes
from ooc.pytorch.splitting.parts import Piece, along, divisions, own_bytes, view_bytes

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
IGNORED = -100


def _axes(named: Named, result: int, per_element: Sequence[str]) -> list[Axis]:
    """The axes of samples and of rows of images, in logarithms [N, C, ...] and in tensors like the targets, [N, ...].

    `result`: whether the result is like the logarithms (1) or like the targets (0).
    """
    return [
        Axis(name, size, {"self": own} | dict.fromkeys(per_element, d), {0: own if result else d})
        for name, size, d, own in zip(("samples", "rows"), named["target"].shape, (0, 1), (0, 2))
    ]


@divides("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The loss and the sum of the targets' weights, for logarithms [N, C, ...] and targets [N, ...]."""
    given, target = named["self"], named["target"]
    if given.dim() < 2 or target.dim() == 0:
        return []
    if named["reduction"] == NONE:
        return along(context, op, named, _axes(named, 0, ["target"]), multiples=(16, 1))
    lengths = target.shape[:2]
    each = given.numel() // max(1, math.prod(lengths)) * given.element_size()
    of_target = target.numel() // max(1, math.prod(lengths)) * (target.element_size() + given.element_size())

    # The last call needs all that was gathered.
    last = 2 * own_bytes(context, target.numel() * (target.element_size() + given.element_size()))

    def need(sizes: Sequence[int]) -> int:
        elements = math.prod(sizes)
        return max(last, view_bytes(context, elements * each) + 2 * own_bytes(context, elements * of_target))

    found = divisions(context, op, ("samples", "rows"), lengths, need, partial(_loss, context, op))
    return [replace(piece, how=f"targets gathered, {piece.how}") for piece in found]


def _loss(context: Context, op: OpOverload, sizes: Sequence[int], named: Named) -> tuple[Tensor, Tensor]:
    given, target, weight = named["self"], named["target"], named["weight"]
    classes, ignored = given.shape[1], target == named["ignore_index"]
    _check(target, ignored, classes)
    index = target.clamp(0, classes - 1)
    found = context.empty(size=[*target.shape[:1], 1, *target.shape[1:]], dtype=given.dtype)
    for box in boxes(target.shape[:2], sizes):
        part, columns, into = given, index.unsqueeze(1), found
        for d, (start, length) in enumerate(box):
            own = d if d == 0 else d + 1
            part, columns, into = (t.narrow(own, start, length) for t in (part, columns, into))
        context.move(into, compact(context, part).gather(1, columns))
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


def _of_gradient(named: Named) -> list[Axis]:
    if named["self"].dim() < 2:
        return []
    return _axes(named, 1, ["target", "grad_output"] if named["reduction"] == NONE else ["target"])


def _sizes_only(named: Named) -> Named:
    given: Tensor = named["self"]
    return named | {"self": torch.empty(1, dtype=given.dtype, device=given.device).expand(given.shape)}


# Of the logarithms only the sizes are looked at.
divides_along(
    "aten::nll_loss_backward",
    "aten::nll_loss2d_backward",
    axes=_of_gradient,
    multiples=(16, 1),
    before=_sizes_only,
    unread=("self",),
)
