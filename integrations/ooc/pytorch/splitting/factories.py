"""Operators that make a tensor from nothing: its variable begins with nothing on the device, and is filled in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import CannotSplit
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import meta
from ooc.pytorch.splitting.movement import context_like, fill
from ooc.pytorch.splitting.verification import map_tensors, tensors_in


def _made(context: Context, overload: torch._ops.OpOverload, arguments: Any, keywords: dict[str, Any]) -> Tensor:
    """The result without contents; its sizes, strides and type are those that the operator gives on "meta"."""
    device = keywords.get("device")
    if device is not None and torch.device(device).type != context.device.type:
        raise CannotSplit("it is for another device")
    if keywords.get("layout") not in (None, torch.strided) or keywords.get("pin_memory"):
        raise CannotSplit("its result is not strided, or is to be pinned")
    if any(t.layout != torch.strided for t in tensors_in((arguments, keywords))):
        raise CannotSplit("its tensors are not strided")
    named = {**map_tensors(keywords, meta), "device": torch.device("meta"), "pin_memory": None}
    named.pop("generator", None)
    with context.plain():
        like = context_like(overload(*map_tensors(arguments, meta), **named))
    return context.empty(like=like)


@registry.finder
def factory(overload: torch._ops.OpOverload) -> registry.Function | None:
    """Finds operators that make a tensor of one number, of random numbers, or not initialised."""
    space, _, name = overload._schema.name.partition("::")
    names = {a.name for a in overload._schema.arguments}
    if space != "aten" or "device" not in names or any(a.is_out for a in overload._schema.arguments):
        return None
    finish = _FINISH.get(name.removesuffix("_like").removeprefix("new_"))
    if finish is None:
        return None

    def split(context: Context, *arguments: Any, **keywords: Any) -> Tensor:
        result = _made(context, _without_generator(overload), arguments, keywords)
        parts = finish(context, result, _bound(overload, arguments, keywords))
        context.used("absent" if parts == 0 else "blocks", parts)
        return result

    return split


def _bound(overload: torch._ops.OpOverload, arguments: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip([a.name for a in overload._schema.arguments], arguments)), **keywords}


def _without_generator(overload: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The variant that is asked for sizes: the one without a generator, as one of the CPU is of no use on "meta"."""
    name = {"generator": "default", "low_generator": "low"}.get(overload._overloadname)
    return getattr(overload._overloadpacket, name) if name is not None else overload


def _not_initialised(context: Context, result: Tensor, given: dict[str, Any]) -> int:
    """Leaves memory as it is, unless PyTorch is set to fill such memory; then fills it with the same numbers."""
    if not (torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()):
        return 0
    if result.is_floating_point() or result.is_complex():
        return fill(context, result, math.nan)
    return fill(context, result, True if result.dtype == torch.bool else torch.iinfo(result.dtype).max)


def _by(result: Tensor) -> int:
    del result
    return 0


# By operator, `x` also for `x_like` and `new_x`: what fills the result. It returns the number of parts, or 0 where it
# calls an operator on a large tensor, which is split and counted by itself.
_FINISH: dict[str, Callable[[Context, Tensor, dict[str, Any]], int]] = {
    "empty": _not_initialised,
    "empty_strided": _not_initialised,
    "empty_permuted": _not_initialised,
    "zeros": lambda context, result, given: fill(context, result, 0),
    "ones": lambda context, result, given: fill(context, result, 1),
    "full": lambda context, result, given: fill(context, result, given["fill_value"]),
    "rand": lambda context, result, given: _by(result.uniform_(0, 1, generator=given.get("generator"))),
    "randn": lambda context, result, given: _by(result.normal_(0, 1, generator=given.get("generator"))),
    "randint": lambda context, result, given: _by(
        result.random_(given.get("low", 0), given["high"], generator=given.get("generator"))
    ),
}
