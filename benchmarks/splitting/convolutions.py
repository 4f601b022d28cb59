"""The convolutions that are measured: four networks' layers in their order, and DeepBench's list.

AlexNet is the second version (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"), the
ResNets are those of He et al. 2016, DenseNet-40 is Huang et al.'s for CIFAR with growth 12 (micro-cuDNN takes 40, which
is ten times the work). DeepBench's shapes are those of its training set of convolutions (Baidu Research, Apache 2.0
licence; `code/kernels/conv_problems.h`, read in 2026), each once; its batches are 4 to 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.kernels import KINDS, Kernel, kernels_of


@dataclass(frozen=True)
class Layer:
    """A convolution of images without bias."""

    weight: tuple[int, ...]
    size: tuple[int, int]  # height and width of the images
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def result_size(self) -> tuple[int, ...]:
        """Height and width of the result."""
        rows = zip(self.size, self.weight[2:], self.stride, self.padding, self.dilation)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows)

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Shapes of input, weight and result."""
        inputs = (batch, self.weight[1] * self.groups, *self.size)
        return [inputs, self.weight, (batch, self.weight[0], *self.result_size)]

    def kernel(self, kind: str, tensors: Sequence[Tensor]) -> Kernel:
        """One of the kernels, for an input, a weight, and the gradient of a result."""
        x, w, y = tensors
        options = self.stride, self.padding, self.dilation, False, (0, 0), self.groups
        if kind == KINDS[0]:
            (found,) = kernels_of(Call("aten::convolution", (x, w, None, *options), {}))
            return found
        mask = [kind == KINDS[1], kind == KINDS[2], False]
        (found,) = kernels_of(Call("aten::convolution_backward", (y, x, w, None, *options, mask), {}))
        return found


def images(
    inputs: int,
    outputs: int,
    size: tuple[int, int],
    filters: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Layer:
    """An ordinary convolution of images of a size (height and width)."""
    return Layer((outputs, inputs // groups, *filters), size, stride, padding, dilation, groups)


def operations(layer: Layer) -> int:
    """Multiplications and additions for a sample, in each of the three kernels."""
    return 2 * math.prod(layer.weight) * math.prod(layer.result_size)


def square(
    inputs: int, outputs: int, size: int, filters: int, stride: int = 1, padding: int | None = None
) -> Layer:
    """Square images and filters; with padding so that stride 1 keeps the size, unless told otherwise."""
    around = filters // 2 if padding is None else padding
    return images(inputs, outputs, (size, size), (filters, filters), (stride, stride), (around, around))


def alexnet() -> list[Layer]:
    return [
        square(3, 64, 224, 11, 4, 2),
        square(64, 192, 27, 5),
        square(192, 384, 13, 3),
        square(384, 256, 13, 3),
        square(256, 256, 13, 3),
    ]


def resnet18() -> list[Layer]:
    layers = [square(3, 64, 224, 7, 2)]
    channels = 64
    for stage in range(4):
        width, size = 64 << stage, 56 >> stage
        for block in range(2):
            stride = 2 if block == 0 and stage > 0 else 1
            layers += [square(channels, width, size * stride, 3, stride), square(width, width, size, 3)]
            if stride == 2:
                layers.append(square(channels, width, size * 2, 1, 2))
            channels = width
    return layers


def resnet50() -> list[Layer]:
    """With the stride in the bottleneck's first convolution, as in the paper."""
    layers = [square(3, 64, 224, 7, 2)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, size = 64 << stage, 56 >> stage
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            layers += [
                square(channels, width, size * stride, 1, stride),
                square(width, width, size, 3),
                square(width, 4 * width, size, 1),
            ]
            if block == 0:
                layers.append(square(channels, 4 * width, size * stride, 1, stride))
            channels = 4 * width
    return layers


def densenet40(growth: int = 12) -> list[Layer]:
    """Three blocks of twelve layers on images of 32 x 32; between them a pointwise convolution and pooling."""
    layers = [square(3, 16, 32, 3)]
    channels = 16
    for block in range(3):
        for _ in range(12):
            layers.append(square(channels, growth, 32 >> block, 3))
            channels += growth
        if block < 2:
            layers.append(square(channels, channels, 32 >> block, 1))
    return layers


# input channels, height, width, outputs, filter height and width, padding, stride
_DEEPBENCH = """
    1 161 700 32 5 20 0 2    32 79 341 32 5 10 0 2    1 48 480 16 3 3 1 1      16 24 240 32 3 3 1 1
    32 12 120 64 3 3 1 1     64 6 60 128 3 3 1 1      3 108 108 64 3 3 1 2     64 54 54 64 3 3 1 1
    128 27 27 128 3 3 1 1    128 14 14 256 3 3 1 1    256 7 7 512 3 3 1 1      3 224 224 64 3 3 1 1
    64 112 112 128 3 3 1 1   128 56 56 256 3 3 1 1    256 28 28 512 3 3 1 1    512 14 14 512 3 3 1 1
    512 7 7 512 3 3 1 1      3 224 224 64 7 7 3 2     192 28 28 32 5 5 2 1     192 28 28 64 1 1 0 1
    512 14 14 48 5 5 2 1     512 14 14 192 1 1 0 1    832 7 7 256 1 1 0 1      832 7 7 128 5 5 2 1
    64 56 56 64 3 3 1 1      64 56 56 256 1 1 0 2     128 28 28 128 3 3 1 1    128 28 28 512 1 1 0 2
    256 14 14 256 1 1 0 1    256 14 14 256 3 3 1 1    256 14 14 1024 1 1 0 2   512 7 7 512 1 1 0 1
    2048 7 7 512 1 1 3 2     1 161 700 64 5 5 1 2     64 80 350 64 3 3 1 1     64 80 350 128 5 5 1 2
    128 40 175 128 3 3 1 1   128 40 175 256 5 5 1 2   256 20 84 256 3 3 1 1    256 20 84 512 5 5 1 2
    512 10 42 512 3 3 1 1    64 112 112 64 1 1 0 1    64 56 56 256 1 1 0 1     256 56 56 64 1 1 0 1
    256 56 56 128 1 1 0 2    128 28 28 512 1 1 0 1    512 28 28 128 1 1 0 1    512 28 28 256 1 1 0 2
    256 14 14 1024 1 1 0 1   512 28 28 1024 1 1 0 2   1024 14 14 256 1 1 0 1   1024 14 14 512 1 1 0 2
    512 7 7 2048 1 1 0 1     1024 14 14 2048 1 1 0 2  2048 7 7 512 1 1 0 1
"""


def deepbench() -> list[Layer]:
    words = list(map(int, _DEEPBENCH.split()))
    rows = [words[i : i + 8] for i in range(0, len(words), 8)]
    return [
        images(c, k, (h, w), (r, s), (stride, stride), (padding, padding))
        for c, h, w, k, r, s, padding, stride in rows
    ]
