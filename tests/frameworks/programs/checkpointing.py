"""Activation checkpointing in both of its modes, with dropout (the random state is restored when recomputing),

and saved-tensor hooks that pack activations into half precision. Recomputation runs operators inside backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def network() -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256), nn.LayerNorm(256), nn.Tanh()
        )

    return nn.Sequential(*(block() for _ in range(4)))


def packed(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def unpacked(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def run(mode: str, x: Tensor, y: Tensor) -> dict[str, Any]:
    torch.manual_seed(2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(step: int) -> Tensor:
        # The reentrant mode gives no gradients to a block whose inputs ask for none.
        h = x[step].clone().requires_grad_()
        if mode == "sequential":
            return F.mse_loss(checkpoint_sequential(model, 2, h, use_reentrant=False), y[step])
        if mode == "packed":
            with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
                return F.mse_loss(nn.functional.gelu(h * torch.sigmoid(h)), y[step]) + F.mse_loss(model[0](h), y[step])
        for block in model:
            h = checkpoint(block, h, use_reentrant=mode == "reentrant")
        return F.mse_loss(h, y[step])

    losses = train(model, optimizer, 3, loss_of)
    return {"model": model.state_dict(), "losses": losses}


def main() -> None:
    path = begin()
    x, y = torch.randn(3, 1024, 256), torch.randn(3, 1024, 256)
    results = {mode: run(mode, x, y) for mode in ("reentrant", "non_reentrant", "sequential", "packed")}
    finish(path, results)


if __name__ == "__main__":
    main()
