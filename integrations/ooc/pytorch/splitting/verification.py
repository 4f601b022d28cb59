"""Whether a division changes bits: random and special arguments of the same shapes, and the comparison of two results.

Everything here runs on the CPU in plain memory, whatever the budget is and wherever the operator runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ooc.pytorch.splitting.geometry import extent

_COMPARED_AT_ONCE = 1 << 22  # elements
_ALIGNMENT = 64  # bytes to which every storage is aligned; kernels choose by the offset from it
# Kinds of special data: one element in 4096 is special; one in 4 is; all are 0, -0 or -1; all are 0, -0 or 1.
SPARSE, DENSE, NOT_POSITIVE, NOT_NEGATIVE = "sparse", "dense", "not positive", "not negative"
KINDS = (SPARSE, DENSE, NOT_POSITIVE, NOT_NEGATIVE)
# Types whose numbers PyTorch draws; for others they are converted.
_DRAWN = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes of an element


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with `change` applied to every tensor in it, also in lists, tuples and dictionaries."""
    return tree_map_only(Tensor, change, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def random_like(tensor: Tensor, generator: torch.Generator, copy: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """A tensor in plain memory with the same sizes and strides, and the same offset from an aligned address.

    Floating point numbers are drawn from a normal distribution; others are copied by `copy(target, source)`, as they
    may be indexes or labels.
    """
    offset = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT // tensor.element_size()
    length = extent(tensor.shape, tensor.stride())
    memory = torch.empty(offset + length, dtype=tensor.dtype)
    made = memory.as_strided(tensor.shape, tensor.stride(), offset)
    if tensor.is_floating_point() or tensor.is_complex():
        if tensor.dtype in _DRAWN:
            memory.normal_(generator=generator)
        else:
            memory.copy_(torch.randn(memory.shape, generator=generator))
    elif length:
        memory.zero_()
        if not any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride())):
            copy(made, tensor)
    return made


def put_special(tensor: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Writes special numbers of a kind (`KINDS`) to random places of a floating point tensor; returns it.

    These are NaN of several payloads and both signs, infinities, zeros of both signs, subnormal numbers, and equal
    large ones. With them a result may depend on what does not matter otherwise: the order of comparisons, and whether
    an element is computed in a vector register.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return tensor
    line = tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,))
    line = torch.view_as_real(line.resolve_conj()).view(-1) if tensor.is_complex() else line
    if line.element_size() == 1:
        return tensor  # floats of one byte get no special numbers
    if kind in (NOT_POSITIVE, NOT_NEGATIVE):
        numbers = torch.tensor([0.0, -0.0, 1.0 if kind == NOT_NEGATIVE else -1.0], dtype=line.dtype)
        for start in range(0, line.numel(), _COMPARED_AT_ONCE):
            piece = line[start : start + _COMPARED_AT_ONCE]
            piece.copy_(numbers[torch.randint(len(numbers), piece.shape, generator=generator)])
        return tensor
    numbers = _special_numbers(line.dtype)
    count = max(line.numel() // (4096 if kind == SPARSE else 4), 1)
    places = torch.randint(line.numel(), (count,), generator=generator)
    bits = _BITS[line.element_size()]
    line.view(bits)[places] = numbers.view(bits)[torch.randint(len(numbers), (count,), generator=generator)]
    return tensor


def _special_numbers(dtype: torch.dtype) -> Tensor:
    large = torch.tensor([math.nan] * 4 + [math.inf, -math.inf, 0.0, -0.0, 4.0, 4.0], dtype=dtype)
    bits = large.view(_BITS[large.element_size()])
    sign = torch.iinfo(bits.dtype).min
    bits[1] += 5
    bits[2:4] += torch.tensor([9, 3], dtype=bits.dtype)
    bits[2:4] ^= sign
    subnormal = torch.tensor([1, sign + 7], dtype=bits.dtype)
    signalling = bits[4:5] + 1
    return torch.cat([bits, subnormal, signalling]).view(dtype)


def duplicate(value: Any) -> Any:
    """A copy of every tensor in a value, with the same strides and offset."""
    return map_tensors(value, lambda t: storage_line(t).clone().as_strided(t.shape, t.stride(), t.storage_offset()))


def storage_line(tensor: Tensor) -> Tensor:
    """A tensor's storage from its start to the tensor's last element, in one dimension."""
    return tensor.as_strided((tensor.storage_offset() + extent(tensor.shape, tensor.stride()),), (1,), 0)


@dataclass(frozen=True)
class Difference:
    """How two results differ; both numbers are 0 where the results are identical, bit by bit."""

    identical: bool
    largest: float
    relative: float  # to the largest absolute value of the first


IDENTICAL = Difference(True, 0.0, 0.0)
INCOMPARABLE = Difference(False, math.inf, math.inf)
CHANGES_SPECIALS = Difference(False, 0.0, 0.0)  # ordinary numbers are the same


def difference(expected: Any, found: Any) -> Difference:
    """Compares two results: tensors of the same sizes, strides and types, or numbers, or both in lists and the like."""
    (expected_leaves, expected_shape), (found_leaves, found_shape) = tree_flatten(expected), tree_flatten(found)
    if expected_shape != found_shape:
        return INCOMPARABLE
    each = [IDENTICAL, *map(_leaf_difference, expected_leaves, found_leaves)]
    return Difference(
        all(one.identical for one in each), max(one.largest for one in each), max(one.relative for one in each)
    )


def _leaf_difference(expected: Any, found: Any) -> Difference:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _tensor_difference(expected, found)
    if isinstance(expected, torch.Generator) and isinstance(found, torch.Generator):
        return IDENTICAL  # a handler that draws from one returns its state, which is compared
    return IDENTICAL if type(expected) is type(found) and expected == found else INCOMPARABLE


def _tensor_difference(expected: Tensor, found: Tensor) -> Difference:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return INCOMPARABLE
    strides = zip(expected.shape, expected.stride(), found.stride())
    if expected.numel() and any(one != other for size, one, other in strides if size > 1):
        return INCOMPARABLE
    identical, largest, scale, bits = True, 0.0, 0.0, _BITS[expected.element_size()]
    one, other = expected.detach().contiguous().flatten(), found.detach().contiguous().flatten()
    for start in range(0, one.numel(), _COMPARED_AT_ONCE):
        a, b = one[start : start + _COMPARED_AT_ONCE], other[start : start + _COMPARED_AT_ONCE]
        scale = max(scale, _largest(a))
        if not torch.equal(a.view(bits), b.view(bits)):
            identical, largest = False, max(largest, _distance(a, b))
    return Difference(identical, largest, largest / scale if scale > 0 else math.inf if largest > 0 else 0.0)


def _wide(a: Tensor) -> Tensor:
    return a.to(torch.complex128 if a.is_complex() else torch.float64)


def _largest(a: Tensor) -> float:
    """The largest absolute value that is finite."""
    return float(_wide(a).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _distance(a: Tensor, b: Tensor) -> float:
    one, other = _wide(a), _wide(b)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(same, 0.0)  # signs of zeros and kinds of NaN are no distance
    return math.inf if bool(apart.isnan().any()) else float(apart.max())
