"""The networks that are trained, each with its optimizer and with the blocks that one checkpoints by hand.

ResNet-50 and DenseNet-121 are written as torchvision has them: ReLUs in place, and dense layers that concatenate what
they are given, so that checkpointing one keeps only the few channels that each layer adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.densenet import BLOCKS, GROWTH
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.llama import Llama

CLASSES = 100
VOCABULARY = 512

Batch = tuple[Tensor, Tensor]


@dataclass
class Job:
    """A model and what a step needs. `blocks`: in forward order, together all of the activations that matter."""

    model: nn.Module
    blocks: list[nn.Module]
    optimizer: torch.optim.Optimizer
    draw: Callable[[torch.Generator], Batch]

    def step(self, generator: torch.Generator) -> float:
        """One step on a new batch; its loss."""
        inputs, targets = self.draw(generator)
        self.optimizer.zero_grad()
        logits = self.model(inputs)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


def _normed(channels: int, into: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, into, size, stride, size // 2, bias=False), nn.BatchNorm2d(into)]


class Bottleneck(nn.Module):
    """1x1 convolution down to `width` channels, 3x3, 1x1 up to `4 * width`, and the way around."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *_normed(channels, width, 1),
            nn.ReLU(inplace=True),
            *_normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.around = nn.Identity() if same else nn.Sequential(*_normed(channels, 4 * width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.path(x)
        y += self.around(x)
        out: Tensor = self.relu(y)
        return out


def _stem() -> list[nn.Module]:
    return [*_normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)]


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3)) -> tuple[nn.Module, list[nn.Module]]:
    """ResNet-50: He et al., "Deep residual learning for image recognition" (2016)."""
    blocks: list[nn.Module] = []
    channels = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not index else 1))
            channels = 4 * (64 << stage)
    return nn.Sequential(*_stem(), *blocks, *_head(channels)), blocks


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1 convolution to four times the growth; norm, ReLU, 3x3 to the growth."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.new = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            *_normed(channels, 4 * GROWTH, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, *features: Tensor) -> Tensor:
        out: Tensor = self.new(torch.cat(features, 1))
        return out


class DenseBlock(nn.Module):
    """Each layer is given what all layers before it have made."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + GROWTH * index) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


def densenet(depths: tuple[int, ...] = BLOCKS) -> tuple[nn.Module, list[nn.Module]]:
    """DenseNet-121: Huang et al., "Densely connected convolutional networks" (2017)."""
    layers = _stem()
    blocks: list[nn.Module] = []
    channels = 64
    for index, depth in enumerate(depths):
        block = DenseBlock(channels, depth)
        blocks += block.layers
        channels += GROWTH * depth
        layers += [block, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if index + 1 < len(depths):
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, *_head(channels)), blocks


def _images(made: tuple[nn.Module, list[nn.Module]], batch: int, side: int) -> Job:
    model, blocks = made

    def draw(generator: torch.Generator) -> Batch:
        images = torch.randn(batch, 3, side, side, generator=generator)
        return images, torch.randint(CLASSES, (batch,), generator=generator)

    return Job(model, blocks, torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4), draw)


def _text(model: GPT2 | Llama, batch: int, length: int) -> Job:
    def draw(generator: torch.Generator) -> Batch:
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    nn.init.normal_(model.token.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return Job(model, list(model.blocks), optimizer, draw)


def resnet50(quick: bool) -> Job:
    return _images(resnet((1, 1, 1, 1)), 8, 32) if quick else _images(resnet(), 32, 64)


def densenet121(quick: bool) -> Job:
    return _images(densenet((3, 3)), 8, 32) if quick else _images(densenet(), 20, 128)


def gpt(quick: bool) -> Job:
    batch, length, layers = (4, 64, 3) if quick else (40, 64, 12)
    return _text(GPT2(layers, width=128, heads=2, length=length, vocabulary=VOCABULARY, dropout=0.0), batch, length)


def llama(quick: bool) -> Job:
    batch, length, layers = (4, 64, 3) if quick else (24, 128, 8)
    return _text(Llama(layers, width=128, heads=4, groups=2, hidden=352, vocabulary=VOCABULARY), batch, length)


MODELS: dict[str, Callable[[bool], Job]] = {
    "resnet50": resnet50,
    "densenet121": densenet121,
    "gpt": gpt,
    "llama": llama,
}
