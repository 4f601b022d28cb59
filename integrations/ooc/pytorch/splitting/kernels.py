"""Convolutions by several algorithms, whole or a micro-batch at a time: what is measured and what is then run.

A convolution has three kernels, with micro-cuDNN's names (section II): *Forward*, *BackwardData* and *BackwardFilter*.
Each algorithm computes each of them. A part writes into its place in the result of the whole batch; BackwardFilter adds
each part to the sum of the parts before it.

On a CPU there are three algorithms:

- `onednn`: PyTorch's own, which is oneDNN's where `torch._C._select_conv_backend` says so. It cannot write into a part
  of a larger result, so a part makes a result of its own, which is then copied.
- `im2col`: every patch becomes a column, and the convolution one matrix product for each sample (Chellapilla, Puri and
  Simard 2006, "High performance convolutional neural networks for document processing").
- `fft`: products of spectra (Mathieu, Henaff and LeCun 2014). Only for stride and dilation 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "Forward", "BackwardData", "BackwardFilter"
KINDS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)
_aten = torch.ops.aten

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvolutionShape:
    """A two-dimensional convolution of one sample, without bias."""

    inputs: int  # channels
    outputs: int
    size: Pair  # of the input, height and width
    filter: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.inputs, self.outputs, *self.filter, *self.stride, *self.dilation, self.groups) < 1:
            raise ValueError(f"{self}: channels, filter, stride, dilation and groups are at least 1")
        if self.inputs % self.groups or self.outputs % self.groups:
            raise ValueError(f"{self}: the channels do not divide by the groups")
        if min(self.padding) < 0 or min(self.result_size) < 1:
            raise ValueError(f"{self}: the filter is larger than the image with its padding")

    @property
    def result_size(self) -> Pair:
        """Height and width of the output."""
        height, width = (
            (self.size[i] + 2 * self.padding[i] - self.dilation[i] * (self.filter[i] - 1) - 1) // self.stride[i] + 1
            for i in (0, 1)
        )
        return height, width

    @property
    def taps(self) -> int:
        """Rows of an im2col matrix: elements of a patch."""
        return self.inputs * self.filter[0] * self.filter[1]

    @property
    def operations(self) -> int:
        """Multiplications and additions for a sample, in each of the three kernels."""
        height, width = self.result_size
        return 2 * self.taps // self.groups * self.outputs * height * width

    @property
    def pointwise(self) -> bool:
        """Whether the image itself is the im2col matrix."""
        return self.filter == (1, 1) == self.stride and self.padding == (0, 0)

    def __str__(self) -> str:
        def pair(value: Pair) -> str:
            return f"{value[0]}x{value[1]}"

        text = f"f32 {self.inputs}x{pair(self.size)} by {self.outputs}x{pair(self.filter)}"
        for name, value, usual in (
            ("stride", self.stride, 1),
            ("padding", self.padding, 0),
            ("dilation", self.dilation, 1),
        ):
            text += "" if value == (usual, usual) else f", {name} {pair(value)}"
        return text + ("" if self.groups == 1 else f", {self.groups} groups")


@dataclass(frozen=True)
class Kernel:
    """One of the three kernels of a convolution."""

    convolution: ConvolutionShape
    kind: str

    def shapes(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the operands for `batch` samples: (x, w), (gradient of y, w) or (gradient of y, x)."""
        c = self.convolution
        x, y = (batch, c.inputs, *c.size), (batch, c.outputs, *c.result_size)
        w = (c.outputs, c.inputs // c.groups, *c.filter)
        return {FORWARD: (x, w), BACKWARD_DATA: (y, w), BACKWARD_FILTER: (y, x)}[self.kind]

    def operands(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random operands for `batch` samples."""
        first, second = (torch.randn(shape, generator=generator) for shape in self.shapes(batch))
        return first, second

    def result_shape(self, batch: int) -> tuple[int, ...]:
        """Shape of the result for `batch` samples; that of BackwardFilter is the same for any number."""
        c = self.convolution
        if self.kind == BACKWARD_FILTER:
            return (c.outputs, c.inputs // c.groups, *c.filter)
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
    workspace_bytes: Callable[[Kernel, int], int]  # an estimate; what it takes is measured
    whole: Callable[[Kernel, Tensor, Tensor], Tensor]
    into: Callable[[Kernel, Tensor, Tensor, Tensor, bool], None]  # the last two: the target, and whether to add to it


def run(kernel: Kernel, operands: tuple[Tensor, Tensor], parts: list[tuple[int, Algorithm]]) -> Tensor:
    """The kernel's result, computed part by part; each part is given by its number of samples and its algorithm."""
    if len(parts) == 1:
        return parts[0][1].whole(kernel, *operands)
    result = torch.empty(kernel.result_shape(operands[0].shape[0]))
    begin = 0
    for size, algorithm in parts:
        target = result if kernel.kind == BACKWARD_FILTER else result[begin : begin + size]
        part = kernel.part(operands, begin, begin + size)
        algorithm.into(kernel, *part, target, kernel.kind == BACKWARD_FILTER and begin > 0)
        begin += size
    return result


# ---- PyTorch's own --------------------------------------------------------------------------------------------------


def _own_whole(kernel: Kernel, first: Tensor, second: Tensor) -> Tensor:
    c = kernel.convolution
    if kernel.kind == FORWARD:
        made: Tensor = _aten.mkldnn_convolution(first, second, None, c.padding, c.stride, c.dilation, c.groups)
        return made
    size = kernel.result_shape(first.shape[0])
    gradient: Callable[..., Tensor] = conv2d_input if kernel.kind == BACKWARD_DATA else conv2d_weight
    shapes = (size, second) if kernel.kind == BACKWARD_DATA else (second, size)
    return gradient(*shapes, first, c.stride, c.padding, c.dilation, c.groups)


def _own_into(kernel: Kernel, first: Tensor, second: Tensor, target: Tensor, add: bool) -> None:
    _put(target, _own_whole(kernel, first, second), add)


def _put(target: Tensor, made: Tensor, add: bool) -> None:
    if add:
        target.add_(made)
    else:
        target.copy_(made)


def _own_bytes(kernel: Kernel, samples: int) -> int:
    first, second = kernel.convolution, kernel.result_shape(samples)
    return 4 * max(samples * first.inputs * first.size[0] * first.size[1], torch.Size(second).numel())


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
    height, width = kernel.convolution.result_size
    return 0 if kernel.convolution.pointwise else 4 * samples * kernel.convolution.taps * height * width


# ---- spectra --------------------------------------------------------------------------------------------------------


def _fast_length(length: int) -> int:
    """The smallest number from `length` on that has no prime factor beyond 5."""
    while True:
        rest = length
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1


def _spectrum_size(c: ConvolutionShape) -> Pair:
    """Height and width of spectra: those of the padded image or more, so that nothing that is kept wraps around."""
    return _fast_length(c.size[0] + 2 * c.padding[0]), _fast_length(c.size[1] + 2 * c.padding[1])


def _spectra(images: Tensor, size: Pair) -> Tensor:
    """[frequencies, first dimension, second dimension] of images [first, second, height, width]."""
    found: Tensor = torch.fft.rfft2(images, s=size)
    return found.flatten(2).permute(2, 0, 1)


def _images(products: Tensor, size: Pair) -> Tensor:
    """Inverse of `_spectra`."""
    spectra = products.permute(1, 2, 0).reshape(*products.shape[1:], size[0], size[1] // 2 + 1)
    made: Tensor = torch.fft.irfft2(spectra, s=size)
    return made


def _fft_into(kernel: Kernel, first: Tensor, second: Tensor, target: Tensor, add: bool) -> None:
    c, size = kernel.convolution, _spectrum_size(kernel.convolution)
    (top, left), (height, width) = c.padding, target.shape[2:]
    around = (left, left, top, top)
    if kernel.kind == FORWARD:  # y[n, k] = sum over c of x[n, c] correlated with w[k, c]
        x = _spectra(torch.constant_pad_nd(first, around), size)
        made = _images(torch.bmm(x, _spectra(second, size).conj().transpose(1, 2)), size)
        target.copy_(made[..., :height, :width])
    elif kernel.kind == BACKWARD_DATA:  # dx[n, c] = sum over k of dy[n, k] convolved with w[k, c]
        made = _images(torch.bmm(_spectra(first, size), _spectra(second, size)), size)
        target.copy_(made[..., top : top + height, left : left + width])
    else:  # dw[k, c] = sum over n of x[n, c] correlated with dy[n, k]
        x = _spectra(torch.constant_pad_nd(second, around), size)
        made = _images(torch.bmm(_spectra(first, size).conj().transpose(1, 2), x), size)
        _put(target, made[..., :height, :width], add)


def _fft_bytes(kernel: Kernel, samples: int) -> int:
    c = kernel.convolution
    height, width = _spectrum_size(c)
    planes = samples * (c.inputs + c.outputs) + c.inputs * c.outputs
    return 8 * height * (width // 2 + 1) * planes


def _whole(into: Callable[[Kernel, Tensor, Tensor, Tensor, bool], None]) -> Callable[[Kernel, Tensor, Tensor], Tensor]:
    def whole(kernel: Kernel, first: Tensor, second: Tensor) -> Tensor:
        result = torch.empty(kernel.result_shape(first.shape[0]))
        into(kernel, first, second, result, False)
        return result

    return whole


def _suits_fft(kernel: Kernel) -> bool:
    c = kernel.convolution
    return c.groups == 1 and c.stride == c.dilation == (1, 1) and c.filter != (1, 1)


CPU = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("onednn", lambda kernel: True, _own_bytes, _own_whole, _own_into),
        Algorithm("im2col", lambda k: k.convolution.groups == 1, _im2col_bytes, _whole(_im2col_into), _im2col_into),
        Algorithm("fft", _suits_fft, _fft_bytes, _whole(_fft_into), _fft_into),
    )
}
