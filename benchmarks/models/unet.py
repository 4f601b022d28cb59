"""U-Net: Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation" (2015).

The convolutions keep the size of their input (padding 1), as most programs have it, where the paper's lose a border.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.plain import conv
from benchmarks.models.steps import Step, make_step, sgd

WIDTHS = (64, 128, 256, 512, 1024)


def _two(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(*conv(channels, width, 3, 1, 1), *conv(width, width, 3, 1, 1))


class UNet(nn.Module):
    """(batch, 3, height, width) to (batch, classes, height, width)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_two(channels, width) for channels, width in zip((3, *WIDTHS), WIDTHS))
        pairs = list(zip(WIDTHS[:0:-1], WIDTHS[-2::-1]))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in pairs)
        self.up = nn.ModuleList(_two(wide, narrow) for wide, narrow in pairs)
        self.head = nn.Conv2d(WIDTHS[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for enlarge, block in zip(self.enlarge, self.up):
            x = block(torch.cat([skips.pop(), enlarge(x)], 1))
        logits: Tensor = self.head(x)
        return logits


def unet(batch: int, mode: str = "training", image: int = 512, classes: int = 21) -> Step:
    labels = torch.zeros(batch, image, image, dtype=torch.int64)
    inputs = torch.randn(batch, 3, image, image)
    return make_step(UNet(classes), inputs, lambda logits: F.cross_entropy(logits, labels), sgd, mode)
