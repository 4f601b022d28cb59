"""Steps of one job under one arm, timed; and the fingerprint of what they end with."""

from __future__ import annotations

import hashlib
import struct
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.arms import Arm, local_parameters
from benchmarks.gpu.models import Job

_PART = 1 << 22  # elements mixed at once: what the fingerprint may take of a small budget


def train(
    job: Job, arm: Arm, device: torch.device, *, warm_up: int, steps: int, phases: bool = False
) -> dict[str, Any]:
    """Runs the steps; the record's part that they make.

    `seconds`: of each step that counts, the device idle at both ends. `losses`: of all. `forward_seconds`: with
    `phases`, for which the host waits in the middle of the step.
    """
    optimizer = job.make_optimizer(job.model.parameters())
    losses: list[float] = []
    seconds: list[float] = []
    forward_seconds: list[float] = []
    before: dict[str, float] = {}
    for number in range(warm_up + steps):
        if number == warm_up:
            before = arm.counters()
        began = _now(device)
        with arm.forward():
            loss = job.loss()
        turned = _now(device) if phases else began
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        arm.step_ended()
        ended = _now(device)
        if number >= warm_up:
            seconds.append(ended - began)
            if phases:
                forward_seconds.append(turned - began)
    moved = {name: (value - before[name]) / steps for name, value in arm.counters().items()}
    memory = arm.memory(device)
    return {
        "seconds": seconds,
        "forward_seconds": forward_seconds,
        "losses": losses,
        "per_step": moved,
        **memory,
        "digest": digest(job.model, losses),
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def digest(model: nn.Module, losses: list[float]) -> str:
    """A fingerprint of every bit of the parameters and the losses."""
    total = hashlib.sha256()
    for name, parameter in local_parameters(model):
        first, second = fingerprint(parameter)
        total.update(f"{name} {parameter.dtype} {list(parameter.shape)} {first} {second}".encode())
    for loss in losses:
        total.update(struct.pack("<d", loss))
    return total.hexdigest()


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over the elements' bits, each mixed with its place; made where the tensor is, in small parts.

    Integer sums do not depend on their order, so host and device give the same.
    """
    flat = tensor.detach().contiguous().flatten()
    words = flat.view(_WORDS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _PART):
        part = words[start : start + _PART].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=flat.device, dtype=torch.int64)
        mixed = (part + 1) * (2 * place + 0x1E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        mixed = mixed ^ (mixed >> 32)
        sums[0] += mixed.sum()
        sums[1] += (mixed * (place | 1)).sum()
    first, second = sums.tolist()
    return first, second
