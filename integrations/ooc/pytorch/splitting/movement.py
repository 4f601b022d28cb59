"""Operators that only move data, which is exact however they are cut, or convert its type, which is not.

A kernel may convert a NaN to one thing in a vector register, and to another where it converts elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import Cut, cut_elementwise, meta
from ooc.pytorch.splitting.geometry import blocks, extent, narrowed

_aten = torch.ops.aten


def strided(context: Context, *tensors: Tensor) -> None:
    """Raises CannotSplit unless all tensors are strided and on the CPU or the context's device."""
    if any(t.layout != torch.strided or t.device.type not in ("cpu", context.device.type) for t in tensors):
        raise CannotSplit(f"its tensors are not strided ones on the CPU or on {context.device}")


def _converts(source: Tensor, target: Tensor) -> bool:
    """Whether a copy converts numbers that may be NaN or infinite."""
    return source.dtype != target.dtype and (source.is_floating_point() or source.is_complex())


def _copied(
    context: Context, like: Tensor, source: Tensor, whole: Callable[..., Tensor], pair: Callable[..., Any], *given: Any
) -> Tensor:
    """Copies `source` to a tensor like `like`. A copy that converts is cut in a way that gives the bits of the whole.

    `whole` and `pair` are called as the operator is, first with `given`; `pair` returns the target, which it may make,
    and the source.
    """
    if not _converts(source, like):
        target, _ = pair(*given)
        context.used("blocks", context.move(target, source))
        return target  # type: ignore[no-any-return]

    def run(cut: Cut, *arguments: Any, **_: Any) -> Tensor:
        to, of = pair(*arguments)
        for index in cut.indexes:
            cut.part(to, index).copy_(cut.part(of, index))
        return to  # type: ignore[no-any-return]

    cuts = cut_elementwise([like], [source], context.part_bytes, context.chunk_bytes, context.threads)
    splits = [Split(cut.how, len(cut.indexes), partial(run, cut)) for cut in cuts]
    return context.choose("", splits, whole).run(*given)  # type: ignore[no-any-return]


@registry.handler("aten::copy_", repeatable=True)
def copy_(context: Context, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies between any two layouts and types."""
    strided(context, target, source)
    return _copied(context, target, source, _aten.copy_, lambda to, of, *_: (to, of), target, source)


@registry.handler("aten::copy", repeatable=True)
def copy(context: Context, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies as `copy_` does, into a new tensor like the target."""
    strided(context, target, source)

    def pair(to: Tensor, of: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return context.empty(like=to, device=to.device), of

    return _copied(context, target, source, _aten.copy, pair, target, source)


@registry.handler("aten::clone", "aten::_to_copy")
def clone(context: Context, source: Tensor, **keywords: Any) -> Tensor:
    """Copies to the memory format and the type that are asked for."""
    strided(context, source)
    device = torch.device(keywords.get("device") or source.device)
    if device.type not in ("cpu", context.device.type) or (context.on_gpu and keywords.get("pin_memory")):
        raise CannotSplit("the copy is for another device, or is to be pinned")
    with context.plain():
        made = context_like(_aten._to_copy(meta(source), **_known(keywords)))
    return _copied(
        context, made, source, _aten._to_copy, lambda of: (context.empty(like=made, device=device), of), source
    )


def _known(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None and name in ("dtype", "memory_format")}


def context_like(made: Tensor) -> Tensor:
    """Returns a result without memory. Raises CannotSplit if it is not strided."""
    if made.layout != torch.strided:
        raise CannotSplit("its result is not strided")
    return made


@registry.handler("aten::cat")
def cat(context: Context, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Puts one tensor after the other."""
    return _joined(context, _aten.cat, tensors, dim, lambda tensor: tensor)


@registry.handler("aten::stack")
def stack(context: Context, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Puts tensors beside each other along a new dimension."""
    return _joined(context, _aten.stack, tensors, dim, lambda tensor: tensor.unsqueeze(dim))


def _joined(
    context: Context, op: Any, tensors: Sequence[Tensor], dim: int, slab: Callable[[Tensor], Tensor]
) -> Tensor:
    """Copies each tensor to its place in the result; `slab` gives it the result's dimensions."""
    strided(context, *tensors)
    with context.plain():
        like = context_like(op([meta(t) for t in tensors], dim))
    if any(_converts(tensor, like) for tensor in tensors):
        raise CannotSplit("its tensors are of unlike types")
    result, parts, start = context.empty(like=like), 0, 0
    for tensor in tensors:
        if tensor.dim() == 1 and tensor.shape[0] == 0:
            continue  # an empty vector is skipped, whatever the others' sizes are
        piece = slab(tensor)
        length = piece.shape[dim]
        parts += context.move(result.narrow(dim, start, length), piece)
        start += length
    context.used("blocks", parts)
    return result


@registry.handler("aten::fill_.Scalar", "aten::fill_.Tensor", repeatable=True)
def fill_(context: Context, target: Tensor, value: Any) -> Tensor:
    """Writes the same number everywhere."""
    strided(context, target)
    context.used("blocks", fill(context, target, value))
    return target


@registry.handler("aten::zero_", repeatable=True)
def zero_(context: Context, target: Tensor) -> Tensor:
    """Writes zeros everywhere."""
    strided(context, target)
    context.used("blocks", fill(context, target, 0))
    return target


@registry.handler(
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::set_.source_Tensor_storage_offset",
    repeatable=True,
)
def set_(context: Context, target: Tensor, source: Any, *place: Any) -> Tensor:
    """Gives a tensor another storage, which touches no byte. Raises CannotSplit if the storage has to grow."""
    item = target.element_size()
    if place and (place[0] + extent(*place[1:])) * item > source.nbytes():
        raise CannotSplit("its storage would have to grow")
    with context.plain():
        target.set_(source, *place)
    context.used("no data", 0)
    return target


def _no_data(name: str) -> registry.Function:
    def change(context: Context, *arguments: Any, **keywords: Any) -> Any:
        overload = registry.overload_of(name)
        assert overload is not None
        with context.plain():  # where no operator is a function
            result = overload(*arguments, **keywords)
        context.used("no data", 0)
        return result

    return change


# Views whose schema does not say so, and changes of sizes and strides in place.
for _name in """
    _unsafe_view as_strided_ detach_ squeeze_ squeeze_.dim squeeze_.dims swapaxes_ swapdims_ t_ transpose_
    unsafe_split.Tensor unsafe_split_with_sizes unsqueeze_
""".split():
    registry.handler(f"aten::{_name}", repeatable=True)(_no_data(f"aten::{_name}"))


def fill(context: Context, target: Tensor, value: Any) -> int:
    """Fills a tensor in parts; returns how many parts."""
    parts = 0
    for index in blocks([target], context.part_bytes, context.chunk_bytes):
        narrowed(target, index).fill_(value)
        parts += 1
    return parts
