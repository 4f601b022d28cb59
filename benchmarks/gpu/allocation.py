"""Nanoseconds of a malloc and free pair through PyTorch's allocator interface, for some sizes, when memory is there."""

from __future__ import annotations

import time

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
ROUNDS = 50
PAIRS = 200


def measure(rounds: int = ROUNDS, pairs: int = PAIRS) -> dict[str, list[float]]:
    """{size: nanoseconds a pair, one for each round}. The calls are the same whoever allocates."""
    import torch

    malloc, free = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    stream = torch.cuda.current_stream()
    found: dict[str, list[float]] = {name: [] for name in SIZES}
    for size in SIZES.values():
        free(malloc(size, stream=stream))
    for _ in range(rounds):
        for name, size in SIZES.items():
            began = time.perf_counter_ns()
            for _ in range(pairs):
                free(malloc(size, stream=stream))
            found[name].append((time.perf_counter_ns() - began) / pairs)
    return found
