"""Operators that make a tensor from nothing: its variable begins with nothing on the device, and is filled in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.context import CannotSplit, Context
from ooc.pytorch.splitting.cutting import meta
from ooc.pytorch.splitting.movement import context_like, fill
from ooc.pytorch.splitting.verification import map_tensors, tensors_in

_EMPTY = "empty empty_strided empty_like new_empty new_empty_strided empty_permuted".split()
_ZEROS = "zeros zeros_like new_zeros".split()
_ONES = "ones ones_like new_ones".split()
_FULL = "full full_like new_full".split()


def _made(context: Context, overload: torch._ops.OpOverload, arguments: Any, keywords: dict[str, Any]) -> Tensor:
    """The result without contents; its sizes, strides and type are those that the operator gives on "meta"."""
    device = keywords.get("device")
    if device is not None and torch.device(device).type != "cpu":
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
    finish = _contents(name)
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


Finish = Callable[[Context, Tensor, dict[str, Any]], int]


def _contents(name: str) -> Finish | None:
    """The function that fills an operator's result, if it is known.

    It returns the number of parts, or 0 where the operators that it calls count theirs.
    """
    if name in _EMPTY:
        return _not_initialised
    if name in _ZEROS:
        return lambda context, result, given: fill(context, result, 0)
    if name in _ONES:
        return lambda context, result, given: fill(context, result, 1)
    if name in _FULL:
        return lambda context, result, given: fill(context, result, given["fill_value"])
    # Each of these calls an operator on a large tensor, which is split by itself.
    if name in ("rand", "rand_like"):
        return lambda context, result, given: _by(result.uniform_(0, 1, generator=given.get("generator")))
    if name in ("randn", "randn_like"):
        return lambda context, result, given: _by(result.normal_(0, 1, generator=given.get("generator")))
    if name in ("randint", "randint_like"):
        return lambda context, result, given: _by(
            result.random_(given.get("low", 0), given["high"], generator=given.get("generator"))
        )
    return None


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
