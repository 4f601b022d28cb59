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

A function's body gets ordinary arrays (views of device memory) in place of the device arrays that it is given; what it
computes on the way is NumPy's own memory and no part of the budget. A view is good until the function returns. One that
can be reached after that is an error (:class:`EscapedView`), and its variable stays on the device for as long as it can
be reached, so that not even a program that catches the error computes on wrong bytes.

Functions may run in several threads, one at a time in each; what they may do with one array at the same time is what
NumPy allows. The functions of the thread that calls :meth:`Device.step` are those that are recorded and planned for.
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
    """A budget of device memory, and the arrays in it. Ends with :meth:`close`, or as a context manager.

    Args:
        settings: any of the settings of the README's table, e.g. ``budget="64MiB"``, ``chunk_size="64KiB"``; those not
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
        self._lock = threading.RLock()  # a finalizer may run while its own thread holds it
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

        The parameters that it names take device arrays, or lists and tuples of them, and the body gets views in their
        place, all on the device at once. What it only reads is read-only there.

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
            TypeError: a declared parameter is given something else, or another one a device array.
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
        """Marks the end of an iteration: the sequence of functions since the last one is planned if it comes again."""
        self._check_open()
        self._check_outside("step()")
        self._session.boundary()

    def summary(self) -> dict[str, Any]:
        """The figures so far; keys as in the README."""
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
                self._core_outlives = self._session.stop()  # views escaped: it stays until they are gone
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
        """Inside, the operands are on the device, in a function of the calling thread."""
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
                if self._core.in_function():  # it has begun; an interrupt may come at any time
                    self._core.function_end()
            finally:
                with self._lock:
                    self._running -= 1

    def _allocate(self, size_bytes: int) -> Memory:
        self._check_outside("a new array")
        address = 0
        try:
            with self._function("numpy.empty", ()):  # outside of one it would stay pinned until the next
                address = self._core.malloc(size_bytes)
        except OutOfMemory:
            if address:  # of the host: the core went on to learn the need
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
                # After an exception they are in its traceback, for as long as somebody looks at that.
                escaped = self._keep_reachable(views, collect=returned)
        if escaped:
            del result
            raise EscapedView(
                f"a view of {', '.join(map(repr, escaped))} can be reached after function {declaration.name} has "
                "returned, where its memory may leave the device: return or keep a copy (.copy())"
            )
        return result

    def _keep_reachable(self, views: list[View], *, collect: bool) -> list[str]:
        """Pins what can still be reached, for as long as it can. Returns the parameters concerned."""
        if collect and any(view.root() is not None for view in views):
            gc.collect()  # it may be garbage that refers to itself
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
        """Frees an allocation; any thread, at any time."""
        with self._lock:
            if self._core.handle:
                self._core.free(address)


def _shut(session: Session) -> None:
    if session.stop():  # not in a forked child: the device is the parent's
        session.core.close()
