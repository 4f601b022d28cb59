"""Trains models of changing shapes for as long as it is told to, and prints a line of JSON after each round.

python tests/soak/program.py OUT-OF-CORE(0|1): a line {"round", "digest", "rss_bytes", "interrupts", ...} each. Ends
when its standard input is closed. The digests depend on nothing but the number of the round: not on signals, nor on
budgets.
"""

from __future__ import annotations

import hashlib
import json
import random
import select
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

SHAPES = [(width, layers, batch) for width in (96, 128, 192) for layers in (4, 6) for batch in (32, 80)]
STEPS = 4


class Interrupts:
    """What SIGINT does: an operator in the handler while a model trains, an exception while nothing is at stake."""

    def __init__(self) -> None:
        self.count = 0
        self.raises = False
        signal.signal(signal.SIGINT, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.raises:
            raise KeyboardInterrupt
        torch.ones(70_000).mul_(2).sum().item()


def model_of(width: int, layers: int) -> nn.Module:
    block = [nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*(nn.Sequential(*block[:1], block[1], *block[2:]) for _ in range(layers)))


def train(number: int, session: Any) -> str:
    """A round: a model, a few steps, and the digest of its losses and parameters."""
    width, layers, batch = SHAPES[number % len(SHAPES)]
    torch.manual_seed(number)
    model = model_of(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(batch, 9, width)
    digest = hashlib.sha256()
    for _ in range(STEPS):
        if session is not None and random.random() < 0.5:
            lower_budget(session)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def lower_budget(session: Any) -> None:
    """A budget between half of the first one and all of it; one that what is pinned does not fit is refused."""
    from ooc_alloc import OocError

    try:
        session.core.set_budget(int(session.budget_bytes * random.uniform(0.5, 1)))
    except OocError:
        session.core.set_budget(session.budget_bytes)


def scratch(interrupts: Interrupts) -> None:
    """Work that an interrupt may end anywhere."""
    interrupts.raises = True
    try:
        tensors = [torch.full((300, 100), float(index)) for index in range(20)]
        torch.stack(tensors).sum().item()
    except KeyboardInterrupt:
        pass
    finally:
        interrupts.raises = False


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    torch.set_num_threads(1)
    interrupts = Interrupts()
    session = None
    if sys.argv[1] == "1":
        import ooc

        session = ooc.pytorch._active()
    number = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        line: dict[str, Any] = {"round": number, "digest": train(number, session)}
        try:
            scratch(interrupts)
        except KeyboardInterrupt:  # between the end of the work and the end of its being at stake
            interrupts.raises = False
        line |= {"rss_bytes": rss_bytes(), "interrupts": interrupts.count}
        if session is not None:
            figures = session.summary()
            line |= {name: figures[name] for name in ("swap_out_bytes", "plan_count", "device_peak_bytes")}
        print(json.dumps(line), flush=True)
        number += 1


if __name__ == "__main__":
    main()
