"""Buffers of cuda.core in memory of the allocator: a MemoryResource.

    from cuda.core import Device
    import ooc.cuda_core as ooc

    device = Device()
    device.set_current()
    memory = ooc.Resource(budget="8GiB")
    buffer = memory.allocate(1 << 30, stream=stream)   # pinned: any kernel may use it
    memory.swappable(buffer)                           # from now on used in declared functions only

    @memory.function(writes=["x"], stream="stream")
    def double(x, stream):
        launch(stream, config, kernel, x, ...)

A buffer is freed when the work before it on its deallocation stream is done. See :mod:`ooc.allocator` for what is
pinned and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from cuda.core import Buffer, MemoryResource

from ooc.allocator import Allocator
from ooc_alloc import OocError, OutOfMemory

__all__ = ["OocError", "OutOfMemory", "Resource"]

_Result = TypeVar("_Result")


class Resource(MemoryResource):  # type: ignore[misc]
    """Device memory within a budget; arguments as of :class:`ooc.allocator.Allocator`.

    Running out of memory raises :class:`ooc_alloc.OutOfMemory`, a MemoryError whose message names a budget that works.
    """

    def __init__(self, **settings: Any) -> None:
        self.memory = Allocator(**settings)

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:
        """Returns a new buffer, which `stream` may use at once. Raises OutOfMemory, or OocError once closed."""
        address = self.memory.allocate(size, stream)
        # If the buffer cannot be made, cuda.core may have freed the memory already: freeing it again does nothing.
        try:
            return Buffer.from_handle(address, size, self, **({} if stream is None else {"stream": stream}))
        except BaseException:
            self.memory.free(address)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
        """Frees the memory when the work enqueued on `stream` is done. Buffer calls this, once."""
        self.memory.free(int(ptr), None if self.memory.is_emulated else stream)

    @property
    def is_device_accessible(self) -> bool:
        return not self.memory.is_emulated

    @property
    def is_host_accessible(self) -> bool:
        return self.memory.is_emulated

    @property
    def device_id(self) -> int:
        return -1 if self.memory.is_emulated else self.memory.device_id

    def swappable(self, *buffers: Buffer) -> None:
        """From now on these buffers are used in declared functions only, and may leave the device between them."""
        self.memory.swappable(*buffers)

    def keep_resident(self, *buffers: Buffer) -> None:
        """Keeps these buffers on the device from now on, until they are freed."""
        self.memory.keep_resident(*buffers)

    def function(
        self, *, reads: Iterable[str] = (), writes: Iterable[str] = (), stream: str, name: str | None = None
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
        """Decorator: as :meth:`ooc.allocator.Allocator.function`, but the stream parameter has to be named."""
        return self.memory.function(reads=reads, writes=writes, stream=stream, name=name)

    def step(self) -> None:
        """Marks the end of an iteration."""
        self.memory.step()

    def summary(self) -> dict[str, Any]:
        """The figures so far, with the keys of `swapd/summary.py`."""
        return self.memory.summary()

    def close(self) -> None:
        """Closes the allocator. The device is given back when the last buffer is closed."""
        self.memory.close()
