"""DeepLabv3+-like: Chen et al., "Encoder-decoder with atrous separable convolution" (2018).

The encoder is a ResNet-50 with output stride 16 in place of the paper's Xception, which has more and smaller operators;
spatial pyramid and decoder are the paper's, with plain convolutions in place of separable ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.steps import Step, make_step, sgd


def conv_norm(channels: int, width: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (but for its stride), batch norm, ReLU."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


class Bottleneck(nn.Module):
    """ResNet's, with a dilated middle."""

    def __init__(self, channels: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            conv_norm(channels, width, 1),
            conv_norm(width, width, 3, stride, dilation),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            wide = 4 * width
            self.around = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.around(x), inplace=True)


class DeepLab(nn.Module):
    """(batch, 3, height, width) to (batch, classes, height, width)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        stages: list[nn.Module] = []
        channels = 64
        for width, depth, stride, dilation in ((64, 3, 1, 1), (128, 4, 2, 1), (256, 6, 2, 1), (512, 3, 1, 2)):
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1, dilation))
                channels = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.pyramid = nn.ModuleList(
            [conv_norm(channels, 256, 1), *(conv_norm(channels, 256, 3, dilation=rate) for rate in (6, 12, 18))]
        )
        self.whole_image = conv_norm(channels, 256, 1)
        self.merge = conv_norm(5 * 256, 256, 1)
        self.detail = conv_norm(256, 48, 1)
        self.head = nn.Sequential(conv_norm(256 + 48, 256, 3), conv_norm(256, 256, 3), nn.Conv2d(256, classes, 1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        fine = x
        for index, stage in enumerate(self.stages):
            x = stage(x)
            fine = x if index == 0 else fine
        size = x.shape[2:]
        parts = [way(x) for way in self.pyramid]
        parts.append(self.whole_image(x.mean(dim=(2, 3), keepdim=True)).expand(-1, -1, *size))
        x = F.interpolate(self.merge(torch.cat(parts, 1)), fine.shape[2:], mode="bilinear")
        x = self.head(torch.cat([x, self.detail(fine)], 1))
        return F.interpolate(x, image.shape[2:], mode="bilinear")


def deeplabv3plus(batch: int, mode: str = "training", image: int = 513, classes: int = 21) -> Step:
    labels = torch.zeros(batch, image, image, dtype=torch.int64)
    inputs = torch.randn(batch, 3, image, image)
    return make_step(DeepLab(classes), inputs, lambda logits: F.cross_entropy(logits, labels), sgd, mode)
