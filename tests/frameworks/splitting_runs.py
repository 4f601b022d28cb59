"""Programs whose tensors are larger than the budget, run out-of-core and in plain memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from processes import Ended, code, run_source

BUDGET = 512 << 10
SMALL = {
    "OOC_BUDGET": str(BUDGET),
    "OOC_CHUNK_SIZE": "16KiB",
    "OOC_SMALL_LIMIT": "32KiB",
    "OOC_EMULATED_GRANULARITY": "16KiB",
}

COMMON = """
    import hashlib
    import torch

    torch.manual_seed(7)

    def digest(tensor):
        total = hashlib.sha256()
        for part in tensor.detach().contiguous().view(-1).split(1 << 14):
            total.update(part.clone().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:16]

    def show(name, tensor):
        print(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, digest(tensor))
"""


def both(tmp_path: Path, source: str, threads: int = 1, **variables: str) -> Ended:
    """Runs it out-of-core and in plain memory; the outputs are equal. Gives the first."""
    plain = run_source(tmp_path, code(COMMON, source), OOC_ALLOC="0", OMP_NUM_THREADS=str(threads)).check()
    small = out_of_core(tmp_path, source, threads, **variables).check()
    assert small.output == plain.output != ""
    return small


def out_of_core(tmp_path: Path, source: str, threads: int = 1, **variables: str) -> Ended:
    """Runs it with a file of verdicts of its own, and checks that the limits were kept."""
    store = {"OOC_SPLIT_STORE": str(tmp_path / "store.sqlite"), "OMP_NUM_THREADS": str(threads)}
    ended = run_source(tmp_path, code(COMMON, source), **{**SMALL, **store, **variables})
    if ended.summary is not None:
        check_limits(ended.summary)
    return ended


def check_limits(figures: dict[str, Any]) -> None:
    """The device's memory was never more than the budget, and nothing of it is lost."""
    assert figures["device_peak_bytes"] <= figures["budget_bytes"]
    assert figures["external_fragmentation_ratio"] == 0
