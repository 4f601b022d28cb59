"""Pix2PixHD-like: Wang et al., "High-resolution image synthesis and semantic manipulation with conditional GANs", 2018.

The global generator and two of the multi-scale discriminators, least-squares and feature-matching losses; without the
local enhancer, the encoder of instances and the perceptual loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.steps import MODES, Step, make_step, sgd

LABELS = 36  # Cityscapes: one channel a class, and one of instance borders


def _layer(convolution: nn.Module, width: int) -> list[nn.Module]:
    return [convolution, nn.InstanceNorm2d(width), nn.ReLU(inplace=True)]


class Block(nn.Module):
    """A residual block with reflected borders."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.ReflectionPad2d(1),
            *_layer(nn.Conv2d(width, width, 3), width),
            nn.ReflectionPad2d(1),
            nn.Conv2d(width, width, 3),
            nn.InstanceNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


def generator(blocks: int = 9, halvings: int = 4) -> nn.Sequential:
    """(batch, LABELS, height, width) to (batch, 3, height, width)."""
    layers = [nn.ReflectionPad2d(3), *_layer(nn.Conv2d(LABELS, 64, 7), 64)]
    width = 64
    for _ in range(halvings):
        layers += _layer(nn.Conv2d(width, 2 * width, 3, 2, 1), 2 * width)
        width *= 2
    layers += [Block(width) for _ in range(blocks)]
    for _ in range(halvings):
        layers += _layer(nn.ConvTranspose2d(width, width // 2, 3, 2, 1, output_padding=1), width // 2)
        width //= 2
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


class Discriminators(nn.Module):
    """Two, of which the second sees half the resolution. Each returns the features of all its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(self._one() for _ in range(2))

    @staticmethod
    def _one() -> nn.ModuleList:
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(LABELS + 3, 64, 4, 2, 2), nn.LeakyReLU(0.2, inplace=True))]
        for narrow, wide, stride in ((64, 128, 2), (128, 256, 2), (256, 512, 1)):
            layers.append(
                nn.Sequential(
                    nn.Conv2d(narrow, wide, 4, stride, 2), nn.InstanceNorm2d(wide), nn.LeakyReLU(0.2, inplace=True)
                )
            )
        return nn.ModuleList([*layers, nn.Conv2d(512, 1, 4, 1, 2)])

    def forward(self, x: Tensor) -> list[list[Tensor]]:
        results = []
        for layers in self.scales:
            features = []
            y = x
            for layer in layers:  # type: ignore[union-attr]
                y = layer(y)
                features.append(y)
            results.append(features)
            x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        return results


def _adversarial(features: list[list[Tensor]], goal: float) -> Tensor:
    return sum((F.mse_loss(each[-1], torch.full_like(each[-1], goal)) for each in features), torch.zeros(()))


def pix2pixhd(batch: int, mode: str = "training", height: int = 512, width: int = 1024) -> Step:
    labels, photo = torch.randn(batch, LABELS, height, width), torch.randn(batch, 3, height, width)
    make = generator()
    if mode != "training":
        return make_step(make, labels, lambda image: image.sum(), sgd, mode)
    assert mode in MODES
    judge = Discriminators()

    def adam(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))

    update_make, update_judge = adam(make), adam(judge)

    def train() -> None:
        image = make(labels)
        on_fake = judge(torch.cat([labels, image.detach()], 1))
        on_real = judge(torch.cat([labels, photo], 1))
        loss_judge = 0.5 * (_adversarial(on_fake, 0.0) + _adversarial(on_real, 1.0))
        on_made = judge(torch.cat([labels, image], 1))
        loss_make = _adversarial(on_made, 1.0)
        for ours, theirs in zip(on_made, on_real):
            for a, b in zip(ours[:-1], theirs[:-1]):
                loss_make = loss_make + 2.5 * F.l1_loss(a, b.detach())
        update_make.zero_grad()
        loss_make.backward()
        update_make.step()
        update_judge.zero_grad()
        loss_judge.backward()
        update_judge.step()

    return train
