"""A U-Net: the first activations on the way down are the last ones used on the way up."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn


def double_convolution(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1),
        nn.GroupNorm(4, out),
        nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1),
        nn.GroupNorm(4, out),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """(batch, 3, height, width) images to (batch, 2, height, width) logits of each pixel."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.first = double_convolution(3, width)
        self.down = nn.ModuleList(double_convolution(a, b) for a, b in pairwise(sizes))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(double_convolution(2 * size, size) for size in sizes[:-1])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = [self.first(x)]
        for block in self.down:
            skipped.append(block(F.max_pool2d(skipped[-1], 2)))
        y = skipped.pop()
        for grow, block in zip(reversed(self.grow), reversed(self.up), strict=True):
            y = block(torch.cat((skipped.pop(), grow(y)), dim=1))
        out: Tensor = self.last(y)
        return out


def main() -> None:
    path = begin()
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(4, 4, 3, 128, 128)
    masks = (images.mean(dim=2) > 0).long()
    losses = train(model, optimizer, 4, lambda step: F.cross_entropy(model(images[step]), masks[step]))
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
