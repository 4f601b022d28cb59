"""Which operator is split by what: handlers register here, in modules that are imported when one is looked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Function = Callable[..., Any]  # f(context, *arguments, **keywords), as the operator is called
Finder = Callable[[torch._ops.OpOverload], Function | None]
MODULES = "convolution movement pointwise reductions selection tables".split()


@dataclass(frozen=True)
class Handler:
    """How one operator is split.

    `repeatable`: the function may run again after it failed, even if it writes its arguments (random numbers that it
    draws are the same again).
    """

    function: Function
    repeatable: bool = False


named: dict[str, Handler] = {}
finders: list[Finder] = []  # of functions for whole families, asked about what no handler is registered for by name


def handler(*names: str, repeatable: bool = False) -> Callable[[Function], Function]:
    """Registers a function for operators, such as `aten::native_batch_norm` or `aten::add.Tensor`.

    The function gets the arguments as the operator got them: those at the end that have their default may be missing,
    and those after the `*` of the schema come by keyword.
    """

    def register(function: Function) -> Function:
        for name in names:
            named[name] = Handler(function, repeatable)
        return function

    return register


def overload_of(name: str) -> torch._ops.OpOverload | None:
    """The operator of a name such as aten::add.Tensor; None if there is no such operator."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def find(name: str) -> Handler | None:
    """The handler of an operator, registered by its name or found by its schema; None if there is none."""
    for module in MODULES:
        importlib.import_module(f"{__name__.rpartition('.')[0]}.{module}")
    if name in named:
        return named[name]
    overload = overload_of(name)
    found = (each(overload) for each in finders if overload is not None)
    return next((Handler(function) for function in found if function is not None), None)
