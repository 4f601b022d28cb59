"""What CuPy, Numba and cuda.core share: a budget of device memory that a library allocates from.

Nobody announces what such a library's kernels use. So **memory is pinned as long as it is allocated**, unless the
program says otherwise for single arrays:

    memory.swappable(a, b)                        # from now on only declared functions use them
    @memory.function(reads=["a"], writes=["b"])   # inside, its arrays are on the device
    def step(a, b): ...

Between the functions a swappable array may be in host memory; a kernel that touches it then fails. `keep_resident`
pins it again. A program that declares nothing keeps to the budget and recycles memory, but nothing is swapped.

The device is a CUDA device, whose driver must be installed. `alloc="emulated"` is for tests: the memory of that device
is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ooc.declared import Declaration, Managed, items_of
from ooc_alloc import READ, WRITE, OocError, library_path
from swapd.session import CudaDevice, wanted_config

_Result = TypeVar("_Result")


def address_of(thing: Any) -> int:
    """The device address of an array (`__cuda_array_interface__`) or a buffer (`handle`); else raises TypeError."""
    interface = getattr(thing, "__cuda_array_interface__", None)
    if interface is not None:
        return int(interface["data"][0])
    handle = getattr(thing, "handle", None)
    if handle is not None and hasattr(thing, "size"):
        return int(handle)
    raise TypeError(f"a {type(thing).__name__} has no device memory: an array or a buffer of the device is needed")


def stream_of(stream: Any) -> int:
    """The CUstream of a stream object of CuPy, Numba or cuda.core, as a number; 0 for None. Raises TypeError."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)  # (version, handle)
    for owner, name in ((stream, "ptr"), (stream, "handle")):
        if hasattr(owner, name):
            handle = getattr(owner, name)
            return int(getattr(handle, "value", handle) or 0)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise TypeError(f"a {type(stream).__name__} is no CUDA stream")


class Allocator(Managed):
    """Device memory within a budget, for a library that is told nothing of functions.

    Args:
        asynchronous: functions run on streams of the emulated device too (for tests), as they do on any CUDA device.
        settings: any of the settings of docs/settings.md, e.g. ``budget="8GiB"``; those not given come from the
            environment.

    Raises:
        ConfigError: a setting cannot be used; the message names it.
        OocError: there is no CUDA driver or device, or it cannot be used.
    """

    def __init__(self, *, asynchronous: bool = False, **settings: Any) -> None:
        config = wanted_config(settings)
        super().__init__(config, _device(config.alloc == "cpu", asynchronous))
        self._pins: dict[int, int] = {}  # token of each allocation that is pinned
        self._sizes: dict[int, int] = {}  # bytes of each allocation

    @property
    def is_emulated(self) -> bool:
        """Whether the device is the emulated one, whose memory is the host's."""
        return self._session.config.alloc == "cpu"

    @property
    def budget_bytes(self) -> int:
        return self._session.budget_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of everything that is allocated, on the device or swapped out."""
        with self._lock:
            return sum(self._sizes.values())

    def allocate(self, size_bytes: int, stream: Any = None, device_id: int = 0) -> int:
        """Allocates pinned memory that may be used on `stream` at once, and returns its address; 0 for 0 bytes.

        Raises:
            OutOfMemory: the memory and what is pinned already do not fit the budget; the message names one that works.
            OocError: the allocator is closed, or it does not manage the device `device_id`.
        """
        if device_id != self._session.device_ordinal:
            managed = self._session.device_ordinal
            raise OocError(f"memory of device {device_id} was asked for; this allocator manages {managed}")
        self._check_open()
        if size_bytes <= 0:
            return 0
        address, token = self._core.malloc_pinned(size_bytes, stream_of(stream))
        with self._lock:
            self._pins[address], self._sizes[address] = token, size_bytes
        return address

    def free(self, address: int, stream: Any = None) -> None:
        """Gives memory back when the work enqueued on `stream` is done. Any thread may call it, also after `close`.

        Without a stream, the memory is given back when functions that had it are done, and what was enqueued so far on
        the default stream: another stream may have been destroyed by now.
        """
        with self._lock:
            if self._sizes.pop(address, None) is None:
                return
            self._pins.pop(address, None)
            if self._core.handle:
                if stream is None:
                    self._core.free(address)
                else:
                    self._core.free_on(address, stream_of(stream))
            self._end_if_unused()

    def memory_info(self) -> tuple[int, int]:
        """Bytes that can still be pinned, and the budget."""
        if not self._core.handle:
            return 0, self.budget_bytes
        stats = self._core.stats()
        used = int(stats["pinned_bytes"]) + int(stats["slab_used_bytes"])
        return max(0, self.budget_bytes - used), self.budget_bytes

    def swappable(self, *things: Any) -> None:
        """From now on these arrays are used in declared functions only, and may leave the device between them.

        What uses them by now is enqueued on the current stream, or over.

        Raises:
            OocError: the memory is not this allocator's, or it is a view's (give the array that owns the memory).
        """
        for thing in things:
            address = self._owned(thing)
            with self._lock:
                token = self._pins.pop(address, None)
            if token is not None:
                self._core.record_use(address, stream_of(self.current_stream()))
                self._core.unpin(token, READ | WRITE)

    def keep_resident(self, *things: Any) -> None:
        """Keeps these arrays on the device from now on, until freed. Raises as `swappable` does, and OutOfMemory."""
        for thing in things:
            address = self._owned(thing)
            if address not in self._pins:
                token = self._core.pin(address, READ | WRITE)
                with self._lock:
                    self._pins[address] = token

    def release_cached(self) -> None:
        """Gives memory that nothing uses back to the driver."""
        if self._core.handle:
            self._core.release_cached()

    def _owned(self, thing: Any) -> int:
        address = thing if isinstance(thing, int) else address_of(thing)
        if address not in self._sizes:
            raise OocError(f"{address:#x} is no allocation of this allocator, or lies within one: give its owner")
        return address

    def function(
        self,
        *,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        stream: str | None = None,
        name: str | None = None,
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
        """Decorator: as :meth:`Managed.function`, for a function whose kernels use the arrays, also after it returned.

        Arrays that are pinned, or whose memory is not this allocator's, are allowed too. `stream` is the name of the
        parameter that is its stream; without one it enqueues on the library's current stream.
        """
        return lambda plain: self._declared(plain, Declaration(plain, reads, writes, name, stream))

    def call(self, declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a declared function.

        Raises:
            OutOfMemory: its arrays do not fit the budget; the message names the smallest one that does.
            TypeError: a named parameter is given something that has no device memory.
            OocError: the allocator is closed, or the call is within another function.
        """
        given = declaration.bind(args, kwargs).arguments
        operands = [
            (address_of(item), access)
            for parameter, access in declaration.access.items()
            for item in items_of(given.get(parameter))
            if item is not None
        ]
        stream = stream_of(given[declaration.stream] if declaration.stream is not None else self.current_stream())
        name = declaration.name
        self._check_open()
        if self._core.in_function():
            raise OocError(f"{name} is called within another declared function: declare the outer one's arrays there")
        self._core.function_begin(self._core.function_id(name), operands, stream)
        try:
            return declaration.function(*args, **kwargs)
        finally:
            self._core.function_end()

    def current_stream(self) -> Any:
        """The stream that the library enqueues on now; None (the default stream) if the library has no such notion."""
        return None

    def close(self) -> None:
        """Writes the summary and stops the daemon. The device is given back when the last allocation is freed."""
        with self._lock:
            if not self.closed and self._session.stop():
                self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.closed and not self._sizes and self._core.handle:
            self._core.close()


def _device(emulated: bool, asynchronous: bool) -> CudaDevice | None:
    """The device for a session; None stands for the emulated device, where the host waits for every copy."""
    if not emulated:
        return CudaDevice()
    return CudaDevice(driver=str(library_path("libooc_emulated_cuda.so"))) if asynchronous else None
