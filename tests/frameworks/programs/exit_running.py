"""The interpreter ends while a daemon thread is in the middle of a long operator, and never comes out of it."""

import threading
import time

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import nn


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
    # Many seconds of work on a few megabytes, by one thread; the exit below takes a fraction of one.
    threading.Thread(target=torch.linalg.eigvals, args=(torch.randn(3000, 3000),), daemon=True).start()
    time.sleep(0.2)
    finish(path, {"model": model.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
