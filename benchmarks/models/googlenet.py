"""GoogLeNet: Szegedy et al., "Going deeper with convolutions" (2015), table 1, without the auxiliary classifiers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.plain import conv
from benchmarks.models.steps import Step, classification

# Channels: input; 1x1; before and after 3x3; before and after 5x5; behind the pooling. None: a pooling layer.
INCEPTIONS: tuple[tuple[int, ...] | None, ...] = (
    (192, 64, 96, 128, 16, 32, 32),
    (256, 128, 128, 192, 32, 96, 64),
    None,
    (480, 192, 96, 208, 16, 48, 64),
    (512, 160, 112, 224, 24, 64, 64),
    (512, 128, 128, 256, 24, 64, 64),
    (512, 112, 144, 288, 32, 64, 64),
    (528, 256, 160, 320, 32, 128, 128),
    None,
    (832, 256, 160, 320, 32, 128, 128),
    (832, 384, 192, 384, 48, 128, 128),
)


class Inception(nn.Module):
    """Four ways from the same input, side by side."""

    def __init__(self, channels: int, one: int, before3: int, three: int, before5: int, five: int, pool: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(
            [
                nn.Sequential(*conv(channels, one, 1)),
                nn.Sequential(*conv(channels, before3, 1), *conv(before3, three, 3, 1, 1)),
                nn.Sequential(*conv(channels, before5, 1), *conv(before5, five, 5, 1, 2)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), *conv(channels, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


def googlenet(batch: int, mode: str = "training", image: int = 224, classes: int = 1000, momentum: float = 0.9) -> Step:
    layers: list[nn.Module] = [*conv(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1), *conv(64, 64, 1)]
    layers += [*conv(64, 192, 3, 1, 1), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.MaxPool2d(3, 2, 1) if row is None else Inception(*row) for row in INCEPTIONS]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, classes)]
    return classification(nn.Sequential(*layers), batch, mode, image, classes, momentum)
