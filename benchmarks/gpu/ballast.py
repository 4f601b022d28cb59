"""Ballast: a process that holds the device's memory down to what an arm may have. `python -m benchmarks.gpu.ballast`

It reads a line, the free bytes to leave (or `release`), and answers with one JSON object: free_bytes as the driver then
says. Plain device allocations, in one process for all cases; managed memory is never used.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PIECE = 1 << 30  # so that what is left fits to a chunk, not to a gigabyte, and a hole is no hindrance
SMALLEST = 2 << 20


def pieces(free_bytes: int, leave_bytes: int) -> list[int]:
    """Sizes to allocate, large ones first, so that no more than `leave_bytes` stay free, within `SMALLEST`."""
    excess = max(0, free_bytes - leave_bytes)
    sizes = [PIECE] * (excess // PIECE)
    rest = excess % PIECE // SMALLEST * SMALLEST
    return [*sizes, rest] if rest else sizes


def serve() -> None:
    """Answers until its input ends."""
    import torch

    held: list[Any] = []
    torch.cuda.init()
    print(json.dumps({"free_bytes": torch.cuda.mem_get_info()[0]}), flush=True)
    for line in sys.stdin:
        held.clear()
        torch.cuda.empty_cache()
        if line.strip() != "release":
            for size in pieces(torch.cuda.mem_get_info()[0], int(line)):
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        print(json.dumps({"free_bytes": torch.cuda.mem_get_info()[0]}), flush=True)


if __name__ == "__main__":
    serve()
