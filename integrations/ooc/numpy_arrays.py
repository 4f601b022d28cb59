"""Arrays on a device, and what the functions that use them declare; see :mod:`ooc.numpy`."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ooc.declared import Declaration, items_of
from ooc_alloc import WRITE, OocError


class Owner(Protocol):
    """What an array needs of its device (`ooc.numpy.Device`)."""

    def call(self, declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def release(self, address: int) -> None: ...


class Array:
    """A variable: device memory with a shape and a dtype, in C order. Made by a :class:`Device`.

    Its elements are reached in functions (:meth:`Device.function`) and by copies. The memory is freed when neither the
    array nor a view of it is left.
    """

    __slots__ = ("__weakref__", "_memory", "device", "dtype", "shape")

    def __init__(self, device: Owner, shape: tuple[int, ...], dtype: np.dtype[Any], memory: Memory) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self._memory: Memory | None = memory

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to_numpy(self) -> npt.NDArray[Any]:
        """A copy in host memory."""
        copy: npt.NDArray[Any] = self.device.call(COPY, (self,), {})
        return copy

    def copy_from(self, host: npt.ArrayLike) -> None:
        """Copies host values in. They are broadcast to the shape, and cast if that keeps their kind."""
        self.device.call(FILL, (self, np.asarray(host)), {})

    def free(self) -> None:
        """Gives the memory back now, or at the end of a function that uses it. The array cannot be used any more."""
        self._memory = None

    def memory(self) -> Memory:
        """The memory, for the device. Raises OocError if the array was freed."""
        if self._memory is None:
            raise OocError(f"an array of shape {self.shape} is used after it was freed")
        return self._memory

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        raise TypeError(
            "a device array is no ndarray: use it in a function that declares it (Device.function), or copy it with "
            "to_numpy()"
        )

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, dtype={self.dtype}{', freed' if self._memory is None else ''})"


class Memory:
    """One allocation, which is freed with this object."""

    def __init__(self, device: Owner, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        weakref.finalize(self, device.release, address).atexit = False


class _Reach:
    """An object that NumPy keeps for as long as a view, or a view of a view, lives."""

    def __init__(self, memory: Memory, access: int) -> None:
        self.memory = memory
        data = (memory.address, not access & WRITE)
        self.__array_interface__ = {"shape": (memory.size_bytes,), "typestr": "|u1", "data": data, "version": 3}


@dataclass(frozen=True)
class View:
    """A view as a function got it, and whether it, or a view of it, can still be reached."""

    parameter: str
    memory: Memory
    access: int
    root: weakref.ref[npt.NDArray[np.uint8]]  # the base of every view of it: NumPy shortens chains down to this array


def operands_of(declaration: Declaration, device: Owner, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """Addresses and accesses of the arrays in a call's arguments. Raises if an argument is not what was declared."""
    found = []
    for parameter, value in arguments.items():
        access = declaration.access.get(parameter)
        for item in items_of(value):
            if access is not None:
                found.append((_checked(declaration, device, parameter, item).memory().address, access))
            elif isinstance(item, Array):
                name = declaration.name
                raise TypeError(f"{name} is given a device array as {parameter!r}, which it does not declare")
    return found


def _checked(declaration: Declaration, device: Owner, parameter: str, item: Any) -> Array:
    if not isinstance(item, Array):
        raise TypeError(
            f"{declaration.name} takes arrays of its device as {parameter!r}, not {type(item).__name__}; "
            "Device.array() makes one of a host array"
        )
    if item.device is not device:
        raise ValueError(f"{declaration.name} is given an array of another device as {parameter!r}")
    return item


def open_views(parameter: str, access: int, value: Any, views: list[View]) -> Any:
    """Returns a value with views of device memory in place of its arrays, and appends the views to `views`."""
    if isinstance(value, (list, tuple)):
        opened = [open_views(parameter, access, item, views) for item in value]
        return tuple(opened) if isinstance(value, tuple) else opened
    memory = value.memory()
    root = np.asarray(_Reach(memory, access))
    views.append(View(parameter, memory, access, weakref.ref(root)))
    return root.view(value.dtype).reshape(value.shape)


def _fill(target: npt.NDArray[Any], value: npt.NDArray[Any]) -> None:
    np.copyto(target, value, casting="same_kind")


def _copy(source: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy: npt.NDArray[Any] = source.copy()
    return copy


FILL = Declaration(_fill, (), ("target",), "numpy.fill")
COPY = Declaration(_copy, ("source",), (), "numpy.copy")
