"""AlexNet and OverFeat, chains of layers, as vDNN measured them (section IV-C: those of convnet-benchmarks).

AlexNet: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014), one tower.
OverFeat: Sermanet et al., "OverFeat: integrated recognition, localization and detection" (2014), the fast model.
"""

from __future__ import annotations

from torch import nn

from benchmarks.models.steps import Step, classification


def conv(channels: int, width: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    """A convolution and a ReLU in place."""
    return [nn.Conv2d(channels, width, kernel, stride, padding), nn.ReLU(inplace=True)]


def _classifier(features: int, widths: tuple[int, int], classes: int) -> list[nn.Module]:
    first, second = widths
    return [
        nn.Flatten(),
        nn.Linear(features, first),
        nn.ReLU(inplace=True),
        nn.Linear(first, second),
        nn.ReLU(inplace=True),
        nn.Linear(second, classes),
    ]


def alexnet(batch: int, mode: str = "training", image: int = 224, classes: int = 1000, momentum: float = 0.9) -> Step:
    model = nn.Sequential(
        *conv(3, 64, 11, 4, 2),
        nn.MaxPool2d(3, 2),
        *conv(64, 192, 5, 1, 2),
        nn.MaxPool2d(3, 2),
        *conv(192, 384, 3, 1, 1),
        *conv(384, 256, 3, 1, 1),
        *conv(256, 256, 3, 1, 1),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        *_classifier(256 * 6 * 6, (4096, 4096), classes),
    )
    return classification(model, batch, mode, image, classes, momentum)


def overfeat(batch: int, mode: str = "training", image: int = 231, classes: int = 1000, momentum: float = 0.9) -> Step:
    model = nn.Sequential(
        *conv(3, 96, 11, 4),
        nn.MaxPool2d(2, 2),
        *conv(96, 256, 5),
        nn.MaxPool2d(2, 2),
        *conv(256, 512, 3, 1, 1),
        *conv(512, 1024, 3, 1, 1),
        *conv(1024, 1024, 3, 1, 1),
        nn.MaxPool2d(2, 2),
        nn.AdaptiveAvgPool2d(6),
        *_classifier(1024 * 6 * 6, (3072, 4096), classes),
    )
    return classification(model, batch, mode, image, classes, momentum)
