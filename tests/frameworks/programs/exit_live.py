"""The interpreter ends with live tensors in globals, in cycles and in a daemon thread that ran operators until then."""

import atexit
import threading
from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import nn

KEPT: list[Any] = []


class Cycle:
    """Holds a tensor and itself, so that only the garbage collector can free it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.me = self


class Worker(threading.Thread):
    """Runs operators until it is told to stop, then holds its tensors and never returns."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.x = torch.randn(512, 512)
        self.running, self.stop, self.stopped = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.001):
            self.x = (self.x * 1.01).tanh()
            self.running.set()
        self.stopped.set()
        threading.Event().wait()


def at_exit(model: nn.Module, x: torch.Tensor, expected: float, worker: Worker) -> None:
    """The exit has begun; operators still work. A thread that comes out of one later aborts plain PyTorch too."""
    with torch.no_grad():
        assert model(x).sum().item() == expected
    worker.stop.set()
    worker.stopped.wait()


def main() -> None:
    path = begin()
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 512)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    KEPT.append((model, optimizer, x, model(x)))
    KEPT.append(Cycle(torch.randn(512, 512)))
    worker = Worker()
    worker.start()
    worker.running.wait()
    with torch.no_grad():
        expected = model(x).sum().item()
    atexit.register(at_exit, model, x, expected, worker)
    finish(path, {"model": model.state_dict(), "losses": losses, "expected": expected})


if __name__ == "__main__":
    main()
