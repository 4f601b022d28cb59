"""Views: how much memory they touch, in what order they lie, and how they are cut so that little of it is touched.

Sizes and strides are in elements unless said otherwise; a footprint is in bytes, in whole chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MOST_RANGES = 256  # as in operands.h: a view with more gaps than that is one range from its first to its last byte

Index = tuple[tuple[int, int, int], ...]  # dimension, start, length: narrowed in this order


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a view, both included; 0 if it has none."""
    if any(length == 0 for length in size):
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride))


def dense_stride(size: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, with dimensions in the order of the strides `like` (of equal ones the later one inside)."""
    made, step = [0] * len(size), 1
    for dimension in sorted(range(len(size)), key=lambda d: (like[d], -d)):
        made[dimension] = step
        step *= max(size[dimension], 1)
    return tuple(made)


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose last dimension is innermost."""
    return dense_stride(size, [0] * len(size))


def layout(*tensors: Tensor) -> torch.memory_format:
    """The layout in which convolutions and paddings work: channels last if any tensor is so."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensors[0].dim())
    if last and any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in tensors):
        return last
    return torch.contiguous_format


def strides_of(size: Sequence[int], order: torch.memory_format) -> tuple[int, ...]:
    """Strides of a dense tensor in a layout."""
    if order == torch.contiguous_format:
        return contiguous(size)
    return dense_stride(size, [2, 0, *([1] * (len(size) - 2))])


def footprint(tensor: Tensor, chunk_bytes: int) -> int:
    """Bytes of the chunks that a view may touch, wherever its storage begins in a chunk; as operands.h counts them."""
    return footprint_of(tensor.shape, tensor.stride(), tensor.element_size(), chunk_bytes)


def footprint_of(size: Sequence[int], stride: Sequence[int], item: int, chunk_bytes: int) -> int:
    """The footprint of a view that is given by its sizes and strides, and by the bytes of an element, `item`."""
    whole = extent(size, stride) * item
    runs = 1
    inner_size, inner_stride = list(size), list(stride)
    moving = [d for d in range(len(size)) if size[d] > 1 and stride[d] != 0]
    for dimension in sorted(moving, key=lambda d: -stride[d]):
        inner_size[dimension] = 1
        inner = extent(inner_size, inner_stride) * item
        if stride[dimension] * item - inner < chunk_bytes or runs * size[dimension] > MOST_RANGES:
            break
        runs *= size[dimension]
        whole = inner
    return runs * rounded(whole, chunk_bytes)


def rounded(size_bytes: int, chunk_bytes: int) -> int:
    """Bytes of the chunks that a range of `size_bytes` bytes touches at most."""
    return (-(-size_bytes // chunk_bytes) + (chunk_bytes > 1 and size_bytes > 0)) * chunk_bytes


def narrowed(tensor: Tensor, index: Index) -> Tensor:
    """The part of a tensor at an index. Dimensions count from the right (-1 is the last): tensors may be broadcast."""
    for dimension, start, length in index:
        if tensor.dim() >= -dimension and tensor.shape[dimension] != 1:
            tensor = tensor.narrow(dimension, start, length)
    return tensor


def blocks(tensors: Sequence[Tensor], part_bytes: int, chunk_bytes: int, extra_bytes: int = 0) -> Iterator[Index]:
    """Cuts tensors that broadcast to the shape of the first one into blocks that touch little memory.

    Each block touches at most `part_bytes` in all tensors together, or no more than a single element may touch.
    `extra_bytes` are what a part takes beside that for each of its elements of the first tensor.
    Method: halve the dimension whose halves touch least; of equally good ones, the one with the first tensor's largest
    stride.
    """
    views = [(t.shape, t.stride(), t.element_size()) for t in tensors]
    order = {d - tensors[0].dim(): step for d, step in enumerate(tensors[0].stride())}

    def touched(box: Index, extra_bytes: int) -> int:
        whole = {dimension: length for dimension, _, length in box}
        total = extra_bytes * math.prod(whole.values())
        for size, stride, item in views:
            lengths = [1 if n == 1 else whole[d - len(size)] for d, n in enumerate(size)]
            total += footprint_of(lengths, stride, item, chunk_bytes)
        return total

    def halves(box: Index, place: int) -> list[Index]:
        dimension, start, length = box[place]
        first = length - length // 2
        cut = ((dimension, start, first), (dimension, start + first, length - first))
        return [(*box[:place], half, *box[place + 1 :]) for half in cut]

    def halved(box: Index) -> Iterator[Index]:
        places = [place for place, (_, _, length) in enumerate(box) if length > 1]
        if not places or touched(box, extra_bytes) <= part_bytes:
            yield box
            return
        best = min(places, key=lambda place: (touched(halves(box, place)[0], extra_bytes), -order[box[place][0]]))
        for half in halves(box, best):
            yield from halved(half)

    box = tuple((d - tensors[0].dim(), 0, n) for d, n in enumerate(tensors[0].shape))
    one = tuple((dimension, 0, min(length, 1)) for dimension, _, length in box)
    part_bytes = max(part_bytes, touched(one, 0) + (chunk_bytes if extra_bytes else 0))
    yield from halved(box)


def flat(tensor: Tensor) -> Tensor | None:
    """A dense tensor's memory as a tensor of one dimension; None if the tensor has gaps or overlaps."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else None


def storage_line(tensor: Tensor) -> Tensor:
    """A tensor's storage from its start to the tensor's last element, in one dimension."""
    return tensor.as_strided((tensor.storage_offset() + extent(tensor.shape, tensor.stride()),), (1,), 0)
