"""What a convolution's sizes say: which rows of one side belong to which of the other, and how the result lies.

A convolution and the data gradient of a transposed one *gather*: an output row is made of a window of input rows. A
transposed convolution and the data gradient of an ordinary one *spread*: an input row goes into a window of output
rows.
Rows are the first spatial dimension: rows of images, slices of volumes, elements of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting.parts import dense_stride


@dataclass(frozen=True)
class Rows:
    """The first spatial dimension: small row `i` meets large rows `i * stride - padding + k * dilation`."""

    large: int  # rows of the convolution's input, or of a transposed one's output
    small: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """How many large rows one small row spans, from the first that it meets to the last."""
        return self.dilation * (self.kernel - 1) + 1

    def window(self, start: int, length: int) -> tuple[int, int]:
        """The first large row, possibly negative, and the number of large rows that belong to these small rows."""
        return start * self.stride - self.padding, (length - 1) * self.stride + self.reach

    def met_by(self, start: int, length: int) -> tuple[int, int]:
        """The first small row and the number of small rows that meet any of these large rows; the number may be 0."""
        first = max(0, -(-(start + self.padding - self.reach + 1) // self.stride))
        last = min(self.small - 1, (start + length - 1 + self.padding) // self.stride)
        return first, max(0, last - first + 1)

    def most_met(self, length: int) -> int:
        """The number of small rows that meet `length` large ones at most."""
        return min(self.small, (length + self.reach - 2) // self.stride + 1)


@dataclass(frozen=True)
class ConvolutionParameters:
    """One convolution's parameters."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    weight: tuple[int, ...]  # its sizes

    @classmethod
    def of(cls, weight: Tensor, named: dict[str, Any]) -> ConvolutionParameters:
        """Takes the parameters from the arguments of `aten::convolution` or its backward pass."""
        spatial = weight.dim() - 2

        def each(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values) * spatial if len(values) == 1 else tuple(values)

        return cls(
            each(named["stride"]),
            each(named["padding"]),
            each(named["dilation"]),
            named["transposed"],
            each(named["output_padding"]),
            named["groups"],
            tuple(weight.shape),
        )

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The parameters as `aten::convolution` takes them after the bias."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    @property
    def skips(self) -> bool:
        """Whether the convolution looks only at one of every few elements of its input."""
        single = all(n == 1 for n in self.weight[2:]) and not any(self.padding)
        return single and not self.transposed and max(self.stride) > 1

    def output_size(self, input_size: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the result."""
        spatial = []
        for d, n in enumerate(input_size[2:]):
            reach = self.dilation[d] * (self.weight[2 + d] - 1) + 1
            if self.transposed:
                spatial.append((n - 1) * self.stride[d] - 2 * self.padding[d] + reach + self.output_padding[d])
            else:
                spatial.append((n + 2 * self.padding[d] - reach) // self.stride[d] + 1)
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (input_size[0], channels, *spatial)

    def rows(self, input_size: Sequence[int]) -> Rows:
        """The rows of both sides of the convolution, for an input of this size."""
        given, made = input_size[2], self.output_size(input_size)[2]
        large, small = (made, given) if self.transposed else (given, made)
        return Rows(large, small, self.weight[2], self.stride[0], self.padding[0], self.dilation[0])


def layout(*tensors: Tensor) -> torch.memory_format:
    """The layout in which a convolution works and makes its result: channels last if any tensor is so."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    rank = tensors[0].dim()
    if rank in formats:
        for tensor in tensors:
            plain = tensor.is_contiguous()
            if tensor.is_contiguous(memory_format=formats[rank]) and not plain:
                return formats[rank]
    return torch.contiguous_format


def strides_of(size: Sequence[int], order: torch.memory_format) -> tuple[int, ...]:
    """Strides of a dense tensor in a layout."""
    plain = [len(size) - d for d in range(len(size))]
    if order != torch.contiguous_format:
        plain = [len(size) + 1, 0, *(len(size) - d for d in range(2, len(size)))]
    return dense_stride(size, plain)
