"""Layer and group normalisation in parts, forward and backward. Batch normalisation is in batch_norm.py."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import Stage, divides, divides_stages, with_mask
from ooc.pytorch.splitting.parts import Axis, Named, Piece, along

# ---- layer normalisation --------------------------------------------------------------------------------------------


def _leading(shape: Any, normalized: Any) -> int:
    return len(shape) - len(normalized)


def _row_axes(named: Named, tensors: list[str], results: list[int]) -> list[Axis]:
    shape = named["input"].shape
    return [
        Axis(f"dimension {d}", shape[d], dict.fromkeys(tensors, d), dict.fromkeys(results, d))
        for d in range(_leading(shape, named["normalized_shape"]))
    ]


@divides("aten::native_layer_norm")
def layer_norm(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Result, means and inverse deviations of an input [.., normalized], by rows."""
    return along(context, op, named, _row_axes(named, ["input"], [0, 1, 2]), multiples=(16, 1))


@divides("aten::_fused_rms_norm")
def rms_norm(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Result and inverse norms of an input [.., normalized], by rows."""
    return along(context, op, named, _row_axes(named, ["input"], [0, 1]), multiples=(16, 1))


@divides_stages("aten::native_layer_norm_backward")
def layer_norm_backward(context: Context, op: OpOverload, named: Named) -> list[Stage]:
    """The input's gradient by rows; those of weight and bias, sums over rows, by columns, so that sums stay whole."""
    mask, stages = named["output_mask"], []
    if mask[0]:
        axes = _row_axes(named, ["grad_out", "input", "mean", "rstd"], [0])
        call = named | {"output_mask": [True, False, False]}
        found = along(context, op, call, axes, multiples=(16, 1), before=_masked([True, False, False]))
        stages.append(Stage("data gradient", (0,), with_mask(op, [True, False, False]), found))
    if mask[1] or mask[2]:
        wanted = [False, mask[1], mask[2]]
        before = _masked(wanted)
        axes = []
        if len(named["normalized_shape"]) == 1:
            tensors = dict.fromkeys(("grad_out", "input"), -1) | dict.fromkeys(("weight", "bias"), 0)
            size = named["normalized_shape"][0]
            axes = [Axis("columns", size, tensors, {1: 0, 2: 0}, entries={"normalized_shape": 0})]
        found = along(context, op, named | {"output_mask": wanted}, axes, before=before)
        stages.append(Stage("weight gradient", (1, 2), with_mask(op, wanted), found))
    return stages


def _masked(mask: list[bool]) -> Any:
    return lambda named: named | {"output_mask": mask}


# ---- group normalisation --------------------------------------------------------------------------------------------


def _group_axes(named: Named, tensors: list[str], gradients: bool) -> list[Axis]:
    """The axes of samples and of groups of channels, in tensors [N, C, ...] and statistics [N, groups]."""
    groups, channels, samples = named["group"], named["C"], named["N"]
    unit = channels // groups
    of_group = {name: (1, unit) for name in tensors}
    of_group |= {"weight": (0, unit), "bias": (0, unit), "mean": (1, 1), "rstd": (1, 1)}
    counts = {"group": 1, "C": unit}
    takes = {name: place for name, place in of_group.items() if isinstance(named.get(name), Tensor)}
    gives = {0: (1, unit), 1: (0, unit), 2: (0, unit)} if gradients else {0: (1, unit), 1: (1, 1), 2: (1, 1)}
    by_groups = Axis("groups", groups, takes, gives, counts)
    statistics = [name for name in ("mean", "rstd") if name in takes]
    by_samples = Axis("samples", samples, dict.fromkeys([*tensors, *statistics], 0), {0: 0, 1: 0, 2: 0}, {"N": 1})
    return [by_groups] if gradients else [by_samples, by_groups]


@divides("aten::native_group_norm")
def group_norm(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Result, means and inverse deviations of an input [N, C, ...], by samples, then by groups."""
    return along(context, op, named, _group_axes(named, ["input"], False), multiples=(1,))


@divides_stages("aten::native_group_norm_backward")
def group_norm_backward(context: Context, op: OpOverload, named: Named) -> list[Stage]:
    """All three gradients, by groups alone: the sums for weight and bias go over samples."""
    axes = _group_axes(named, ["grad_out", "input"], True)
    size = math.prod(named["input"].shape[2:])
    found = along(context, op, named | {"HxW": size}, axes, multiples=(1,))
    return [Stage("", (0, 1, 2), op, found)]
