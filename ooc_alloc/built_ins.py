"""The only file that speaks ctypes: a change to a class that is written in C, which needs the GIL, as cffi does not."""

from __future__ import annotations

import ctypes
import gc
from typing import Any


def set_built_in(owner: type, name: str, value: Any) -> None:
    """Sets an attribute of a class that is written in C, which `setattr` refuses to."""
    (members,) = gc.get_referents(vars(owner))
    members[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
