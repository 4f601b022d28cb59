"""Small models that are both really recorded and recorded with fake tensors; see test_fake.py.

python small_models.py NAME BATCH TRACE      runs iterations under the allocator and writes the last one's trace
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Any]


class Images(nn.Module):
    """Convolutions, batch norm, pooling, a residual, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.output = nn.Linear(16 * 16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        y = F.relu(self.norm2(self.conv2(x)), inplace=True) + x
        logits: Tensor = self.output(F.dropout(y.flatten(1), 0.2))
        return logits


class Text(nn.Module):
    """Embeddings, attention, layer norm, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(512, 64)
        self.norm = nn.LayerNorm(64)
        self.qkv, self.project = nn.Linear(64, 192), nn.Linear(64, 64)
        self.output = nn.Linear(64, 512, bias=False)
        self.output.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.gelu(self.project(y.transpose(1, 2).reshape(batch, length, 64)))
        logits: Tensor = self.output(x)
        return logits


def images(batch: int) -> Step:
    model = Images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def text(batch: int) -> Step:
    model = Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.zeros(batch, 64, dtype=torch.int64)

    def step() -> None:
        for _ in range(2):  # gradients are accumulated
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference(batch: int) -> Step:
    model = Images().eval()
    inputs = torch.randn(batch, 3, 32, 32)

    def step() -> None:
        with torch.no_grad():
            model(inputs)

    return step


def compiled(batch: int) -> Step:
    model = Images()
    compiled_model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)

    def step() -> None:
        loss = F.cross_entropy(compiled_model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


MODELS = {"images": images, "text": text, "inference": inference, "compiled": compiled}

if __name__ == "__main__":
    import ooc

    iteration = MODELS[sys.argv[1]](int(sys.argv[2]))
    for _ in range(4):
        ooc.step()
        iteration()
    ooc.step()
    planner = ooc.pytorch._active().planner
    assert planner.last_iteration is not None
    planner.trace(planner.last_iteration).save(sys.argv[3])
