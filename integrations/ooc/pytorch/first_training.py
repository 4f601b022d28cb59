"""The training of `swapd doctor --first-run`: python -m ooc.pytorch.first_training ALLOC DEVICE SIZE.

A language model with AdamW, the same in every run, so two runs that are right end with the same bits: it prints a JSON
object with a digest of every result. ALLOC is cuda, emulated, or off for plain PyTorch; DEVICE cuda or cpu.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda

# width, layers, heads, words, rows, length, steps. The large one needs some 3 GB, and the small one 40 MB.
_SIZES = {"large": (768, 6, 12, 8192, 4, 512, 20), "small": (128, 4, 4, 512, 8, 64, 5)}


def train(device: str, size: str) -> dict[str, Tensor]:
    """Returns every parameter, every state of the optimizer and the losses, by name."""
    width, layers, heads, words, rows, length, steps = _SIZES[size]
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp):
        enable(False)  # their backward passes add up in any order
    blocks = [
        nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    model = nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(words, (rows, length + 1)).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    results: dict[str, Tensor] = {"losses": torch.stack(losses)}
    for name, parameter in model.named_parameters():
        results[name] = parameter.detach()
        results |= {f"{name}, {state}": value for state, value in optimizer.state[parameter].items()}
    return results


def main(alloc: str, device: str, size: str) -> None:
    """Runs the training and prints what came of it."""
    import ooc

    if alloc != "off":
        ooc.enable(alloc=alloc)
    began = time.monotonic()
    results = train(device, size)
    found: dict[str, Any] = {"seconds": time.monotonic() - began, "losses": results["losses"].tolist()}
    if alloc != "off":
        found["summary"] = ooc.summary()
    elif device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    every_bit = {name: value.cpu().contiguous().view(-1).view(torch.uint8) for name, value in results.items()}
    digests = {name: hashlib.sha256(value.numpy().tobytes()).hexdigest()[:16] for name, value in every_bit.items()}
    print(json.dumps({**found, "digests": digests}))


if __name__ == "__main__":
    main(*sys.argv[1:])
