"""Layer and group normalisation, forward and backward, and softmax. Batch normalisation is in batch_norm.py."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import Stage, divides, divides_along, with_mask
from ooc.pytorch.splitting.parts import PREFERRED, along, other_dimensions

ROWS = (16, 1)  # multiples

divides_along(
    "aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax",
    axes=lambda named: other_dimensions(named["self"].shape, named["dim"], ["self"]), multiples=ROWS,
)  # fmt: skip
divides_along(
    "aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
    axes=lambda named: other_dimensions(named["output"].shape, named["dim"], ["grad_output", "output"]), multiples=ROWS,
)  # fmt: skip


# ---- layer normalisation --------------------------------------------------------------------------------------------


def _rows(named: Named, tensors: list[str], results: int) -> list[Axis]:
    normalized = range(-len(named["normalized_shape"]), 0)
    return other_dimensions(named["input"].shape, normalized, tensors, results)


divides_along("aten::native_layer_norm", axes=lambda named: _rows(named, ["input"], 3), multiples=ROWS)
divides_along("aten::_fused_rms_norm", axes=lambda named: _rows(named, ["input"], 2), multiples=ROWS)


@divides("aten::native_layer_norm_backward")
def layer_norm_backward(context: Context, op: OpOverload, named: Named) -> list[Stage]:
    """The input's gradient by rows; those of weight and bias, sums over rows, by columns, so that sums stay whole."""
    rows = _rows(named, ["grad_out", "input", "mean", "rstd"], 1)
    columns = []
    if len(named["normalized_shape"]) == 1:
        tensors = dict.fromkeys(("grad_out", "input"), -1) | dict.fromkeys(("weight", "bias"), 0)
        size = named["normalized_shape"][0]
        columns = [Axis("columns", size, tensors, {1: 0, 2: 0}, entries={"normalized_shape": 0})]
    stages = []
    for name, results, axes, multiples in (
        ("data gradient", (0,), rows, ROWS),
        ("weight gradient", (1, 2), columns, PREFERRED),
    ):
        mask = [wanted and place in results for place, wanted in enumerate(named["output_mask"])]
        if any(mask):
            found = along(context, op, named, axes, multiples=multiples, before=_masked(mask))
            stages.append(Stage(name, results, with_mask(op, mask), found))
    return stages


def _masked(mask: list[bool]) -> Callable[[Named], Named]:
    return lambda named: named | {"output_mask": mask}


# ---- group normalisation --------------------------------------------------------------------------------------------


def _groups(named: Named, tensors: list[str], results: dict[int, int]) -> Axis:
    """The axis of groups of channels, in tensors [N, C, ...] and statistics [N, groups]."""
    takes = dict.fromkeys([*tensors, "mean", "rstd"], 1) | {"weight": 0, "bias": 0}
    return Axis("groups", named["group"], takes, results, ["group", "C"])


def _of_result(named: Named) -> list[Axis]:
    samples = Axis("samples", named["N"], {"input": 0}, {0: 0, 1: 0, 2: 0}, ["N"])
    return [samples, _groups(named, ["input"], {0: 1, 1: 1, 2: 1})]


def _of_gradients(named: Named) -> list[Axis]:
    """Groups alone: the sums for weight and bias go over samples."""
    return [_groups(named, ["grad_out", "input"], {0: 1, 1: 0, 2: 0})]


divides_along("aten::native_group_norm", axes=_of_result, multiples=(1,))
divides_along("aten::native_group_norm_backward", axes=_of_gradients, multiples=(1,))
