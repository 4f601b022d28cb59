"""Copies in parts between views of any layout and type. Each element is moved or converted by itself."""

from __future__ import annotations

from torch import Tensor

from ooc.pytorch.splitting.geometry import blocks, narrowed


def move(target: Tensor, source: Tensor, part_bytes: int, chunk_bytes: int) -> int:
    """Copies `source`, broadcast, to `target` in parts that touch at most `part_bytes` of both; returns how many."""
    parts = 0
    for index in blocks([target, source], part_bytes, chunk_bytes):
        narrowed(target, index).copy_(narrowed(source, index))
        parts += 1
    return parts
