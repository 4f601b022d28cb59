"""Which operator is split by what, and the operators `ooc_split::...` that the adapter (csrc/splitting.cpp) calls.

`aten::add.Tensor` becomes `ooc_split::aten__add__Tensor`, with the same schema, when it first does not fit.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ooc.pytorch.splitting as package

Function = Callable[..., Any]  # f(context, *arguments, **keywords), as the operator is called
Finder = Callable[[torch._ops.OpOverload], Function | None]

NAMESPACE = "ooc_split"


@dataclass(frozen=True)
class Handler:
    """How one operator is split. `repeatable`: it may run again after it failed, though it writes its arguments."""

    function: Function
    repeatable: bool = False


_named: dict[str, Handler] = {}
_finders: list[Finder] = []
_lock = threading.RLock()
_loaded = False


def handler(*names: str, repeatable: bool = False) -> Callable[[Function], Function]:
    """Registers a function for operators, such as `aten::native_batch_norm` or `aten::add.Tensor`.

    An operator's arguments are passed as it was called: those at the end that have their default may be missing, and
    what its schema has after the `*` comes by keyword.
    """

    def register(function: Function) -> Function:
        for name in names:
            _named[name] = Handler(function, repeatable)
        return function

    return register


def finder(find: Finder) -> Finder:
    """Registers who knows functions for whole families of operators; asked where no handler has the name."""
    _finders.append(find)
    return find


def find(name: str) -> Handler | None:
    """The handler of an operator, or None. Loads every module of this package the first time."""
    global _loaded
    with _lock:
        if not _loaded:
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")
            _loaded = True
    if name in _named:
        return _named[name]
    overload = overload_of(name)
    if overload is None:
        return None
    for each in _finders:
        function = each(overload)
        if function is not None:
            return Handler(function)
    return None


def overload_of(name: str) -> torch._ops.OpOverload | None:
    """The operator of a name such as aten::add.Tensor; None where there is none."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


def mangle(name: str) -> str:
    """The name without its namespace that the operator has in ours; csrc/splitting.cpp does the same."""
    return name.replace("::", "__").replace(".", "__")


class Definitions:
    """The operators `ooc_split::...` of this process; defined once, whatever sessions come and go.

    Each calls `run(operator, handler, writes, arguments, keywords)`. The adapter calls `host_backed(operator, shapes)`
    after an operator ran on host memory.
    """

    def __init__(
        self,
        run: Callable[[str, Handler, bool, tuple[Any, ...], dict[str, Any]], Any],
        host_backed: Callable[[str, str], None],
    ) -> None:
        self._run = run
        library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._library = library
        self._defined: dict[str, bool] = {}
        library.define("prepare(str name) -> bool")
        library.impl("prepare", self.prepare, "CompositeExplicitAutograd")
        library.define("host_backed(str name, str shapes) -> ()")
        library.impl("host_backed", host_backed, "CompositeExplicitAutograd")

    def prepare(self, name: str) -> bool:
        """Defines the operator that splits `name`, if it can be split."""
        with _lock:
            if name not in self._defined:
                self._defined[name] = self._define(name)
            return self._defined[name]

    def _define(self, name: str) -> bool:
        found, overload = find(name), overload_of(name)
        if found is None or overload is None:
            return False
        schema = str(overload._schema)
        writes = overload._schema.is_mutable

        def run(*arguments: Any, **keywords: Any) -> Any:
            return self._run(name, found, writes, arguments, keywords)

        self._library.define(mangle(name) + schema[schema.index("(") :])
        self._library.impl(mangle(name), run, "CompositeExplicitAutograd")
        return True
