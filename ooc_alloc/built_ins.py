"""Changes a class that is written in C. Only this file uses ctypes: it keeps the GIL for that, and cffi gives it up."""

from __future__ import annotations

import ctypes
import gc
from typing import Any


def set_built_in(owner: type, name: str, value: Any) -> None:
    """Sets an attribute of a class that is written in C, which `setattr` refuses to do."""
    (members,) = gc.get_referents(vars(owner))
    members[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
