"""Where views are cut: every element once, and no further than what is touched becomes less."""

from __future__ import annotations

import math

import pytest
import torch

from ooc.pytorch.splitting.blocks import is_dense
from ooc.pytorch.splitting.geometry import blocks, footprint, narrowed

CHUNK = 4096


@pytest.mark.parametrize("part_chunks", [3, 4, 6, 9, 40])
def test_blocks_of_two_layouts_cover_each_element_once_and_touch_little(part_chunks: int) -> None:
    tensors = [torch.zeros(128, 128), torch.zeros(128, 128).t(), torch.zeros(128, 128)]
    least = sum(footprint(tensor[:1, :1], CHUNK) for tensor in tensors)
    seen, parts = torch.zeros(128, 128), 0
    for index in blocks(tensors, part_chunks * CHUNK, CHUNK, 4):
        narrowed(seen, index).add_(1)
        touched = sum(footprint(narrowed(tensor, index), CHUNK) for tensor in tensors)
        assert touched <= max(part_chunks * CHUNK, least)
        parts += 1
    assert bool((seen == 1).all())
    # A chunk holds eight lines, so blocks of eight by eight touch what a single element may: two chunks of each.
    assert parts <= max(256, math.ceil(3 * 128 * 128 * 4 / (part_chunks * CHUNK)))


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((3, 1), (1, 7), True),  # where there is one element no stride counts
        ((0, 3), (9, 9), True),
        ((3, 4), (5, 1), False),
        ((3, 4), (0, 1), False),
        ((3, 3), (2, 2), False),  # as many elements as places, of which some are used twice
    ],
)
def test_dense_is_what_has_each_place_once(size: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(torch.empty(20).as_strided(size, stride)) is dense
