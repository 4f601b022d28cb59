"""What is replaced in Python and PyTorch while a session lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import MethodDescriptorType
from typing import Any

from ooc_alloc.built_ins import set_built_in


def look_like(function: Any, path: str) -> None:
    """Lets a wrapper look as if a file of PyTorch's had it.

    Dynamo goes by the file whether it traces a function, leaves it alone, or begins a graph with it. What replaces a
    function of PyTorch's is to be treated as that one was, or other graphs are compiled because of us.
    """
    function.__code__ = function.__code__.replace(co_filename=path)


class Patches(ExitStack):
    """Replaced attributes; `close` brings them back, the last one first."""

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replaces `owner.name`, if there is one, by what `make` makes of it.

        A method written in C is replaced in its defining class.
        """
        original = getattr(owner, name, None)
        if original is None:
            return
        if isinstance(original, MethodDescriptorType):
            owner = original.__objclass__
            set_built_in(owner, name, make(original))
            self.callback(set_built_in, owner, name, original)
            return
        undo = (setattr, owner, name, original) if name in vars(owner) else (delattr, owner, name)
        setattr(owner, name, make(original))
        self.callback(*undo)

    def hide(self, owner: Any, name: str) -> None:
        """Removes an attribute whose uses cannot be noticed."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
            delattr(owner, name)
