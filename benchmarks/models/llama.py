"""Llama-style: Touvron et al., "LLaMA: open and efficient foundation language models" (2023), with grouped heads.

The default sizes are about those of Llama 3.2 1B: 16 layers of 2048, 32 heads over 8 of keys and values, 8192 wide,
128,256 tokens, tied embeddings. Weights, gradients and the optimizer's state are in `dtype`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.steps import AdamWByBlock, Step, adamw, make_step


class RootMeanSquareNorm(nn.Module):
    """x / sqrt(mean(x^2)), in float32, times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position: Su et al., "RoFormer" (2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    """Attention and a gated network; norm before each, both add to their input."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.norm1, self.norm2 = RootMeanSquareNorm(width), RootMeanSquareNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * self.each, bias=False) for _ in range(2))
        self.project = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        query = self.query(y).view(batch, length, self.heads, self.each).transpose(1, 2)
        key = self.key(y).view(batch, length, self.groups, self.each).transpose(1, 2)
        value = self.value(y).view(batch, length, self.groups, self.each).transpose(1, 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (key, value))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """(batch, length) tokens to (batch, length, vocabulary) logits."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.each = width // heads
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers))
        self.norm = RootMeanSquareNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        places = torch.arange(tokens.shape[1], dtype=torch.float32)
        rates = 500_000.0 ** (-torch.arange(0, self.each, 2, dtype=torch.float32) / self.each)
        angles = torch.outer(places, rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.output(self.norm(x))
        return logits


def llama(
    batch: int,
    mode: str = "training",
    layers: int = 16,
    width: int = 2048,
    heads: int = 32,
    groups: int = 8,
    hidden: int = 8192,
    vocabulary: int = 128256,
    length: int = 2048,
    dtype: str = "bfloat16",
    by_block: bool = False,
) -> Step:
    model = Llama(layers, width, heads, groups, hidden, vocabulary).to(getattr(torch, dtype))
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    optimizer = AdamWByBlock if by_block else adamw
    return make_step(
        model, tokens, lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), optimizer, mode
    )
