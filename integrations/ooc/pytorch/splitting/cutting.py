"""Where the operands of an elementwise operator are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry
from ooc.pytorch.splitting.geometry import Index
from ooc.pytorch.splitting.verification import map_tensors, tensors_in

_GRAIN = 32768  # elements for which PyTorch uses another thread (at::internal::GRAIN_SIZE)
_ALIGNED = 64  # elements: a multiple of two vector registers


@dataclass(frozen=True)
class Cut:
    """How operands of one result are cut: as lines of memory if `flat`, else along the dimensions of the result."""

    flat: bool
    indexes: tuple[Index, ...]
    joined: bool = False

    @property
    def how(self) -> str:
        """What a verdict calls this cut."""
        return ("lines of memory, joined" if self.joined else "lines of memory") if self.flat else "blocks"

    def part(self, tensor: Tensor, index: Index) -> Tensor:
        """The part of an operand that belongs to a part of the result; a single number belongs to every part."""
        if not self.flat:
            return geometry.narrowed(tensor, index)
        if tensor.numel() <= 1:
            return tensor.as_strided((1,), (1,)) if tensor.dim() and tensor.numel() else tensor
        line = geometry.flat(tensor)
        assert line is not None
        _, start, length = index[0]
        return line.narrow(0, start, length)


def cut_elementwise(
    results: Sequence[Tensor],
    operands: Sequence[Tensor],
    part_bytes: int,
    chunk_bytes: int,
    threads: int,
    unit: int = 1,
) -> list[Cut]:
    """Finds cuts such that one part of all tensors together takes at most `part_bytes`.

    Args:
        results: tensors of one shape (they may be on the device "meta").
        operands: tensors that broadcast to that shape.
        part_bytes, chunk_bytes: those of the context.
        threads: how many PyTorch uses; see `aligned_lines`.
        unit: lines are cut at multiples of it, and the last line is not shorter than it.

    Each part has room for a copy of its results too. Returns the cuts to be tried, the likeliest to be exact first.
    """
    large = [t for t in operands if t.numel() > 1]
    everything = [*results, *large]
    temporary = sum(t.element_size() for t in results)
    first = everything[0]
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in everything)
    if alike and geometry.flat(first) is not None:
        each = temporary + sum(t.element_size() for t in everything)
        room = part_bytes - 2 * chunk_bytes * len(everything)
        most = max(room // each, _ALIGNED)
        cuts = []
        for joined in (False, True):
            lines = aligned_lines(results[0].numel(), most, threads, unit, joined)
            cuts.append(Cut(True, tuple(((0, start, length),) for start, length in lines), joined))
        return cuts if cuts[0].indexes != cuts[1].indexes else cuts[:1]
    return [Cut(False, tuple(geometry.blocks(everything, part_bytes, chunk_bytes, temporary)))]


def aligned_lines(length: int, most: int, threads: int, unit: int = 1, joined: bool = False) -> list[tuple[int, int]]:
    """Cuts `length` elements into lines (start, length) of at most about `most`, each computed as it is in the whole.

    PyTorch gives each thread one run of elements, works through the run in vector registers, and computes what is left
    at its end one by one, which may round differently. So a line ends where a thread's run of the whole ends. Within
    that run, lines are multiples of the registers, and so are the threads' runs of each line. `joined` is for operators
    whose threads get whole registers, so that only the last line has something left.
    """
    if threads <= 1 or unit > 1 or joined:
        runs = [(0, length)]
    else:
        used = min(threads, -(-length // _GRAIN))
        run = -(-length // max(used, 1))
        runs = [(start, min(run, length - start)) for start in range(0, length, run)]
    found: list[tuple[int, int]] = []
    for start, size in runs:
        step = _even(max(most, _ALIGNED, unit), threads, unit)
        while size > 0:
            if size > step:
                taken = step if size - step >= unit else step - unit
            else:
                taken = size if unit > 1 or _threads_of(size, threads) == 1 else min(_even(size, threads, unit), size)
            found.append((start, taken))
            start, size = start + taken, size - taken
    return found


def _threads_of(length: int, threads: int) -> int:
    return max(1, min(threads, -(-length // _GRAIN)))


def _even(length: int, threads: int, unit: int) -> int:
    """The largest number of elements up to `length` of which each thread that is used gets an equal, aligned run."""
    if unit > 1:
        return max(length // unit * unit, unit)
    while True:
        step = _ALIGNED * _threads_of(length, threads)
        rounded = max(length // step * step, _ALIGNED)
        if rounded % (_ALIGNED * _threads_of(rounded, threads)) == 0:
            return rounded
        length = rounded


def meta(tensor: Tensor) -> Tensor:
    """The tensor without its memory; of a single number, which may be a wrapped Python number, a one of that kind."""
    if tensor.dim():
        return all_meta(tensor)
    one_like: Callable[[Tensor], Tensor] | None = getattr(torch.ops.ooc, "one_like", None)
    return one_like(tensor) if one_like is not None else tensor  # without the adapter no variable is away


def meta_results(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an element-wise operator returns, without memory: their sizes, strides and types.

    Some operators refuse a single number of the CPU beside a tensor of the device "meta". Their sizes are asked for
    with numbers on "meta" too, and their types with one real element of each tensor: on "meta" a wrapped Python
    number is a tensor like others, and counts more for the result's type.

    Over tensors that lie alike it is asked for types alone: "meta" imports PyTorch's compiler, which takes a second.
    """
    draws = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
    if not draws and (known := _alike(function, arguments, keywords)):
        return known
    try:
        return tensors_in([function(*map_tensors(list(arguments), meta), **map_tensors(dict(keywords), meta))])
    except RuntimeError:
        if all(t.dim() for t in tensors_in([list(arguments), dict(keywords)])):
            raise
    sized = function(*map_tensors(list(arguments), all_meta), **map_tensors(dict(keywords), all_meta))
    typed = function(*map_tensors(list(arguments), _one), **map_tensors(dict(keywords), _one))
    return [t.to(real.dtype) for t, real in zip(tensors_in([sized]), tensors_in([typed]))]


def _alike(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The results, which lie as all tensors with dimensions do; none if those do not lie alike."""
    first, *others = [t for t in tensors_in([list(arguments), dict(keywords)]) if t.dim()] or [torch.empty(())]
    one = [1] * first.dim()
    usual = first.is_contiguous() or (geometry.flat(first) is not None and 1 not in first.shape)
    if not one or not usual or any(t.shape != first.shape or t.stride() != first.stride() for t in others):
        return []
    found = tensors_in([function(*map_tensors(list(arguments), _one), **map_tensors(dict(keywords), _one))])
    stride = geometry.contiguous(first.shape) if first.is_contiguous() else first.stride()
    if any(list(t.shape) != one for t in found):
        return []
    return [torch.empty_strided(first.shape, stride, dtype=t.dtype, device="meta") for t in found]


def all_meta(tensor: Tensor) -> Tensor:
    """The tensor, or the number, without its memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _one(tensor: Tensor) -> Tensor:
    return torch.ones([1] * tensor.dim(), dtype=tensor.dtype) if tensor.dim() else meta(tensor)
