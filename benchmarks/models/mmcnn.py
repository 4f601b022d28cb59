"""The three networks of mmCNN (Li et al. 2019, section 4), layer by layer as its tables count them.

AlexNet: Krizhevsky et al., "ImageNet classification with deep convolutional neural networks" (2012), in two groups.
VGG-S (CNN-S): Chatfield et al., "Return of the devil in the details" (2014), the slow one.
VGG-D19: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition" (2015), 19 layers.

Layer 1 of the tables is the input, so layer n is element n - 2 of a network. Fully connected layers are `nn.Linear`;
the flattening before the first one is no layer of the tables.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

IMAGES = {"AlexNet": 227, "VGG-S": 224, "VGG-D19": 224}  # width and height; three channels


def _named(*layers: nn.Module) -> nn.Sequential:
    """Layers by the number that they have in the tables; what has none is called so."""
    names: OrderedDict[str, nn.Module] = OrderedDict()
    number = 2
    for layer in layers:
        if isinstance(layer, nn.Flatten):
            names["flatten"] = layer
        else:
            names[str(number)] = layer
            number += 1
    return nn.Sequential(names)


def _classifier(features: int, classes: int) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(features, 4096), nn.ReLU(inplace=True)]
    return [*layers, nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, classes)]


def _conv(
    channels: int, width: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1
) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, kernel, stride, padding, groups=groups), nn.ReLU(inplace=True)]


def alexnet(classes: int = 10) -> nn.Sequential:
    """As in Table 4, whose sizes are those of ten classes."""
    return _named(
        *_conv(3, 96, 11, 4),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2),
        *_conv(96, 256, 5, 1, 2, groups=2),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2),
        *_conv(256, 384, 3, 1, 1),
        *_conv(384, 384, 3, 1, 1, groups=2),
        *_conv(384, 256, 3, 1, 1, groups=2),
        nn.MaxPool2d(3, 2),
        *_classifier(256 * 6 * 6, classes),
    )


def vgg_s(classes: int = 1000) -> nn.Sequential:
    """As it was published; the paper's Table 5 does not say for which images it is."""
    return _named(
        *_conv(3, 96, 7, 2),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 3, ceil_mode=True),
        *_conv(96, 256, 5),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        *_conv(256, 512, 3, 1, 1),
        *_conv(512, 512, 3, 1, 1),
        *_conv(512, 512, 3, 1, 1),
        nn.MaxPool2d(3, 3, ceil_mode=True),
        *_classifier(512 * 6 * 6, classes),
    )


def vgg_d19(classes: int = 1000) -> nn.Sequential:
    """As in Tables 3 and 6."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(depth):
            layers += _conv(channels, width, 3, 1, 1)
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    return _named(*layers, *_classifier(512 * 7 * 7, classes))


NETWORKS = {"AlexNet": alexnet, "VGG-S": vgg_s, "VGG-D19": vgg_d19}
