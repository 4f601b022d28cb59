"""What the programs share: their one argument, their seed, a training loop, and how they hand over their results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def begin(seed: int = 0) -> str | None:
    """Seed PyTorch, ask for deterministic operators, and return the file to save results to, if one was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", metavar="FILE", help="write every result with torch.save")
    arguments = parser.parse_args()
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    warm_vector_functions()
    path: str | None = arguments.save
    return path


def warm_vector_functions() -> None:
    """Call MKL's vector functions once from one thread.

    When the first call in a process comes from two threads at once (a tensor of more than 32,768 elements), MKL may
    answer one of them with 12 good bits instead of 24: measured with `torch.sqrt` in plain PyTorch 2.13, in 5 of
    6,000 processes on a busy machine. No comparison of bits survives that.
    """
    one = torch.ones(1)
    for name in ("sqrt", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh", "asin", "acos", "atan", "erf"):
        getattr(torch, name)(one * 0.5)
    one.double().mul(0.5).sqrt()


def train(model: nn.Module, optimizer: Any, steps: int, loss_of: Callable[[int], Tensor]) -> list[float]:
    """``steps`` plain training steps on ``loss_of(step)``, with the gradients clipped. Returns the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def finish(path: str | None, results: dict[str, Any]) -> None:
    """Check that every float is a number, and save. ``results`` holds tensors, numbers and containers of them."""
    check_finite(results)
    if path:
        torch.save(results, path)
    print("done")


def check_finite(value: Any) -> None:
    """AssertionError if a tensor or number, however deep, is infinite or not a number."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            check_finite(item)
    elif isinstance(value, (Tensor, float)):
        assert torch.as_tensor(value).isfinite().all(), "a result is infinite or not a number"
