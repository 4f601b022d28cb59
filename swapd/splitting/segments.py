"""Layers in parts, and parts of weights ahead of time: Algorithm 1 of mmCNN (Li et al. 2019, section 3.2).

A *segment* ends with a heavy layer (a convolution or a fully connected one) and begins after the heavy layer before. As
its first layer starts, the weights of its last layer start to come in, as far as there is room: 1 / `conv_number` of
them, or none if `conv_number` is 0. Each layer runs in `self_number` parts. What the paper leaves open was chosen so
that its Tables 3, 4 and 6 come out (docs/splitting.md).

In a recorded iteration every function is a layer, and so are the functions of a call that ran in parts, together. A
convolution or a matrix product is heavy. Its weights are what it reads of the variables that live across iterations and
are not written; where it reads several and nothing else, the first of them is its input. All else that is read is
input.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swapd.splitting.limits import LimitTooSmallError
from swapd.trace.trace import READ, WRITE, Trace

HEAVY = ("aten::convolution", "aten::addmm", "aten::mm", "aten::linear")
MOST_PREFETCH_PARTS = 5  # pn_max: in the paper's tables a prefetch in 5 parts is made, one in 7 is not


@dataclass(frozen=True)
class Layer:
    """What a layer holds while it runs. It can be divided to the byte."""

    name: str
    input_bytes: int  # of a layer that is not heavy, with its weights
    output_bytes: int  # 0 where it works in place
    weight_bytes: int = 0
    heavy: bool = False  # a convolution or fully connected

    @property
    def activation_bytes(self) -> int:
        """Of input and output, which are divided alike."""
        return self.input_bytes + self.output_bytes


@dataclass(frozen=True)
class LayerStep:
    """How one layer runs, and what it starts to bring in."""

    self_number: int  # parts that it runs in
    conv_number: int  # parts of which one is prefetched as this layer starts; 0 if no prefetch starts here
    activation_part_bytes: int
    prefetched_part_bytes: int  # of the segment's last layer, there or under way while this layer runs
    weight_part_bytes: int  # of its own weights, brought in as it runs; 0 where they were prefetched

    @property
    def peak_bytes(self) -> int:
        """The bytes of this layer and of the prefetch together."""
        return self.activation_part_bytes + self.prefetched_part_bytes + self.weight_part_bytes


def segments_of(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """The segments of layers (line 1 of Algorithm 1). Layers after the last heavy one are a segment of their own."""
    ends = [number for number, layer in enumerate(layers, 1) if layer.heavy]
    return [tuple(layers[begin:end]) for begin, end in pairwise([0, *ends, len(layers)]) if begin < end]


def schedule_layers(layers: Sequence[Layer], limit_bytes: int) -> list[LayerStep]:
    """Algorithm 1: for each layer its numbers of parts, so that `peak_bytes` is nowhere above `limit_bytes`.

    Raises:
        LimitTooSmallError: there is no room for a byte of weights beside one of an activation.
    """
    if layers and limit_bytes < 2:
        raise LimitTooSmallError("a layer", limit_bytes, 2)
    return [step for segment in segments_of(layers) for step in _steps(segment, limit_bytes)]  # line 2


def _steps(segment: Sequence[Layer], limit_bytes: int) -> list[LayerStep]:
    # Line 3: pn and mem_max. The weights of a heavy layer have a byte at least.
    parts = [max(_ceil(layer.activation_bytes, limit_bytes - bool(layer.weight_bytes)), 1) for layer in segment]
    held = [_ceil(layer.activation_bytes, n) for layer, n in zip(segment, parts)]
    weights, room = segment[-1].weight_bytes, limit_bytes - max(held)
    conv_number = _ceil(weights, room) if weights and room else 0  # lines 4 to 6
    if conv_number > MOST_PREFETCH_PARTS:  # line 8
        conv_number = 0
    weight_parts = conv_number or (_ceil(weights, limit_bytes - held[-1]) if weights else 1)  # line 9
    part_bytes = _ceil(weights, weight_parts)
    parts[-1] = max(parts[-1], weight_parts)
    steps = [LayerStep(n, 0, size, part_bytes if conv_number else 0, 0) for n, size in zip(parts, held)]
    steps[-1] = replace(steps[-1], weight_part_bytes=0 if conv_number else part_bytes)
    steps[0] = replace(steps[0], conv_number=conv_number)
    return steps


def _ceil(size_bytes: int, by: int) -> int:
    """The bytes of the largest of `by` parts; and the number of parts of which each fits in `by` bytes."""
    return -(-size_bytes // by)


def is_heavy(function: str) -> bool:
    """Whether a function of this name is a convolution or a matrix product."""
    return function.partition(".")[0] in HEAVY


def layers_of(trace: Trace, divided: Sequence[tuple[int, int]] = ()) -> tuple[list[Layer], list[int]]:
    """The layers of a recorded iteration, and which of them each divided call is.

    Args:
        trace: of whole variables, of an iteration without a backward pass.
        divided: of each call that ran in parts its first function, and the one after its last; in order, not empty.
    """
    lasting = (trace.born < 0) & (trace.died == trace.functions)
    lasting[trace.use_variables[(trace.use_flags & WRITE) != 0]] = False
    inside = {function for begin, stop in divided for function in range(begin + 1, stop)}
    starts = [function for function in range(trace.functions) if function not in inside]
    layers = [_layer(trace, lasting, first, end) for first, end in pairwise([*starts, trace.functions])]
    return layers, [bisect_left(starts, begin) for begin, _ in divided]


def _layer(trace: Trace, lasting: NDArray[np.bool_], first: int, end: int) -> Layer:
    """The functions from `first` to before `end` as a layer. What is made and freed among them is no part of it."""
    rows = slice(int(trace.use_offsets[first]), int(trace.use_offsets[end]))
    used, flags = trace.use_variables[rows], trace.use_flags[rows]
    before = trace.born[used] < first
    read = list(dict.fromkeys(used[before & ((flags & READ) != 0)].tolist()))
    written = set(used[before & ((flags & WRITE) != 0)].tolist())
    made = np.flatnonzero((trace.born >= first) & (trace.born < end) & (trace.died >= end)).tolist()
    heavy = next((name for name in trace.function_names[first:end] if is_heavy(name)), None)
    kept = [v for v in read if lasting[v]] if heavy else []
    own = kept[1:] if 1 < len(kept) == len(read) else kept  # a small input is not recorded
    inputs = set(read) - set(own)

    def size(variables: set[int] | list[int]) -> int:
        return int(trace.variable_bytes[list(variables)].sum())

    return Layer(
        f"{first} {heavy or trace.function_names[first]}",
        input_bytes=size(inputs),
        output_bytes=size({*made, *written} - inputs),
        weight_bytes=size(own),
        heavy=heavy is not None,
    )
