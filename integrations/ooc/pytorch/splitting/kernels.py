"""Convolutions by several algorithms, whole or a micro-batch at a time: what is measured and what is then run.

A convolution has three kernels, with micro-cuDNN's names (section II): *Forward*, *BackwardData* and *BackwardFilter*.
Each algorithm computes each of them. A part writes into its place in the result of the whole batch; BackwardFilter adds
each part to the sum of the parts before it.

On a CPU there are three algorithms:

- `own`: PyTorch's own, which is oneDNN's where `torch._C._select_conv_backend` says so. It cannot write into a part
  of a larger result, so a part makes a result of its own, which is then copied. It serves every convolution.
- `im2col`: every patch becomes a column, and the convolution one matrix product for each sample (Chellapilla, Puri and
  Simard 2006, "High performance convolutional neural networks for document processing"). For images, without groups.
- `fft`: products of spectra (Mathieu, Henaff and LeCun 2014). As `im2col`, and only for stride and dilation 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "Forward", "BackwardData", "BackwardFilter"
KINDS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)
_aten = torch.ops.aten

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution of one sample, without bias, of one to three spatial dimensions.

    Tuples of one element, but for `size` and `filter`, hold for every dimension.
    """

    inputs: int  # channels
    outputs: int
    size: tuple[int, ...]  # of the input: height and width of images
    filter: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    dtype: torch.dtype = torch.float32
    channels_last: bool = False  # how operands and results lie in memory
    transposed: bool = False
    output_padding: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        for name in ("stride", "padding", "dilation", "output_padding"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) * len(self.size) if len(value) == 1 else tuple(value))
        if min(self.inputs, self.outputs, *self.filter, *self.stride, *self.dilation, self.groups) < 1:
            raise ValueError(f"{self}: channels, filter, stride, dilation and groups are at least 1")
        if self.inputs % self.groups or self.outputs % self.groups:
            raise ValueError(f"{self}: the channels do not divide by the groups")
        if min(self.padding) < 0 or min(self.result_size) < 1:
            raise ValueError(f"{self}: the filter is larger than the image with its padding")

    @property
    def result_size(self) -> tuple[int, ...]:
        """Sizes of the output: height and width of images."""
        each = list(zip(self.size, self.padding, self.dilation, self.filter, self.stride))
        if self.transposed:
            return tuple(
                (n - 1) * s - 2 * p + d * (f - 1) + 1 + o for (n, p, d, f, s), o in zip(each, self.output_padding)
            )
        return tuple((n + 2 * p - d * (f - 1) - 1) // s + 1 for n, p, d, f, s in each)

    @property
    def filters(self) -> tuple[int, ...]:
        """Sizes of the filters of all channels."""
        outer, inner = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        return (outer, inner // self.groups, *self.filter)

    @property
    def taps(self) -> int:
        """Rows of an im2col matrix: elements of a patch."""
        return self.inputs * math.prod(self.filter)

    @property
    def operations(self) -> int:
        """Multiplications and additions for a sample, in each of the three kernels."""
        return 2 * self.taps // self.groups * self.outputs * math.prod(self.result_size)

    @property
    def pointwise(self) -> bool:
        """Whether the image itself is the im2col matrix."""
        return {*self.filter, *self.stride} == {1} and not any(self.padding)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy, as it lies in memory."""
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
        return tensor.contiguous(memory_format=last if self.channels_last else torch.contiguous_format)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The parameters as `aten::convolution` takes them after the bias."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

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
        return {FORWARD: (x, c.filters), BACKWARD_DATA: (y, c.filters), BACKWARD_FILTER: (y, x)}[self.kind]

    def operands(self, batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random operands for `batch` samples."""
        numbers = (torch.randn(shape, generator=generator).to(self.convolution.dtype) for shape in self.shapes(batch))
        first, second = map(self.convolution.laid_out, numbers)
        return first, second

    def result_shape(self, batch: int) -> tuple[int, ...]:
        """Shape of the result for `batch` samples; that of BackwardFilter is the same for any number."""
        c = self.convolution
        if self.kind == BACKWARD_FILTER:
            return c.filters
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
    return 2 * c.dtype.itemsize * height * (width // 2 + 1) * planes


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


def _suits_fft(kernel: Kernel) -> bool:
    c = kernel.convolution
    return _suits_im2col(kernel) and c.stride == c.dilation == (1, 1) and c.filter != (1, 1)


CPU = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("own", lambda kernel: True, lambda kernel, samples: 0, _own_whole, _own_into),
        Algorithm("im2col", _suits_im2col, _im2col_bytes, _whole(_im2col_into), _im2col_into),
        Algorithm("fft", _suits_fft, _fft_bytes, _whole(_fft_into), _fft_into),
    )
}
