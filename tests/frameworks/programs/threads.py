"""Python threads that run operators at the same time, train models of their own, and hand tensors to each other."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import Tensor, nn


def network(seed: int) -> nn.Sequential:
    """The same weights for the same seed, whichever threads draw at the same time."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 30)
    return model


def train_one(seed: int) -> dict[str, Any]:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + seed)
    losses = []
    for _ in range(4):
        x = torch.randn(512, 256, generator=generator)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"model": model.state_dict(), "losses": losses}


def produce(results: "queue.Queue[Tensor | None]", x: Tensor) -> None:
    for index in range(6):
        results.put((x * index).sin())
    results.put(None)


def main() -> None:
    path = begin()
    with ThreadPoolExecutor(4) as pool:
        trained = list(pool.map(train_one, range(6)))

    # One model, read by all threads at once.
    shared, x = network(9), torch.randn(8, 512, 256)
    outputs: list[Tensor | None] = [None] * 8

    def forward(index: int) -> None:
        with torch.no_grad():
            outputs[index] = shared(x[index])

    workers = [threading.Thread(target=forward, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(out, shared(x[index])) for index, out in enumerate(outputs) if out is not None)

    # Made by one thread, consumed and freed by another.
    handed: queue.Queue[Tensor | None] = queue.Queue(maxsize=2)
    producer = threading.Thread(target=produce, args=(handed, torch.randn(1024, 512)))
    producer.start()
    total = torch.zeros(1024, 512)
    while (item := handed.get()) is not None:
        total += item
    producer.join()
    finish(path, {"trained": trained, "outputs": outputs, "total": total})


if __name__ == "__main__":
    main()
