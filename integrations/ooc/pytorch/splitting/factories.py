"""Operators that make a tensor from nothing, and those that fill one with random numbers.

A new tensor's variable begins with nothing on the device, and is filled in parts. Random numbers come in parts that get
the same numbers as in one piece: PyTorch's generator of the CPU is a sequence, and operators take from it in the order
of memory. `normal_` works in blocks of 16: it draws for all elements, and then once more for the last 16. So parts end
at multiples of 16, and the last one is not shorter than 16. Whether the numbers, and the generator's state afterwards,
are the same is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry, registry
from ooc.pytorch.splitting.calls import CannotSplit, Specials, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import on_meta
from ooc.pytorch.splitting.movement import Moves, moved, number
from ooc.pytorch.splitting.parts import Named, bind

_UNIT = 16
_SEED = 1


@registry.finder
def factory(overload: torch._ops.OpOverload) -> registry.Function | None:
    """Finds operators that make a tensor of one number, of random numbers, or not initialised."""
    space, _, name = overload._schema.name.partition("::")
    fill = _FILL.get(name.removesuffix("_like").removeprefix("new_"))
    makes = "device" in {a.name for a in overload._schema.arguments} and not overload._schema.is_mutable
    return partial(moved, partial(_made, overload, fill), overload) if fill and makes and space == "aten" else None


_Fill = Callable[[Tensor, Named], Any]  # of a result, with the call's arguments


def _made(overload: torch._ops.OpOverload, fill: _Fill, context: Context, /, *arguments: Any, **keywords: Any) -> Moves:
    """The result with the sizes, strides and type that the operator gives on "meta", where no generator is of use."""
    given = bind(overload, arguments, keywords)
    if given["device"] is not None and torch.device(given["device"]).type != context.device.type:
        raise CannotSplit("it is for another device")
    if given["layout"] not in (None, torch.strided) or given["pin_memory"]:
        raise CannotSplit("its result is not strided, or is to be pinned")
    others = dict.fromkeys(given.keys() & {"generator", "pin_memory"}) | {"device": torch.device("meta")}
    result = context.empty(like=on_meta(context, overload, **(given | others)))
    filled = fill(result, given)
    return result, [] if filled is result else [number(result, filled)]


def _not_initialised(result: Tensor, given: Named) -> Any:
    """Leaves memory as it is, unless PyTorch is set to fill such memory; then fills it with the same numbers."""
    if not (torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()):
        return result
    if result.is_floating_point() or result.is_complex():
        return math.nan
    return True if result.dtype == torch.bool else torch.iinfo(result.dtype).max


# By operator, `x` also for `x_like` and `new_x`: the number that fills the result; or the result, filled by an operator
# on a large tensor, which is split and counted by itself.
_FILL: dict[str, _Fill] = {
    "empty": _not_initialised,
    "empty_strided": _not_initialised,
    "empty_permuted": _not_initialised,
    "zeros": lambda result, given: 0,
    "ones": lambda result, given: 1,
    "full": lambda result, given: given["fill_value"],
    "rand": lambda result, given: result.uniform_(0, 1, generator=given.get("generator")),
    "randn": lambda result, given: result.normal_(0, 1, generator=given.get("generator")),
    "randint": lambda result, given: result.random_(
        given.get("low", 0), given["high"], generator=given.get("generator")
    ),
}


# ---- random numbers in place ----------------------------------------------------------------------------------------


def _drawn(name: str) -> registry.Function:
    def draw(context: Context, target: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        overload = registry.overload_of(name)
        assert overload is not None
        if geometry.flat(target) is None:
            raise CannotSplit("its memory has gaps")
        most = (context.part_bytes - 2 * context.chunk_bytes) // (2 * target.element_size())  # with room for a copy
        size = max(most // _UNIT, 4) * _UNIT
        ends = [*range(0, max(target.numel() - _UNIT + 1, 1), size), target.numel()]

        def run(ends: Sequence[int], tensor: Tensor, *given: Any, **named: Any) -> Any:
            if context.verifying:  # so that the program's generator is not touched
                named["generator"] = torch.Generator().manual_seed(_SEED)
            line = geometry.flat(tensor) if ends else None
            for part in [tensor] if line is None else [line[start:end] for start, end in pairwise(ends)]:
                overload(part, *given, **named)
            return (tensor, named["generator"].get_state()) if context.verifying else tensor

        splits = [Split("lines of memory", len(ends) - 1, partial(run, ends))]
        chosen = context.choose("", splits, partial(run, ()), specials=Specials(()))
        return chosen.run(target, *arguments, **keywords)  # type: ignore[no-any-return]

    return draw


for _name in """
    normal_ uniform_ random_ random_.from random_.to bernoulli_.float exponential_ geometric_ cauchy_ log_normal_
""".split():
    registry.handler(f"aten::{_name}", repeatable=True)(_drawn(f"aten::{_name}"))
