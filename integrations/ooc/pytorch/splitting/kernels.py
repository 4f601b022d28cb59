"""Convolutions by several algorithms, whole or a micro-batch at a time: what is measured and what is then run.

A convolution has three kernels, with micro-cuDNN's names (section II): *Forward*, *BackwardData* and *BackwardFilter*.
Each algorithm computes each of them. A part writes into its place in the result of the whole batch; BackwardFilter adds
each part to the sum of the parts before it.

On a CPU there are two algorithms; products of spectra (FFT) were never the fastest of what was measured, and went:

- `own`: PyTorch's own, which is oneDNN's where `torch._C._select_conv_backend` says so. It cannot write into a part
  of a larger result, so a part makes a result of its own, which is then copied. It serves every convolution.
- `im2col`: every patch becomes a column, and the convolution one matrix product for each sample (Chellapilla, Puri and
  Simard 2006, "High performance convolutional neural networks for document processing"). For images, without groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ooc.pytorch.splitting.convolution_shapes import ConvolutionParameters

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "Forward", "BackwardData", "BackwardFilter"
KINDS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)
_aten = torch.ops.aten


@dataclass(frozen=True)
class ConvolutionShape(ConvolutionParameters):
    """A convolution of samples of one size, without bias, of one to three spatial dimensions."""

    size: tuple[int, ...]  # of the input: height and width of images
    dtype: torch.dtype = torch.float32
    channels_last: bool = False  # how operands and results lie in memory

    @property
    def inputs(self) -> int:
        """Channels of the input."""
        return self.weight[0] if self.transposed else self.weight[1] * self.groups

    @property
    def outputs(self) -> int:
        """Channels of the output."""
        return self.output_size((1, self.inputs, *self.size))[1]

    @property
    def result_size(self) -> tuple[int, ...]:
        """Sizes of the output: height and width of images."""
        return self.output_size((1, self.inputs, *self.size))[2:]

    @property
    def filter(self) -> tuple[int, ...]:
        """Sizes of a filter."""
        return self.weight[2:]

    @property
    def taps(self) -> int:
        """Rows of an im2col matrix: elements of a patch."""
        return self.inputs * math.prod(self.filter)

    @property
    def pointwise(self) -> bool:
        """Whether the image itself is the im2col matrix."""
        return {*self.filter, *self.stride} == {1} and not any(self.padding)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy, as it lies in memory."""
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
        return tensor.contiguous(memory_format=last if self.channels_last else torch.contiguous_format)

    def __str__(self) -> str:
        def each(value: tuple[int, ...]) -> str:
            return "x".join(map(str, value))

        kind = f"f{torch.finfo(self.dtype).bits}" if self.dtype != torch.bfloat16 else "bf16"
        text = f"{kind} {self.inputs}x{each(self.size)} by {self.outputs}x{each(self.filter)}"
        for name, value, usual in (
            ("stride", self.stride, 1),
            ("padding", self.padding, 0),
            ("dilation", self.dilation, 1),
        ):
            text += "" if set(value) == {usual} else f", {name} {each(value)}"
        text += "" if self.groups == 1 else f", {self.groups} groups"
        text += f", transposed with {each(self.output_padding)} more" if self.transposed else ""
        return text + (", channels last" if self.channels_last else "")


@dataclass(frozen=True)
class Kernel:
    """One of the three kernels of a convolution."""

    convolution: ConvolutionShape
    kind: str

    def shapes(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the operands for `batch` samples: (x, w), (gradient of y, w) or (gradient of y, x)."""
        c = self.convolution
        x, y = (batch, c.inputs, *c.size), (batch, c.outputs, *c.result_size)
        return {FORWARD: (x, c.weight), BACKWARD_DATA: (y, c.weight), BACKWARD_FILTER: (y, x)}[self.kind]

    def operands(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random operands for `batch` samples."""
        numbers = (torch.randn(shape, generator=generator).to(self.convolution.dtype) for shape in self.shapes(batch))
        first, second = map(self.convolution.laid_out, numbers)
        return first, second

    def result_shape(self, batch: int) -> tuple[int, ...]:
        """Shape of the result for `batch` samples; that of BackwardFilter is the same for any number."""
        c = self.convolution
        if self.kind == BACKWARD_FILTER:
            return c.weight
        return (batch, c.inputs, *c.size) if self.kind == BACKWARD_DATA else (batch, c.outputs, *c.result_size)

    def part(self, operands: tuple[Tensor, Tensor], begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of the operands of samples `begin` to `end`. The second is the filter if that is not the result."""
        first, second = operands
        return first[begin:end], second[begin:end] if self.kind == BACKWARD_FILTER else second


@dataclass(frozen=True)
class Algorithm:
    """A way to compute a kernel."""

    name: str
    suits: Callable[[Kernel], bool]
    workspace_bytes: Callable[[Kernel, int], int]  # an estimate, at most what it takes; that is measured
    whole: Callable[[Kernel, Tensor, Tensor], Tensor]
    into: Callable[[Kernel, Tensor, Tensor, Tensor, bool], None]  # the last two: the target, and whether to add to it


def result_like(kernel: Kernel, batch: int) -> Tensor:
    """Memory for the kernel's result."""
    return kernel.convolution.laid_out(torch.empty(kernel.result_shape(batch), dtype=kernel.convolution.dtype))


def run(
    kernel: Kernel,
    operands: tuple[Tensor, Tensor],
    parts: Sequence[tuple[int, Algorithm]],
    bias: Tensor | None = None,
) -> Tensor:
    """The kernel's result, computed part by part; each part is given by its number of samples and its algorithm.

    `bias` has a number for each channel of the result.
    """
    if len(parts) == 1:
        made = parts[0][1].whole(kernel, *operands)
        return made if bias is None else made.add_(bias)
    result = result_like(kernel, operands[0].shape[0])
    begin = 0
    for size, algorithm in parts:
        target = result if kernel.kind == BACKWARD_FILTER else result[begin : begin + size]
        part = kernel.part(operands, begin, begin + size)
        algorithm.into(kernel, *part, target, kernel.kind == BACKWARD_FILTER and begin > 0)
        if bias is not None:
            target.add_(bias)
        begin += size
    return result


# ---- PyTorch's own --------------------------------------------------------------------------------------------------


_OF_ONEDNN = (torch.float32, torch.bfloat16, torch.float16)


def _own_whole(kernel: Kernel, first: Tensor, second: Tensor) -> Tensor:
    c = kernel.convolution
    if kernel.kind == FORWARD:
        made: Tensor = _aten.convolution(first, second, None, *c.parameters)
        return made
    size = kernel.result_shape(first.shape[0])
    x, w = (_like(first, size), second) if kernel.kind == BACKWARD_DATA else (second, _like(first, size))
    mask = [kernel.kind == BACKWARD_DATA, kernel.kind == BACKWARD_FILTER, False]
    found: Tensor = _aten.convolution_backward(first, x, w, None, *c.parameters, mask)[int(mask[1])]
    return found


def _like(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    """A tensor of a size, of which the kernels of most types look at nothing else: those need no memory for it."""
    return tensor.new_empty(1).expand(size) if tensor.dtype in _OF_ONEDNN else tensor.new_empty(size)


def _own_into(kernel: Kernel, first: Tensor, second: Tensor, target: Tensor, add: bool) -> None:
    _put(target, _own_whole(kernel, first, second), add)


def _put(target: Tensor, made: Tensor, add: bool) -> None:
    if add:
        target.add_(made)
    else:
        target.copy_(made)


# ---- a matrix product -----------------------------------------------------------------------------------------------


def _columns(c: ConvolutionShape, x: Tensor) -> Tensor:
    """The im2col matrices [samples, taps, positions]; of a pointwise convolution the image itself."""
    if c.pointwise:
        return x.flatten(2)
    made: Tensor = _aten.im2col(x, c.filter, c.dilation, c.padding, c.stride)
    return made


def _im2col_into(kernel: Kernel, first: Tensor, second: Tensor, target: Tensor, add: bool) -> None:
    c, samples = kernel.convolution, first.shape[0]
    if kernel.kind == FORWARD:
        filters = second.view(1, c.outputs, c.taps).expand(samples, -1, -1)
        torch.bmm(filters, _columns(c, first), out=target.view(samples, c.outputs, -1))
    elif kernel.kind == BACKWARD_DATA:
        filters = second.view(1, c.outputs, c.taps).expand(samples, -1, -1).transpose(1, 2)
        errors = first.reshape(samples, c.outputs, -1)
        if c.pointwise:
            torch.bmm(filters, errors, out=target.view(samples, c.taps, -1))
        else:
            columns = torch.bmm(filters, errors)
            _aten.col2im.out(columns, c.size, c.filter, c.dilation, c.padding, c.stride, out=target)
    else:
        errors, columns = first.reshape(samples, c.outputs, -1), _columns(c, second)
        sums = target.view(c.outputs, c.taps)
        for i in range(samples):
            torch.addmm(sums, errors[i], columns[i].t(), beta=1 if add or i else 0, out=sums)


def _im2col_bytes(kernel: Kernel, samples: int) -> int:
    c = kernel.convolution
    return 0 if c.pointwise else c.dtype.itemsize * samples * c.taps * math.prod(c.result_size)


def _whole(into: Callable[[Kernel, Tensor, Tensor, Tensor, bool], None]) -> Callable[[Kernel, Tensor, Tensor], Tensor]:
    def whole(kernel: Kernel, first: Tensor, second: Tensor) -> Tensor:
        result = result_like(kernel, first.shape[0])
        into(kernel, first, second, result, False)
        return result

    return whole


def _suits_im2col(kernel: Kernel) -> bool:
    c = kernel.convolution
    usual = c.groups == 1 and not c.channels_last and not c.transposed
    return usual and len(c.size) == 2 and c.dtype in (torch.float32, torch.float64)


CPU = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("own", lambda kernel: True, lambda kernel, samples: 0, _own_whole, _own_into),
        Algorithm("im2col", _suits_im2col, _im2col_bytes, _whole(_im2col_into), _im2col_into),
    )
}
