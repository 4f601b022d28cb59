"""VGG: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition" (2015).

Five groups of 3x3 convolutions, of 64, 128, 256, 512 and 512 channels, a pooling layer behind each. vDNN (Rhu et al.,
MICRO 2016, section IV-C) makes them deeper by 20 more convolutions in each group for every hundred layers.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.plain import conv
from benchmarks.models.steps import Step, classification

WIDTHS = (64, 128, 256, 512, 512)


def vgg(
    batch: int,
    groups: tuple[int, ...],
    mode: str = "training",
    image: int = 224,
    classes: int = 1000,
    hidden: int = 4096,
    momentum: float = 0.9,
) -> Step:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip(WIDTHS, groups):
        for _ in range(depth):
            layers += conv(channels, width, 3, 1, 1)
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.Flatten(), nn.Linear(512 * (image // 32) ** 2, hidden), nn.ReLU(inplace=True), nn.Dropout()]
    layers += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, classes)]
    return classification(nn.Sequential(*layers), batch, mode, image, classes, momentum)


def deep_vgg(
    batch: int, hundreds: int, mode: str = "training", image: int = 224, classes: int = 1000, momentum: float = 0.9
) -> Step:
    """vDNN's VGG of 16 and `hundreds` times 100 convolutions."""
    groups = tuple(depth + 20 * hundreds for depth in (2, 2, 4, 4, 4))
    return vgg(batch, groups, mode, image, classes, momentum=momentum)
