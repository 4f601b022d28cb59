"""Which operator is split by what. The modules with handlers are imported when an operator is looked for."""

from __future__ import annotations

import importlib

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.registry import Handler, overload_of

MODULES = """
    attention batch_norm convolution embedding factories linear lists losses movement normalization
    padding pointwise pooling random rearranging reductions
""".split()


def find(name: str) -> Handler | None:
    """The handler of an operator, registered by its name or found by its schema; None if there is none."""
    for module in MODULES:
        importlib.import_module(f"{registry.__name__.rpartition('.')[0]}.{module}")
    if name in registry.named:
        return registry.named[name]
    overload = overload_of(name)
    found = (each(overload) for each in registry.finders if overload is not None)
    return next((Handler(function) for function in found if function is not None), None)
