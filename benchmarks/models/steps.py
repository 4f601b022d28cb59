"""What turns a model into a function that runs one iteration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Any]
MODES = ("training", "inference")


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    """SGD with momentum, as image networks are usually trained; momentum 0 keeps no state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


class AdamWByBlock:
    """A fused AdamW for each of a model's `blocks` and one for the rest; gradients are freed as soon as they are used.

    So no operator touches more of the state than a block's, which a model larger than its device's memory needs.
    """

    def __init__(self, model: nn.Module) -> None:
        groups = [list(block.parameters()) for block in model.blocks]  # type: ignore[union-attr, arg-type]
        known = {id(weight) for group in groups for weight in group}
        groups.append([weight for weight in model.parameters() if id(weight) not in known])
        self.optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=True) for group in groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def make_step(
    model: nn.Module,
    inputs: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | AdamWByBlock],
    mode: str,
) -> Step:
    """One iteration of `model` on `inputs`. Raises ValueError for a mode that there is not."""
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    if mode == "inference":
        model.eval()

        def infer() -> None:
            with torch.no_grad():
                model(inputs)

        return infer
    update = optimizer(model)

    def train() -> None:
        update.zero_grad()
        loss_of(model(inputs)).backward()
        update.step()

    return train


def classification(
    model: nn.Module, batch: int, mode: str, image: int, classes: int = 1000, momentum: float = 0.9
) -> Step:
    """An iteration over (batch, 3, image, image) noise and labels that are all 0."""
    labels = torch.zeros(batch, dtype=torch.int64)
    inputs = torch.randn(batch, 3, image, image)
    optimizer = partial(sgd, momentum=momentum)
    return make_step(model, inputs, lambda logits: F.cross_entropy(logits, labels), optimizer, mode)
