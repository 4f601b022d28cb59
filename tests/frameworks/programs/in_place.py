"""Views, aliases and writes in place: one storage under many tensors, ``out=`` arguments, aliases that outlive."""

from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn


class InPlace(nn.Module):
    """(batch, 256) to (batch, 256), with as much done in place as autograd allows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(6, 256, 256) / 16)
        self.register_buffer("history", torch.zeros(6, 1024, 256))
        self.history: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for index, weight in enumerate(self.weights.unbind(0)):
            y = x @ weight
            y.add_(x).relu_()
            # The buffer is one storage; each layer writes its slice and reads the one before.
            with torch.no_grad():
                self.history[index].mul_(0.5).add_(y.detach(), alpha=0.5)
            x = F.layer_norm(y, (256,)) + 0.01 * self.history[index - 1].clone()
        return x


def aliases() -> dict[str, Any]:
    base = torch.randn(1024, 1024)
    column, window, turned = base[:, 3], base.as_strided((500, 500), (1024, 2), 7), base.t()
    column.zero_()
    window.mul_(2)
    torch.add(turned, 1.0, out=turned)
    kept = base[10:20].view(-1)
    total = base.sum()
    del base, window, turned
    out = torch.empty(0)
    torch.matmul(torch.randn(700, 300), torch.randn(300, 900), out=out)
    expanded = torch.randn(1, 1024).expand(512, 1024)
    index = torch.randint(1024, (512, 64))
    gathered = torch.zeros(512, 1024).scatter_add_(1, index, torch.ones(512, 64))
    chunks = torch.randn(8, 64, 1024).chunk(4)
    torch.cat(chunks[::-1], out=(joined := torch.empty(8, 64, 1024)))
    swapped_a, swapped_b = torch.ones(300, 300), torch.zeros(200, 200)
    swapped_a.data, swapped_b.data = swapped_b.data, swapped_a.data
    return {
        "column": column.clone(),
        "kept": kept,
        "total": total,
        "out": out,
        "expanded": expanded + 1,
        "gathered": gathered,
        "joined": joined,
        "swapped": [swapped_a, swapped_b],
    }


def main() -> None:
    path = begin()
    model = InPlace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1024, 256)
    losses = train(model, optimizer, 4, lambda step: F.mse_loss(model(x), x.roll(step, dims=0)))
    finish(path, {"model": model.state_dict(), "losses": losses, "aliases": aliases()})


if __name__ == "__main__":
    main()
