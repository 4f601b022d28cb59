"""Optimizers that take every parameter in one call, and gradients accumulated over micro-batches and clipped.

The optimizer state is larger than the activations here, so a call that needs all of it at once needs most of
the live peak.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adam_amsgrad_foreach": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "rmsprop_foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=True),
}


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(640, 640), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(640, 16))


def run(make: Callable[[Any], torch.optim.Optimizer], x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(1)
    model = network()
    optimizer = make(model.parameters())
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss = F.mse_loss(model(x[part]), y[part]) / 2
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=True)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))
        optimizer.step()
    return {"model": model.state_dict(), "losses": losses, "norms": norms}


def main() -> None:
    path = begin()
    x, y = torch.randn(2, 256, 640), torch.randn(2, 256, 16)
    results: dict[str, Any] = {name: run(make, x, y) for name, make in OPTIMIZERS.items()}
    # The list operators themselves, on lists of which some tensors are views of one storage.
    whole = torch.randn(4, 256, 256)
    tensors = [*whole.unbind(0), torch.randn(100_000), torch.randn(3)]
    torch._foreach_mul_(tensors, 1.5)
    torch._foreach_add_(tensors, torch._foreach_sqrt(torch._foreach_abs(tensors)), alpha=0.5)
    results["lists"] = {"whole": whole, "tensors": tensors[4:], "norms": list(torch._foreach_norm(tensors))}
    finish(path, results)


if __name__ == "__main__":
    main()
