"""Changes a class that is written in C, and has the interpreter called from anywhere. Only this file uses ctypes.

It keeps the GIL for that, and cffi gives it up.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any


def set_built_in(owner: type, name: str, value: Any) -> None:
    """Sets an attribute of a class that is written in C, which `setattr` refuses to do."""
    (members,) = gc.get_referents(vars(owner))
    members[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


_CALLED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_KEPT: list[object] = []


def pending_call(function: Callable[[], None]) -> tuple[int, int]:
    """The interpreter's function that native code may call anywhere, and what to pass, to have `function` called.

    The main thread does so when it is back in Python. What is passed stays valid for good.
    """

    def call(_: int | None) -> int:
        function()
        return 0

    _KEPT.append(called := _CALLED(call))  # the interpreter may have been asked, and not have called yet
    ask, what = (ctypes.cast(each, ctypes.c_void_p).value for each in (ctypes.pythonapi.Py_AddPendingCall, called))
    assert ask is not None and what is not None
    return ask, what
