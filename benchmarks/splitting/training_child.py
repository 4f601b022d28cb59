"""Trains a network whose largest function exceeds the budget, and says what came out.

    python -m benchmarks.splitting.training_child CASE STEPS OUTPUT.json

As in `inference_child`, only OOC_ variables say whether the allocator is on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.child import COUNTERS
from benchmarks.models.gpt2 import GPT2
from benchmarks.models.resnet import example
from benchmarks.splitting.inference_child import fingerprint
from ooc import pytorch

Batch = Callable[[], tuple[Tensor, Tensor]]
IMAGES, IMAGE = 48, 64  # the first batch-norm's gradient, its input and its result: 12 MiB each in ResNet-50's stem
SEQUENCES, LENGTH, VOCABULARY = 4, 128, 16384  # logits of 32 MiB


def resnet() -> tuple[nn.Module, Batch]:
    """ResNet-50 for 100 classes; one batch-norm's backward pass needs 36 MiB."""
    return example().ResNet50(100), lambda: (torch.randn(IMAGES, 3, IMAGE, IMAGE), torch.randint(0, 100, (IMAGES,)))


def gpt() -> tuple[nn.Module, Batch]:
    """A GPT-2 of two layers with a large vocabulary; its logits, their logarithms and gradients are 32 MiB each."""
    model = GPT2(layers=2, width=256, heads=4, length=LENGTH, vocabulary=VOCABULARY, dropout=0.0)

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
        return tokens[:, :-1], tokens[:, 1:].flatten()

    return model, batch


SETTLING = 4  # steps, before each of which all verdicts are waited for
CASES = {"resnet50": resnet, "gpt": gpt}


def main() -> None:
    case, steps, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = CASES[case]()
    kind = torch.optim.SGD if case == "resnet50" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    session = pytorch._active() if pytorch.enabled() else None
    losses, seen = [], []
    for number in range(steps):
        if session is not None and number < SETTLING:
            session.split_rows()  # waits for verdicts
        before = session.core.stats() if session is not None else {}
        began = time.perf_counter()
        inputs, labels = batch()
        optimizer.zero_grad()
        result = model(inputs)
        loss = F.cross_entropy(result.flatten(0, -2), labels)
        del result
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        now: dict[str, Any] = session.core.stats() if session is not None else {}
        entry: dict[str, Any] = {"seconds": time.perf_counter() - began}
        seen.append(entry | {name: now[name] - before[name] for name in COUNTERS if name in now})
    state = [*model.parameters(), *model.buffers()]
    record = {
        "steps": seen,
        "losses": losses,
        "state_fingerprint": fingerprint(state),
        "summary": pytorch.summary() if session is not None else None,
    }
    target.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
