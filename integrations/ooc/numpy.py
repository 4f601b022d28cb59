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

A function's body gets ordinary arrays (views of device memory) in place of the device arrays that it is given. What it
computes on the way lies in NumPy's own memory and is no part of the budget. A view is good until the function returns.
A view that can be reached after that is an error (:class:`EscapedView`). Its variable then stays on the device for as
long as the view can be reached, so that not even a program that catches the error computes on wrong bytes.

Functions may run in several threads, one at a time in each. Two threads may use one array at the same time as far as
NumPy allows it. Only the functions of the thread that calls :meth:`Device.step` are recorded and planned for.
"""

from __future__ import annotations

import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ooc.numpy_arrays import FILL, Array, Declaration, Memory, View
from ooc.prometheus.exporting import export
from ooc_alloc import OocError, OutOfMemory
from swapd.session import Session, wanted_config

__all__ = ["Array", "Device", "EscapedView", "OocError", "OutOfMemory"]

_Result = TypeVar("_Result")


class EscapedView(OocError):
    """A view of a device array can be reached after the function that it was made for has returned."""


class Device:
    """A budget of device memory, and the arrays in it. :meth:`close` ends it, and so does the end of a `with` block.

    Args:
        settings: any of the settings of docs/settings.md, e.g. ``budget="64MiB"``, ``chunk_size="64KiB"``; those not
            given come from the environment. NumPy computes on the host, so the device is always the emulated one, whose
            memory the host can address; a process has one emulated device, which all `Device` objects share.

    Raises:
        ConfigError: a setting cannot be used; the message names it.
        OocError: the device cannot be used, or is not one that NumPy can compute on.
    """

    def __init__(self, **settings: Any) -> None:
        config = wanted_config(settings)
        if config.alloc == "cuda":
            raise OocError(
                "NumPy computes on memory that the host can address, which a CUDA device's is not: "
                "set alloc='emulated' (OOC_ALLOC=emulated) to use the emulated device"
            )
        self._session = Session(config)
        self._core = self._session.core
        self._lock = threading.RLock()  # re-entrant: a finalizer may run in a thread that holds the lock
        self._running = 0  # functions, in all threads
        self._reachable = 0  # views that escaped
        self._core_outlives = False
        self._names: dict[str, int] = {}
        self._end = weakref.finalize(self, _shut, self._session)
        self._end.atexit = False  # at the program's end the session writes its summary, and nothing is unmapped
        self._session.started()
        export(self._session)

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

    def function(
        self, *, reads: Iterable[str] = (), writes: Iterable[str] = (), name: str | None = None
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
        """Decorator: makes a function of NumPy code one that runs on this device.

        The named parameters take device arrays, or lists and tuples of them. The body gets views in their place, which
        are all on the device at once. Views of what the function only reads are read-only.

        Args:
            reads: names of the parameters whose arrays it reads.
            writes: names of those that it writes, or reads and writes.
            name: what it is called in traces and errors; its own name if not given.

        Raises (on decoration):
            ValueError: a name is no parameter.
            TypeError: it is a generator or a coroutine, whose body runs after it has returned.

        Raises (on a call):
            OutOfMemory: its arrays do not fit the budget; the message names the smallest budget that does.
            EscapedView: a view can be reached after the function's end: it was returned, or kept somewhere.
            TypeError: a declared parameter is not given device arrays, or an undeclared one is given a device array.
            ValueError: an array is of another device.
            OocError: an array was freed, the device is closed, or the call is within another function.
        """

        def decorate(plain: Callable[..., _Result]) -> Callable[..., _Result]:
            declaration = Declaration(plain, reads, writes, name)

            @functools.wraps(plain)
            def run(*args: Any, **kwargs: Any) -> _Result:
                result: _Result = self.call(declaration, args, kwargs)
                return result

            return run

        return decorate

    def step(self) -> None:
        """Marks the end of an iteration. A plan is made for its functions if they come again in the same order."""
        self._check_open()
        self._check_outside("step()")
        self._session.boundary()

    def summary(self) -> dict[str, Any]:
        """The figures so far, with the keys of `swapd/summary.py`."""
        self._check_open()
        return self._session.summary()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the program is ending."""
        return self._session.closed

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

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise OocError("the device is closed")

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
        """Runs a declared function; see :meth:`function`."""
        self._check_outside(f"a call of {declaration.name}")
        self._check_open()
        bound = declaration.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        views: list[View] = []
        escaped: list[str] = []
        with self._function(declaration.name, declaration.operands(self, bound.arguments)):
            returned = False
            try:
                for parameter in declaration.access:
                    bound.arguments[parameter] = declaration.open(parameter, bound.arguments[parameter], views)
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
