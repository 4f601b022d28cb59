"""Out-of-core NumPy: arrays on the device, and functions that declare what they read and write.

    import numpy as np
    import ooc.numpy as ooc

    with ooc.Device(budget="64MiB") as device:
        a, b = device.array(host), device.zeros(host.shape)

        @device.function(reads=("source",), writes=("target",))
        def double(source, target):
            np.multiply(source, 2, out=target)

        for _ in range(10):
            double(a, b)
            device.step()
        print(b.to_numpy(), device.summary())

With ``disk="/scratch"`` what the budget does not hold lies on a disk and takes no memory, so that the arrays together
may be larger than memory; each function's arrays fit the budget.

A function's body gets ordinary arrays (views of device memory) in place of the device arrays that it is given. What it
computes on the way lies in NumPy's own memory and is no part of the budget. A view is good until the function returns.
A view that can be reached after that is an error (:class:`EscapedView`). Its variable then stays on the device for as
long as the view can be reached, so that not even a program that catches the error computes on wrong bytes.

Functions may run in several threads, one at a time in each. Two threads may use one array at the same time as far as
NumPy allows it. Only the functions of the thread that calls :meth:`Device.step` are recorded and planned for.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc.declared import Declaration, Managed
from ooc.numpy_arrays import FILL, Array, Memory, View, open_views, operands_of
from ooc_alloc import OocError, OutOfMemory
from swapd.session import Session, wanted_config

__all__ = ["Array", "Device", "EscapedView", "OocError", "OutOfMemory"]


class EscapedView(OocError):
    """A view of a device array can be reached after the function that it was made for has returned."""


class Device(Managed):
    """A budget of device memory, and the arrays in it. :meth:`close` ends it, and so does the end of a `with` block.

    Functions get views of their arrays, which are all on the device at once. Views of what a function only reads are
    read-only.

    Args:
        settings: any of the settings of docs/settings.md, e.g. ``budget="64MiB"``, ``chunk_size="64KiB"``; those not
            given come from the environment. NumPy computes on the host, so the device is always the emulated one, whose
            memory the host can address; a process has one emulated device, which all `Device` objects share.

    Raises:
        ConfigError: a setting cannot be used; the message names it.
        OocError: the device cannot be used, or is not one that NumPy can compute on.
    """

    _what = "the device"

    def __init__(self, **settings: Any) -> None:
        config = wanted_config(settings)
        if config.alloc == "cuda":
            raise OocError(
                "NumPy computes on memory that the host can address, which a CUDA device's is not: "
                "set alloc='emulated' (OOC_ALLOC=emulated) to use the emulated device"
            )
        super().__init__(config)
        self._running = 0  # functions, in all threads
        self._reachable = 0  # views that escaped
        self._core_outlives = False
        self._names: dict[str, int] = {}
        self._end = weakref.finalize(self, _shut, self._session)
        self._end.atexit = False  # at the program's end the session writes its summary, and nothing is unmapped

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> Array:
        """A new array in C order, not initialised. Raises OutOfMemory if it is larger than the budget."""
        sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
            raise TypeError(f"an array on the device cannot have the dtype {kind}: its elements must be plain bytes")
        if any(size < 0 for size in sizes):
            raise ValueError(f"the shape {sizes} has a negative size")
        return Array(self, sizes, kind, self._allocate(math.prod(sizes) * kind.itemsize))

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64) -> Array:
        """A new array of zeros in C order. Raises OutOfMemory."""
        made = self.empty(shape, dtype)
        self.call(FILL, (made, np.zeros((), made.dtype)), {})
        return made

    def array(self, host: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
        """A copy of a host array, in C order. Raises OutOfMemory."""
        source = np.asarray(host, dtype)
        made = self.empty(source.shape, source.dtype)
        made.copy_from(source)
        return made

    def step(self) -> None:
        self._check_outside("step()")
        super().step()

    def close(self) -> None:
        """Writes the summary, stops the daemon and frees the device; the arrays are gone. Does nothing if closed."""
        self._check_outside("close()")
        with self._lock:
            if self.closed:
                return
            if self._running:
                raise OocError(f"close() while {self._running} functions run in other threads")
            if self._reachable:
                self._end.detach()
                self._core_outlives = self._session.stop()  # views escaped: the core stays until they are gone
            else:
                self._end()

    def _check_outside(self, what: str) -> None:
        if not self.closed and self._core.in_function():
            raise OocError(f"{what} within a function: arrays are made, copied and passed to functions between them")

    @contextmanager
    def _function(self, name: str, operands: Iterable[tuple[int, int]]) -> Iterator[None]:
        """A context manager: within it the calling thread is in a function, and the operands are on the device."""
        with self._lock:
            self._check_open()
            self._running += 1
        try:
            if name not in self._names:
                self._names[name] = self._core.function_id(name)
            self._core.function_begin(self._names[name], operands)
            yield
        finally:
            try:
                if self._core.in_function():  # not if an interrupt came before it had begun
                    self._core.function_end()
            finally:
                with self._lock:
                    self._running -= 1

    def _allocate(self, size_bytes: int) -> Memory:
        self._check_outside("a new array")
        address = 0
        try:
            with self._function("numpy.empty", ()):  # outside of a function it would stay pinned until the next one
                address = self._core.malloc(size_bytes)
        except OutOfMemory:
            if address:  # host memory, which the core gave to find out how much is needed
                self._core.free(address)
            raise
        return Memory(self, address, size_bytes)

    def call(self, declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a declared function.

        Raises:
            OutOfMemory: its arrays do not fit the budget; the message names the smallest budget that does.
            EscapedView: a view can be reached after the function's end: it was returned, or kept somewhere.
            TypeError: a declared parameter is not given device arrays, or an undeclared one is given a device array.
            ValueError: an array is of another device.
            OocError: an array was freed, the device is closed, or the call is within another function.
        """
        self._check_outside(f"a call of {declaration.name}")
        self._check_open()
        bound = declaration.bind(args, kwargs)
        views: list[View] = []
        escaped: list[str] = []
        with self._function(declaration.name, operands_of(declaration, self, bound.arguments)):
            returned = False
            try:
                for parameter, access in declaration.access.items():
                    bound.arguments[parameter] = open_views(parameter, access, bound.arguments[parameter], views)
                result = declaration.function(*bound.args, **bound.kwargs)
                returned = True
            finally:
                bound.arguments.clear()
                # After an exception the views are in its traceback, for as long as somebody keeps that.
                escaped = self._keep_reachable(views, collect=returned)
        if escaped:
            del result
            raise EscapedView(
                f"a view of {', '.join(map(repr, escaped))} can be reached after function {declaration.name} has "
                "returned, where its memory may leave the device: return or keep a copy (.copy())"
            )
        return result

    def _keep_reachable(self, views: list[View], *, collect: bool) -> list[str]:
        """Pins the memory of views that can still be reached, for as long as they can. Returns their parameters."""
        if collect and any(view.root() is not None for view in views):
            gc.collect()  # what refers to the view may be garbage that refers to itself
        escaped = []
        for view in views:
            root = view.root()
            if root is None:
                continue
            escaped.append(view.parameter)
            with self._lock:
                self._reachable += 1
            token = self._core.pin(view.memory.address, view.access)
            weakref.finalize(root, self._let_go, token, view.access).atexit = False
        return list(dict.fromkeys(escaped))

    def _let_go(self, token: int, access: int) -> None:
        with self._lock:
            self._reachable -= 1
            if self._core.handle:
                self._core.unpin(token, access)
            if self._core_outlives and not self._reachable:
                self._core.close()

    def release(self, address: int) -> None:
        """Frees an allocation. Any thread may call it, at any time."""
        with self._lock:
            if self._core.handle:
                self._core.free(address)


def _shut(session: Session) -> None:
    if session.stop():  # not in a forked child: the device is the parent's
        session.core.close()
