"""The only file that uses cffi: what the C headers declare, the library that they describe, and its errors.

Names, order and types of structs, signatures and constants are read from the headers, which are installed with the
package. Python sees an address as a number: where a header says `void*`, an int is passed and returned, 0 for null.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path
from typing import Any

import cffi
import numpy as np


class OocError(RuntimeError):
    """A call of the native core failed; the message says what to do."""


class OutOfMemory(OocError, MemoryError):
    """One function's pinned set does not fit the budget, or the host has no memory for swapped data or our books."""


class DriverFailure(OocError):
    """A driver call failed although it was retried. Data are safe in one of the two memories."""


class StrictViolation(OocError):
    """Strict mode found a function that wrote a variable it had declared as read only."""


def declarations(header: str) -> Any:
    """The `cffi.FFI` that knows what a header, given by its path in the package, declares.

    cffi has no preprocessor: lines that begin with `#` are left out, except constants, and so is what is for C++ alone.
    """
    text = (Path(__file__).parent / header).read_text(encoding="utf-8")
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^#(?!define \w+ +\w+ *(//.*)?$).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(const )?void ?\* ?", "uintptr_t ", text.replace("OOC_API ", ""))
    known = cffi.FFI()
    known.cdef(text)
    return known


def open_library(known: Any, path: str) -> Any:
    """The functions of a library as attributes. The library stays loaded until the process ends.

    Raises OSError if the library cannot be loaded, and AttributeError if it lacks a function that the header declares.
    """
    try:
        library = known.dlopen(path, known.RTLD_NOW | known.RTLD_NODELETE)
    except OSError as error:  # its text also has what cffi tried afterwards
        raise OSError(str(error).partition(".  Additionally, ")[0]) from None
    for name in dir(library):  # now: cffi's first look-up of a name takes a lock, which a fork may copy as taken
        getattr(library, name)
    return library


def numpy_type(c_type: Any) -> np.dtype[Any]:
    """The NumPy type with the layout of a C type. It has only the first of a union's members.

    Args:
        c_type: a struct, a number or a pointer, as `ffi.typeof` gives it.
    """
    if c_type.kind == "struct":
        members: dict[int, tuple[str, Any]] = {}
        for name, field in c_type.fields:
            members.setdefault(field.offset, (name, numpy_type(field.type)))
        names, formats = zip(*members.values())
        return np.dtype({"names": names, "formats": formats, "offsets": list(members), "itemsize": ffi.sizeof(c_type)})
    if c_type.kind == "pointer":
        return np.dtype(np.uintp)
    if c_type.cname in ("double", "float"):
        kind = "f"
    else:
        kind = "u" if int(ffi.cast(c_type, -1)) > 0 else "i"
    return np.dtype(f"{kind}{ffi.sizeof(c_type)}")


def as_dict(struct: Any) -> dict[str, Any]:
    """The members of a struct, given as a pointer to it, by their names."""
    return {name: getattr(struct, name) for name, _ in ffi.typeof(struct).item.fields}


ffi = declarations("csrc/ooc_alloc.h")
constants = ffi.dlopen(None)  # the header's constants as attributes; no library of ours is loaded for them

READ: int = constants.OOC_READ
WRITE: int = constants.OOC_WRITE
ABI_VERSION: int = constants.OOC_ABI_VERSION

_ERRORS: dict[int, type[OocError]] = {
    constants.OOC_OUT_OF_MEMORY: OutOfMemory,
    constants.OOC_DRIVER_FAILURE: DriverFailure,
    constants.OOC_STRICT_VIOLATION: StrictViolation,
    constants.OOC_INVALID: OocError,
    constants.OOC_NO_HOST_MEMORY: OutOfMemory,
}

# Types are looked up by name here, once: the look-up takes a lock of cffi's, which a fork may copy as taken.
NUMBER = ffi.typeof("uint64_t *")
BYTES = ffi.typeof("uint8_t[]")


def library_path(name: str = "libooc_alloc.so") -> Path:
    """Path of one of the package's native libraries.

    Raises OocError if it is not there: the package was neither installed nor built in place.
    """
    folder = os.environ.get("_OOC_LIBRARIES")  # those of another build, such as one with sanitizers
    path = Path(folder or str(importlib.resources.files("ooc_alloc").joinpath("lib"))) / name
    if not path.exists():
        raise OocError(f"{name} is missing from {path.parent}: install the package, or `make native` in the checkout")
    return path


_library: Any = None


def load_library() -> Any:
    """`libooc_alloc.so`, loaded once. Raises OocError if it is missing, or of another version than the header."""
    global _library
    if _library is None:
        library = open_library(ffi, str(library_path()))
        if library.ooc_abi_version() != ABI_VERSION:
            raise OocError("libooc_alloc.so and the Python package have different versions: build them together")
        _library = library
    return _library


def text_of(found: Any) -> str:
    """A string of C's; empty for null."""
    text: bytes = ffi.string(found) if found else b""
    return text.decode(errors="replace")


def error_of(status: int, otherwise: type[OocError] = OocError) -> OocError:
    """The calling thread's last error, of the class that goes with a status, or else of the class `otherwise`."""
    return _ERRORS.get(status, otherwise)(text_of(load_library().ooc_last_error()))


def check(status: int) -> None:
    """Raises the calling thread's last error unless the status is that of success."""
    if status != 0:
        raise error_of(status)


def device_memory(driver_library: str, ordinal: int = 0) -> tuple[int, int]:
    """Bytes of a device, in all and free now. Raises OocError if the driver or the device cannot be used."""
    total, free = ffi.new(NUMBER), ffi.new(NUMBER)
    check(load_library().ooc_device_memory(driver_library.encode(), ordinal, total, free))
    return total[0], free[0]


def refused_settings(emulated_driver_library: str) -> str:
    """Why the emulated device refused its settings, a moment ago in this thread; empty if it did not refuse them."""
    library = open_library(declarations("emulated/emulated_control.h"), emulated_driver_library)
    return text_of(library.ooc_emulated_error())
