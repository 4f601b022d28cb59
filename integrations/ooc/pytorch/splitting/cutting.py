"""Where the operands of an elementwise operator are cut, and what an operator returns, without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry
from ooc.pytorch.splitting.axes import spans
from ooc.pytorch.splitting.calls import CannotSplit, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.geometry import Index
from ooc.pytorch.splitting.verification import map_tensors, tensors_in

_GRAIN = 32768  # elements for which PyTorch uses another thread (at::internal::GRAIN_SIZE)
_ALIGNED = 64  # elements: a multiple of two vector registers
# How many of the threads get a run of a number of elements. `gelu` gives all of them one early. Threads of fused
# optimizers get whole registers, so only the end of all has something left, as if one thread had it all.
_RUNS: dict[str, Callable[[int, int], int]] = {
    "lines of memory": lambda threads, length: max(1, min(threads, -(-length // _GRAIN))),
    "lines of memory, equal": lambda threads, length: threads if length > _GRAIN // 2 else 1,
    "lines of memory, joined": lambda threads, length: 1,
}


@dataclass(frozen=True)
class Cut:
    """How operands of one result are cut: as lines of memory if `flat`, else along the dimensions of the result."""

    flat: bool
    indexes: tuple[Index, ...]
    how: str  # what a verdict calls this cut

    def part(self, tensor: Tensor, index: Index) -> Tensor:
        """The part of an operand that belongs to a part of the result; a single number belongs to every part."""
        line = geometry.flat(tensor) if self.flat and tensor.dim() else tensor
        assert line is not None
        return geometry.narrowed(line, index)


def cut_elementwise(context: Context, results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Cut]:
    """Finds cuts such that one part of all tensors together takes no more than the context allows.

    Results are of one shape (they may be on the device "meta"), and operands broadcast to it. Each part has room for a
    copy of its results too. Returns the cuts to be tried, the likeliest to be exact first.
    """
    everything = [*results, *(t for t in operands if t.numel() > 1)]
    temporary = sum(t.element_size() for t in results)
    first = everything[0]
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in everything)
    if alike and geometry.flat(first) is not None:
        each = temporary + sum(t.element_size() for t in everything)
        most = (context.part_bytes - 2 * context.chunk_bytes * len(everything)) // each
        found: dict[tuple[Index, ...], str] = {}
        for how, runs in _RUNS.items():
            lines = aligned_lines(first.numel(), most, partial(runs, context.threads))
            found.setdefault(tuple(((-1, *line),) for line in lines), how)
        return [Cut(True, lines, how) for lines, how in found.items()]
    blocks = geometry.blocks(everything, context.part_bytes, context.chunk_bytes, temporary)
    return [Cut(False, tuple(blocks), "blocks")]


def aligned_lines(length: int, most: int, runs: Callable[[int], int]) -> list[tuple[int, int]]:
    """Cuts `length` elements into lines (start, length) of at most about `most`, each computed as it is in the whole.

    PyTorch gives each thread one run of elements, works through the run in vector registers, and computes what is left
    at its end one by one, which may round differently. So a line ends where a thread's run of the whole ends. Within
    that run, lines are multiples of the registers, and so are the threads' runs of each line: `runs(elements)` of them.
    """
    found: list[tuple[int, int]] = []
    for start, size in spans(length, max(-(-length // runs(length)), 1)):
        step = _even(max(most, _ALIGNED), runs)
        while size > 0:
            taken = step if size > step else size if runs(size) == 1 else _even(size, runs)
            found.append((start, taken))
            start, size = start + taken, size - taken
    return found


def _even(length: int, runs: Callable[[int], int]) -> int:
    """The largest number of elements up to `length` of which each thread that is used gets an equal, aligned run."""
    sizes = range(max(length // _ALIGNED, 1) * _ALIGNED, 0, -_ALIGNED)
    return next(size for size in sizes if size % (_ALIGNED * runs(size)) == 0)


# ---- results without memory -----------------------------------------------------------------------------------------


def all_meta(tensor: Tensor) -> Tensor:
    """The tensor, or the number, without its memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def meta(tensor: Tensor) -> Tensor:
    """The tensor without its memory; of a single number, which may be a wrapped Python number, a one of that kind."""
    if tensor.dim():
        return all_meta(tensor)
    one_like: Callable[[Tensor], Tensor] | None = getattr(torch.ops.ooc, "one_like", None)
    return one_like(tensor) if one_like is not None else tensor  # without the adapter no variable is away


def _one(tensor: Tensor) -> Tensor:
    return torch.ones([1] * tensor.dim(), dtype=tensor.dtype) if tensor.dim() else meta(tensor)


def on_meta(context: Context, op: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Tensor:
    """The result of an operator that reads no element. Raises CannotSplit if it is not strided, or there is none."""
    with context.plain(), its_own_errors():
        made: Tensor = op(*map_tensors(arguments, meta), **map_tensors(keywords, meta))
    if made.layout != torch.strided:
        raise CannotSplit("its result is not strided")
    return made


def meta_results(context: Context, op: torch._ops.OpOverload, named: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an element-wise operator returns: their sizes, strides and types.

    Over tensors that lie alike it is asked for types alone: "meta" imports PyTorch's compiler, which takes a second.
    Some operators refuse a single number of the CPU beside a tensor of the device "meta". Their sizes are asked for
    with numbers on "meta" too, and their types with one real element of each tensor: on "meta" a wrapped Python
    number is a tensor like others, and counts more for the result's type.
    """

    def asked(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return tensors_in([op(**map_tensors(dict(named), change))])

    operands = tensors_in(dict(named))
    tensors = [t for t in operands if t.dim()]
    with context.plain(), its_own_errors():
        if torch.Tag.nondeterministic_seeded not in op.tags and (stride := _stride_of_all(tensors)) is not None:
            size, found = tensors[0].shape, asked(_one)
            if all(list(t.shape) == [1] * len(size) for t in found):
                return [torch.empty_strided(size, stride, dtype=t.dtype, device="meta") for t in found]
        try:
            return asked(meta)
        except RuntimeError:
            if len(tensors) == len(operands):
                raise
        return [t.to(real.dtype) for t, real in zip(asked(all_meta), asked(_one))]


def _stride_of_all(tensors: Sequence[Tensor]) -> Sequence[int] | None:
    """How a result of an element-wise operator lies if all tensors lie alike; None if they do not."""
    if not tensors or any(t.shape != tensors[0].shape or t.stride() != tensors[0].stride() for t in tensors):
        return None
    if tensors[0].is_contiguous():
        return geometry.contiguous(tensors[0].shape)
    return None if 1 in tensors[0].shape or geometry.flat(tensors[0]) is None else tensors[0].stride()
