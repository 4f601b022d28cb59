"""The layers of a recorded iteration, as mmCNN's Algorithm 1 takes them (segments.py).

Every function is a layer, and so are the functions of a call that ran in parts, together. A convolution or a matrix
product is heavy. Its weights are what it reads of the variables that live across iterations and are not written; where
it reads several and nothing else, the first of them is its input. All that another layer reads is input.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swapd.splitting.segments import Layer
from swapd.trace.trace import READ, WRITE, Trace

HEAVY = ("aten::convolution", "aten::addmm", "aten::mm", "aten::linear")


def is_heavy(function: str) -> bool:
    """Whether a function of this name is a convolution or a matrix product."""
    return function.partition(".")[0] in HEAVY


def layers_of(trace: Trace, divided: Sequence[tuple[int, int]] = ()) -> tuple[list[Layer], list[int]]:
    """The layers, and which of them each divided call is.

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
