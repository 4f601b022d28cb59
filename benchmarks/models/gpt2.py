"""GPT-2: Radford et al., "Language models are unsupervised multitask learners" (2019).

Embeddings and output layer share their weights; attention is fused.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.steps import AdamWByBlock, Step, adamw, make_step


class Block(nn.Module):
    """Attention and a two-layer network four times as wide; norm before each, both add to their input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        rows = self.qkv(self.norm1(x)).split(width, dim=2)
        query, key, value = (row.view(batch, length, self.heads, -1).transpose(1, 2) for row in rows)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.project(y.transpose(1, 2).reshape(batch, length, width)), dropout)
        y = self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(y, dropout)


class GPT2(nn.Module):
    """(batch, length) tokens to (batch, length, vocabulary) logits."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits


def gpt2(
    batch: int,
    layers: int,
    width: int,
    heads: int,
    mode: str = "training",
    length: int = 1024,
    vocabulary: int = 50257,
    dropout: float = 0.0,
    by_block: bool = False,
) -> Step:
    model = GPT2(layers, width, heads, length, vocabulary, dropout)
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    optimizer = AdamWByBlock if by_block else adamw
    return make_step(
        model, tokens, lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), optimizer, mode
    )
