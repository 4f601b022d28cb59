"""What the campaign runs in PyTorch: training with too little memory, and operators larger than the budget.

A step may be refused, with a reason. Where nothing was refused, the digest must be that of the undisturbed run. At the
end the failures stop: tensors that nobody wrote must hold what they held, and the books must add up. The exit status is
one of program.cpp's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

import ooc

T = TypeVar("T")
refusals = 0


def attempt(what: Callable[[], T]) -> T | None:
    global refusals
    try:
        return what()
    except RuntimeError as error:
        words = str(error).splitlines()[0]
        print(f"refused {words}")
        refusals += 1
        if len(words) < 20:
            end(5)
        return None


def end(status: int) -> None:
    sys.stdout.flush()
    os._exit(status)


def values(seed: int, count: int = 1 << 18) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).mul_(seed).add_(seed)


def main(driver: str) -> None:
    torch.manual_seed(0)
    kept = [(tensor, seed) for seed in range(1, 9) if (tensor := attempt(lambda seed=seed: values(seed))) is not None]
    model = attempt(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
    hashed = hashlib.sha256()
    if model is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        batch = attempt(lambda: torch.randn(512, 256))

        def step() -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            return loss.item()

        for _ in range(4 if batch is not None else 0):
            hashed.update(repr(attempt(step)).encode())
    large = attempt(lambda: values(3, 3 << 20))  # larger than the budget, so each of these runs in parts
    if large is not None:
        thin = torch.ones(512, 8)
        for operation in (lambda: large.add(1).sum().item(), lambda: (large.view(-1, 512) @ thin).sum().item()):
            hashed.update(repr(attempt(operation)).encode())
    if refusals == 0:
        print("digest", hashed.hexdigest())
        if os.environ.get("FAULTS_DIGEST", hashed.hexdigest()) != hashed.hexdigest():
            end(3)
    if "FAULTS_NEVER_END" in os.environ:  # the device is lost, and what it held is saved
        ooc.disable()
    ctypes.CDLL(driver).ooc_emulated_clear_faults()
    for tensor, seed in [*kept, *([(large, 3)] if large is not None else [])]:
        if not torch.equal(tensor, values(seed, tensor.numel())):
            end(3)
    if ooc.enabled() and ooc.summary()["external_fragmentation_ratio"] != 0:
        end(4)


main(sys.argv[2])
