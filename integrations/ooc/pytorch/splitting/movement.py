"""Operators that only move data, or make a tensor from nothing, which is exact however they are cut.

A new tensor's variable begins with nothing on the device, and is filled in parts. Where a copy converts the type, a
kernel may convert a NaN to one thing in a vector register, and to another where it converts elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.axes import Named
from ooc.pytorch.splitting.calls import CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import Cut, cut_elementwise, meta, on_meta
from ooc.pytorch.splitting.geometry import extent, layout
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.verification import OF_LINES, tensors_in

aten = torch.ops.aten
Pair = tuple[Tensor, Any]  # a target, and what is copied to it: a tensor, which may be broadcast, or one number
Moves = tuple[Any, Sequence[Pair]]  # an operator's result, and all that has to be copied for it, in this order
Mover = Callable[..., Moves]


def moves(*names: str, repeatable: bool = False) -> Callable[[Mover], Mover]:
    """Registers a function that gives what operators return, made but not filled, and what is to be copied."""

    def register(find: Mover) -> Mover:
        for name in names:
            registry.handler(name, repeatable=repeatable)(partial(moved, find, registry.overload_of(name)))
        return find

    return register


def moved(find: Mover, whole: Any, context: Context, /, *arguments: Any, **keywords: Any) -> Any:
    """Copies in parts what `find` gives. A copy that converts is cut in a way that gives the bits of `whole`."""
    tensors = tensors_in((arguments, keywords))
    makes_data = torch.device(keywords.get("device") or "meta").type != "meta"
    if any(tensor.is_meta for tensor in tensors) and not makes_data:
        return _no_data(whole, context, *arguments, **keywords)
    strided(context, tensors)
    result, pairs = find(context, *arguments, **keywords)
    types = [(target.dtype, source.dtype) for target, source in pairs if isinstance(source, Tensor)]
    if not any(to != of and (of.is_floating_point or of.is_complex) for to, of in types):
        context.used("blocks", sum(context.move(*pair) for pair in pairs if pair[0].numel()))
        return result
    if len(pairs) != 1:
        raise CannotSplit("its tensors are of unlike types")

    def run(cut: Cut, *given: Any, **more: Any) -> Any:
        made, [(target, source)] = find(context, *given, **more)
        for index in cut.indexes:
            cut.part(target, index).copy_(cut.part(source, index))
        return made

    cuts = cut_elementwise(context, [pairs[0][0]], [pairs[0][1]])
    splits = [Split(cut.how, len(cut.indexes), partial(run, cut)) for cut in cuts]
    del result, pairs  # `run` makes others
    return context.choose("", splits, whole, specials=OF_LINES).run(*arguments, **keywords)


def strided(context: Context, tensors: Sequence[Tensor]) -> None:
    """Raises CannotSplit unless all tensors are strided and on the CPU or the context's device, or have no data."""
    if any(t.layout != torch.strided or t.device.type not in ("cpu", "meta", context.device.type) for t in tensors):
        raise CannotSplit(f"its tensors are not strided ones on the CPU or on {context.device}")


@moves("aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_", repeatable=True)
def fill(context: Context, target: Tensor, value: Any = 0) -> Moves:
    """Writes the same number everywhere."""
    if isinstance(value, Tensor):
        value = on_meta(context, aten.fill_, target, value) if value.dim() else value.item()  # the first raises
    return target, [(target, value)]


@moves("aten::copy_", repeatable=True)
def copy_(context: Context, target: Tensor, source: Tensor, non_blocking: bool = False) -> Moves:
    """Copies between any two layouts and types."""
    return target, [(target, source)]


@moves("aten::copy", repeatable=True)
def copy(context: Context, target: Tensor, source: Tensor, non_blocking: bool = False) -> Moves:
    """Copies as `copy_` does, into a new tensor like the target."""
    made = context.empty(like=target, device=target.device)
    return made, [(made, source)]


@moves("aten::clone", "aten::_to_copy")
def clone(context: Context, source: Tensor, **keywords: Any) -> Moves:
    """Copies to the memory format and the type that are asked for."""
    device = torch.device(keywords.get("device") or source.device)
    if device.type not in ("cpu", context.device.type) or (context.on_gpu and keywords.get("pin_memory")):
        raise CannotSplit("the copy is for another device, or is to be pinned")
    asked = {name: keywords.get(name) for name in ("dtype", "memory_format")}
    made = context.empty(like=on_meta(context, aten._to_copy, source, **asked), device=device)
    return made, [(made, source)]


@moves("aten::cat")
def cat(context: Context, tensors: Sequence[Tensor], dim: int = 0) -> Moves:
    """Puts one tensor after the other. An empty vector is skipped, whatever the others' sizes are."""
    made = context.empty(like=on_meta(context, aten.cat, tensors, dim))
    given = [tensor for tensor in tensors if tensor.shape != (0,)]
    return made, list(zip(made.split_with_sizes([t.shape[dim] for t in given], dim), given)) if given else []


@moves("aten::stack")
def stack(context: Context, tensors: Sequence[Tensor], dim: int = 0) -> Moves:
    """Puts tensors beside each other along a new dimension."""
    made = context.empty(like=on_meta(context, aten.stack, tensors, dim))
    return made, list(zip(made.unbind(dim), tensors))


# ---- padding, gradients of views, and shifts ------------------------------------------------------------------------


def _larger(context: Context, size: Sequence[int], source: Tensor) -> Tensor:
    """Memory for a tensor that has the source in it; it lies as the source does, if it has as many dimensions."""
    order = layout(source) if len(size) == source.dim() else torch.contiguous_format
    return context.empty(like=torch.empty(size, dtype=source.dtype, device="meta", memory_format=order))


@moves("aten::constant_pad_nd")
def constant_pad(context: Context, source: Tensor, pad: Sequence[int], value: Any = 0) -> Moves:
    """Pads by pairs of lengths, those of the last dimension first; negative lengths cut off."""
    pairs = [(source.dim() - 1 - n, *pad[2 * n : 2 * n + 2]) for n in range(len(pad) // 2)]
    size = list(source.shape)
    for d, before, after in pairs:
        size[d] += before + after
    if min(size, default=0) < 0:
        on_meta(context, aten.constant_pad_nd, source, pad, value)  # raises, and says what is wrong

    def inside(tensor: Tensor, sign: int) -> Tensor:
        for d, before, after in pairs:
            start = max(sign * before, 0)
            tensor = tensor.narrow(d, start, tensor.shape[d] - start - max(sign * after, 0))
        return tensor

    made = _larger(context, size, source)
    return made, [(made, value), (inside(made, 1), inside(source, -1))]


def _gradient(view: Callable[..., Tensor], context: Context, grad: Tensor, sizes: Sequence[int], *place: int) -> Moves:
    """The gradient of a tensor of which there was a view: zeros but where the view was."""
    made = _larger(context, sizes, grad)
    return made, [(made, 0), (view(made, *place), grad)]


for _view in ("slice", "select", "diagonal"):
    moves(f"aten::{_view}_backward")(partial(_gradient, getattr(aten, _view)))


@moves("aten::roll")
def roll(context: Context, source: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Moves:
    """Shifts elements around the end of dimensions, or of the flattened tensor where none is given."""
    if not dims and (len(shifts) != 1 or not source.is_contiguous()):
        raise CannotSplit("it is flattened, and not contiguous")
    line, along = (source, dims) if dims else (source.view(-1), [0])
    if len(shifts) != len(along):
        on_meta(context, aten.roll, source, shifts, dims)  # raises, and says what is wrong
    total, like, split = [0] * line.dim(), meta(line), aten.split_with_sizes
    with context.plain():  # PyTorch joins two pieces for each dimension, which decides how the result lies
        for shift, d in zip(shifts, along):
            total[d] += shift
            first = -shift % like.shape[d]
            like = aten.cat(split(like, [first, like.shape[d] - first], d)[::-1], d)
    made = context.empty(like=like)
    pairs = [(made, line)]
    for d, shift in enumerate(total):  # the end of what was there comes first
        sizes = [line.shape[d] - shift % line.shape[d], shift % line.shape[d]]
        pairs = [p for to, of in pairs for p in zip(split(to, sizes[::-1], d)[::-1], split(of, sizes, d))]
    return made.view(source.shape) if not dims else made, pairs


# ---- new tensors ----------------------------------------------------------------------------------------------------


def factory(overload: torch._ops.OpOverload) -> registry.Function | None:
    """Finds operators that make a tensor of one number, of random numbers, or not initialised."""
    space, _, name = overload._schema.name.partition("::")
    filler = _FILL.get(name.removesuffix("_like").removeprefix("new_"))
    makes = "device" in {a.name for a in overload._schema.arguments} and not overload._schema.is_mutable
    if filler is None or not makes or space != "aten":
        return None
    return partial(moved, partial(_made, overload, filler), overload)


registry.finders.append(factory)


def _made(overload: Any, fill: Any, context: Context, /, *arguments: Any, **keywords: Any) -> Moves:
    """The result with the sizes, strides and type that the operator gives on "meta", where no generator is of use."""
    given = bind(overload, arguments, keywords)
    device = torch.device(given["device"] or context.device)
    if device.type != context.device.type or given["layout"] not in (None, torch.strided) or given["pin_memory"]:
        raise CannotSplit("its result is for another device, or not strided, or is to be pinned")
    others = dict.fromkeys(given.keys() & {"generator", "pin_memory"}) | {"device": torch.device("meta")}
    result = context.empty(like=on_meta(context, overload, **(given | others)))
    filled = fill(result, given)
    return result, [] if filled is result else [(result, filled)]


def _not_initialised(result: Tensor, given: Named) -> Any:
    """Leaves memory as it is, unless PyTorch is set to fill such memory; then fills it with the same numbers."""
    if not (torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()):
        return result
    if result.is_floating_point() or result.is_complex():
        return float("nan")
    return True if result.dtype == torch.bool else torch.iinfo(result.dtype).max


# By operator, `x` also for `x_like` and `new_x`: the number that fills the result; or the result, filled by an operator
# on a large tensor, which is split and counted by itself.
_FILL: dict[str, Any] = dict.fromkeys(("empty", "empty_strided", "empty_permuted"), _not_initialised) | {
    "zeros": lambda made, given: 0,
    "ones": lambda made, given: 1,
    "full": lambda made, given: given["fill_value"],
    "rand": lambda made, given: made.uniform_(0, 1, generator=given.get("generator")),
    "randn": lambda made, given: made.normal_(0, 1, generator=given.get("generator")),
    "randint": lambda made, given: made.random_(given.get("low", 0), given["high"], generator=given.get("generator")),
}


# ---- no data --------------------------------------------------------------------------------------------------------


def _no_data(overload: Any, context: Context, /, target: Tensor, *arguments: Any, **keywords: Any) -> Any:
    if overload._schema.name == "aten::set_" and len(arguments) > 1:
        source, offset, *sizes = arguments
        storage = source.untyped_storage() if isinstance(source, Tensor) else source
        if (offset + extent(*sizes)) * target.element_size() > storage.nbytes():
            raise CannotSplit("its storage would have to grow")
    context.used("no data", 0)
    with context.plain():  # where no operator is a function
        return overload(target, *arguments, **keywords)


# Views whose schema does not say so, and changes of storages, sizes and strides in place.
for _name in """
    _unsafe_view as_strided_ detach_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor
    set_.source_Tensor_storage_offset squeeze_ squeeze_.dim squeeze_.dims swapaxes_ swapdims_ t_ transpose_
    unsafe_split.Tensor unsafe_split_with_sizes unsqueeze_
""".split():
    registry.handler(f"aten::{_name}", repeatable=True)(partial(_no_data, registry.overload_of(f"aten::{_name}")))
