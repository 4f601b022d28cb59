"""Makes one of mmCNN's networks, runs it a few times, and says what that took; in plain memory or out-of-core.

    python -m benchmarks.splitting.inference_child NETWORK ITERATIONS OUTPUT.json

Whether the allocator is on, and within which budget, is said by OOC_ variables alone: nothing here knows of it but what
is read from its counters. The network is made under the same limit as it runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.child import COUNTERS
from benchmarks.models.mmcnn import IMAGES, NETWORKS
from ooc import pytorch
from swapd.trace.trace import Trace

FIRST, SETTLING = 10, 4  # inferences; after the first ones, all verdicts are waited for
_HASHED = 1 << 16  # elements at a time: a fingerprint must not need more memory than the limit


class LayerFunctions:
    """Which functions of an iteration belong to which layer."""

    def __init__(self, model: nn.Sequential, count: Any) -> None:
        self.count = count
        self.began = 0
        self.spans: dict[str, list[int]] = {}
        for name, layer in model.named_children():
            layer.register_forward_pre_hook(lambda *_, name=name: self._note(name, 0))
            layer.register_forward_hook(lambda *_, name=name: self._note(name, 1))

    def start(self) -> None:
        self.began = self.count()

    def _note(self, name: str, end: int) -> None:
        self.spans.setdefault(name, [0, 0])[end] = self.count() - self.began


def fingerprint(tensors: list[Tensor]) -> str:
    """Of every bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for begin in range(0, flat.numel(), _HASHED):
            digest.update(flat[begin : begin + _HASHED].clone().numpy().tobytes())
    return digest.hexdigest()


def working_sets(trace: Trace) -> list[int]:
    """Bytes of chunks that each function holds at once: everything that it uses or allocates."""
    needs = [0] * trace.functions
    chunks = [math.ceil(size / trace.chunk_bytes) for size in trace.variable_bytes.tolist()]
    for function in range(trace.functions):
        used = trace.use_variables[trace.use_offsets[function] : trace.use_offsets[function + 1]].tolist()
        born = (trace.born == function).nonzero()[0].tolist()
        needs[function] = sum(chunks[v] for v in {*used, *born}) * trace.chunk_bytes
    return needs


def layer_bytes(trace: Trace, spans: dict[str, list[int]]) -> dict[str, int]:
    """The largest working set of each layer's functions."""
    needs = working_sets(trace)
    return {name: max(needs[first:end], default=0) for name, (first, end) in spans.items()}


def main() -> None:
    network, iterations, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.perf_counter()
    model = NETWORKS[network]().eval()
    made_seconds = time.perf_counter() - began
    image = torch.randn(1, 3, IMAGES[network], IMAGES[network])
    session = pytorch._active() if pytorch.enabled() else None

    def counters() -> dict[str, Any]:
        stats = session.core.stats() if session is not None else {}
        return {name: stats[name] for name in COUNTERS if name in stats}

    layers = LayerFunctions(model, lambda: counters().get("functions", 0))

    def infer(times: int) -> tuple[list[dict[str, Any]], Tensor]:
        steps = []
        for _ in range(times):
            before, began = counters(), time.perf_counter()
            layers.start()
            result = model(image)
            seconds = time.perf_counter() - began
            now = counters()
            steps.append({"seconds": seconds, **{name: value - before[name] for name, value in now.items()}})
        return steps, result

    with torch.no_grad():
        first_steps, first_result = infer(FIRST)
        for _ in range(SETTLING if session is not None else 0):
            session.split_rows()  # waits for verdicts
            infer(1)
        steps, result = infer(iterations)
    assert torch.equal(first_result, result)
    record: dict[str, Any] = {"made_seconds": made_seconds, "first_steps": first_steps, "steps": steps}
    if session is not None:
        last = session.planner.last_iteration
        assert last is not None
        record["layer_bytes"] = layer_bytes(session.planner.trace(last), layers.spans)
    record["result"] = result.double().flatten().tolist()
    record["result_fingerprint"] = fingerprint([result])
    record["parameters_fingerprint"] = fingerprint(list(model.parameters()))
    if session is not None:
        record["summary"] = pytorch.summary()
    target.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
