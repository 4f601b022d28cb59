"""DenseNet-121: Huang et al., "Densely connected convolutional networks" (2017), growth rate 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.steps import Step, classification

GROWTH = 32
BLOCKS = (6, 12, 24, 16)


class Layer(nn.Module):
    """Norm, ReLU, 1x1 convolution to four times the growth; norm, ReLU, 3x3 to the growth; appended to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.new = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * GROWTH, 1, bias=False),
            nn.BatchNorm2d(4 * GROWTH),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.new(x)], 1)


def _network(classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for index, depth in enumerate(BLOCKS):
        for _ in range(depth):
            layers.append(Layer(channels))
            channels += GROWTH
        if index + 1 < len(BLOCKS):
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, classes))


def densenet121(batch: int, mode: str = "training", image: int = 224, classes: int = 1000) -> Step:
    return classification(_network(classes), batch, mode, image, classes)
