"""A small transformer with each block compiled by torch.compile's default backend; needs a C++ compiler.

Compiled graphs write some of their inputs: each block's averages, and a cache of the last layer's results.
"""

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn


class Block(nn.Module):
    """(batch, time, width) to the same: causal attention and a feed-forward half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("average", torch.zeros(128, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.inward(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.outward(y.transpose(1, 2).reshape(batch, time, width))
        y = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y


def note(cache: Tensor, place: int, values: Tensor) -> Tensor:
    """Writes a line of a cache, and adds to all of it."""
    cache.add_(0.25)
    cache[place] = values
    return cache.mean(0)


def main() -> None:
    path = begin()
    blocks = nn.ModuleList(Block(256, 4) for _ in range(2))
    compiled = [torch.compile(block) for block in blocks]
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    x = torch.randn(4, 8, 128, 256)
    cache, means, compiled_note = torch.zeros(4, 8, 128, 256), [], torch.compile(note, dynamic=True)

    def loss_of(step: int) -> Tensor:
        y = x[step]
        for block in compiled:
            y = block(y)
        means.append(compiled_note(cache, step, y.detach()))
        return F.mse_loss(y, x[step].roll(1, dims=1))

    losses = train(blocks, optimizer, 4, loss_of)
    finish(
        path,
        {
            "model": blocks.state_dict(),
            "optimizer": optimizer.state_dict(),
            "losses": losses,
            "cache": cache,
            "means": means,
        },
    )


if __name__ == "__main__":
    main()
