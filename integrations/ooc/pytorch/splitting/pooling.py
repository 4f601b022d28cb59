"""Pooling, interpolation and padding of planes, each of which is computed by itself: cut by samples and channels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.calls import its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides
from ooc.pytorch.splitting.parts import Named, Piece, along, as_tuple, results_of
from ooc.pytorch.splitting.tables import table

_OPERATORS = """
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
    avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_unpool2d reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle
""".split()
_TENSORS = "self input grad_output indices random_samples"
_WITHOUT_SAMPLES = {"1d": 2, "2d": 3, "3d": 4}  # dimensions of an argument that is one sample
_of_sample = table(f"channels {_TENSORS}:0 -> 0 0")
# The outermost dimension in memory is cut first: that is the samples, in every usual layout.
_of_images = table(f"samples {_TENSORS}:0 -> 0 0", f"channels {_TENSORS}:1 -> 1 1")


@divides(*(f"aten::{name}{ending}" for name in _OPERATORS for ending in ("", "_backward", ".vec")))
def planes(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The result for [N, C, ...] or [C, ...], by samples, then by channels."""
    name, tensors = op._schema.name, [one for one in _TENSORS.split() if isinstance(named.get(one), Tensor)]
    single = any(kind in name and named[tensors[0]].dim() == rank for kind, rank in _WITHOUT_SAMPLES.items())
    axes = _of_sample(named) if single else _of_images(named)[: 1 if "pixel" in name else 2]
    if named.get("input_size") is not None:
        axes = [replace(axis, entries={"input_size": d}) for d, axis in enumerate(axes)]
    results = _of_one_plane(context, op, named, tensors, len(axes)) or results_of(context, op, named)
    return along(context, op, named, axes, multiples=(16, 1), results=results)


def _of_one_plane(
    context: Context, op: OpOverload, named: Named, tensors: list[str], cut: int
) -> tuple[Tensor, ...] | None:
    """What the operator would return, without memory, from what it returns for one plane of zeros.

    The device "meta" would import PyTorch's symbolic shapes, which takes most of a second. None where layouts count.
    """
    leading = named[tensors[0]].shape[:cut]
    if cut < 2 or not all(named[name].is_contiguous() and named[name].shape[:cut] == leading for name in tensors):
        return None
    plane = dict(named)
    with context.plain(), its_own_errors():
        for name in tensors:
            plane[name] = torch.zeros(1, 1, *named[name].shape[2:], dtype=named[name].dtype)
        if named.get("input_size") is not None:
            plane["input_size"] = [1, 1, *named["input_size"][2:]]
        found = as_tuple(op(**plane))
        return tuple(torch.empty(*leading, *t.shape[2:], dtype=t.dtype, device="meta") for t in found)
