"""Convolutions by several algorithms, whole or a micro-batch at a time: what is measured and what is then run.

A convolution has three kernels, with micro-cuDNN's names (section II): *Forward*, *BackwardData* and *BackwardFilter*.
A kernel is a call of the operator that is cut along its samples; those of BackwardFilter are added up.

On a CPU the algorithms are these; products of spectra (FFT) were never the fastest of what was measured, and went:

- `own`: PyTorch's own, which is oneDNN's where `torch._C._select_conv_backend` says so. It serves every convolution.
- `own in N`: the same for one block of channels after the other, of the result or of the gradient. Its workspace is
  smaller where a copy of the filters is most of it.
- `own summed in N`: BackwardData for one block of channels of the result's gradient after the other; the input's is
  their sum. Unlike blocks of the input's channels, these have filters that lie together and need no copy.
- `im2col`: every patch becomes a column, and the convolution one matrix product for each sample (Chellapilla, Puri and
  Simard 2006, "High performance convolutional neural networks for document processing"). For images, without groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.blocks import Blocks, as_tuple
from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.convolution import full, kernel_axes, kernel_results
from ooc.pytorch.splitting.geometry import layout
from ooc.pytorch.splitting.memory import NO_LIMIT, Memory
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.registry import overload_of

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "Forward", "BackwardData", "BackwardFilter"
KINDS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)
MEMORY = Memory(NO_LIMIT, 1, None)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Algorithm:
    """A way to compute kernels."""

    name: str
    run: Callable[..., Sequence[Any]]  # with the operator's arguments by name; gives all its results
    suits: Callable[[Kernel], bool] = lambda kernel: True


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call."""

    operator: str
    named: Named  # all arguments; `output_mask` asks for what the kernel computes

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        mask = self.named.get("output_mask")
        return FORWARD if mask is None else BACKWARD_DATA if mask[0] else BACKWARD_FILTER

    @property
    def samples(self) -> Axis:
        """What micro-batches are cut along."""
        return kernel_axes(self.named)[0]

    @property
    def shapes(self) -> str:
        """What the costs of micro-batches depend on: the arguments for one sample, as text."""
        return Call(self.operator, (), self.part(0, 1)).shapes

    def part(self, begin: int, size: int) -> Named:
        """The arguments for some of the samples."""
        axis = self.samples
        return {
            name: axis.part(MEMORY, name, value, begin, size) if isinstance(value, Tensor) else value
            for name, value in self.named.items()
        }

    def run(self, parts: Sequence[tuple[int, Algorithm]]) -> Sequence[Any]:
        """The operator's results, computed part by part; a part is a number of samples and an algorithm."""
        algorithms = iter([algorithm for _, algorithm in parts])
        if len(parts) == 1:
            return next(algorithms).run(**self.named)
        spans, begin = [], 0
        for size, _ in parts:
            spans.append((begin, size))
            begin += size
        blocks = Blocks(MEMORY, lambda **part: next(algorithms).run(**part), kernel_results(self.named))
        return as_tuple(blocks.run([(self.samples, spans)], self.named))


def kernels_of(call: Call) -> list[Kernel]:
    """The kernels of a call of a convolution; none if none of ours compute it."""
    op = overload_of(call.operator)
    assert op is not None
    named = bind(op, call.arguments, call.keywords)
    x, w = named["input"], named["weight"]
    usual = x.layout == w.layout == torch.strided and x.dtype == w.dtype and x.dtype.is_floating_point
    if not usual or x.dim() != w.dim() or not 3 <= x.dim() <= 5 or not x.numel():
        return []
    named = full(named)
    if "output_mask" not in named:
        return [Kernel(call.operator, named)]
    data, filters, bias = named["output_mask"]
    if bias and not filters:
        return []
    masks = [[True, False, False]] * data + [[False, True, bias]] * filters
    sizes = {True: named["bias_sizes"], False: None}  # without the bias's gradient they make no difference
    return [Kernel(call.operator, named | {"output_mask": mask, "bias_sizes": sizes[mask[2]]}) for mask in masks]


def _own(**named: Any) -> Sequence[Any]:
    return as_tuple((_aten.convolution_backward if "output_mask" in named else _aten.convolution)(**named))


def _in_blocks(number: int, /, **named: Any) -> Sequence[Any]:
    """PyTorch's own for one block of channels after the other."""
    channels = kernel_axes(named)[2]
    spans = channels.spans(-(-channels.length // number))
    return as_tuple(Blocks(MEMORY, _own, kernel_results(named)).run([(channels, spans)], named))


def _has_blocks(number: int, kernel: Kernel) -> bool:
    return kernel.named["groups"] == 1 and kernel_axes(kernel.named)[2].length >= 8 * number


def _summed(number: int, /, **named: Any) -> Sequence[Any]:
    """The input's gradient as a sum over blocks of the other's channels."""
    channels = Axis("channels", named["weight"].shape[0], {"grad_output": 1, "weight": 0}, {}, sums=True)
    spans = channels.spans(-(-channels.length // number))
    return as_tuple(Blocks(MEMORY, _own, kernel_results(named), unread=("input",)).run([(channels, spans)], named))


def _has_sums(number: int, kernel: Kernel) -> bool:
    named = kernel.named
    usual = kernel.kind == BACKWARD_DATA and named["groups"] == 1 and not named["transposed"]
    large = named["weight"].numel() > named["input"].numel()  # else the sums are most of the work
    return usual and large and bool(named["weight"].shape[0] >= 8 * number)


# ---- a matrix product -----------------------------------------------------------------------------------------------


def _im2col(**named: Any) -> Sequence[Any]:
    """The results by products with im2col matrices [samples, taps, positions]."""
    mask: Sequence[bool] = named.get("output_mask", [])
    weight, grad = named["weight"], named.get("grad_output")
    window = weight.shape[2:], named["dilation"], named["padding"], named["stride"]
    filters = weight.view(1, weight.shape[0], -1)
    samples, size = named["input"].shape[0], named["input"].shape[2:]
    if grad is None:
        made = torch.bmm(filters.expand(samples, -1, -1), _columns(named["input"], window))
        made = made if named["bias"] is None else made.add_(named["bias"].view(-1, 1))
        return (made.view(samples, -1, *kernel_results(named)[0].shape[2:]),)
    errors = grad.reshape(samples, weight.shape[0], -1)
    if mask[0]:
        columns = torch.bmm(filters.expand(samples, -1, -1).transpose(1, 2), errors)
        made = columns.view(samples, -1, *size) if _pointwise(window) else _aten.col2im(columns, size, *window)
        return made, None, None
    columns = _columns(named["input"], window)
    sums = torch.empty_like(weight, memory_format=torch.contiguous_format)
    line = sums.view(weight.shape[0], -1)
    for i in range(samples):
        torch.addmm(line, errors[i], columns[i].t(), beta=min(i, 1), out=line)
    return None, sums, errors.sum((0, 2)) if mask[2] else None


def _pointwise(window: tuple[Sequence[int], ...]) -> bool:
    """Whether the image itself is the matrix."""
    filters, _, padding, stride = window
    return {*filters, *stride} == {1} and not any(padding)


def _columns(x: Tensor, window: tuple[Sequence[int], ...]) -> Tensor:
    made: Tensor = x.flatten(2) if _pointwise(window) else _aten.im2col(x, *window)
    return made


def _suits_im2col(kernel: Kernel) -> bool:
    named = kernel.named
    usual = named["groups"] == 1 and not named["transposed"] and named["input"].dim() == 4
    plain = layout(named["input"], named["weight"]) == torch.contiguous_format
    return usual and plain and named["input"].dtype in (torch.float32, torch.float64)


IN_BLOCKS = tuple(Algorithm(f"own in {n}", partial(_in_blocks, n), partial(_has_blocks, n)) for n in (2, 4))
OTHERS = Algorithm("own", _own), Algorithm("im2col", _im2col, _suits_im2col)
SUMMED = tuple(Algorithm(f"own summed in {n}", partial(_summed, n), partial(_has_sums, n)) for n in (2, 4))
CPU = {algorithm.name: algorithm for algorithm in (*OTHERS, *IN_BLOCKS, *SUMMED)}
