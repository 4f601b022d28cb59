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

A buffer is freed in the order of its deallocation stream. See :mod:`ooc.allocator` for what is pinned and
when.
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

    Out of memory is :class:`ooc_alloc.OutOfMemory`, a MemoryError, whose message names the budget that would do.
    """

    def __init__(self, **settings: Any) -> None:
        self.memory = Allocator(**settings)

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:
        """A buffer for use on `stream` at once, freed with it. Raises OutOfMemory, or OocError once closed."""
        address = self.memory.allocate(size, stream)
        # The buffer owns the memory from here on: where it cannot be made, cuda.core deallocates, or we do, once.
        try:
            return Buffer.from_handle(address, size, self, **({} if stream is None else {"stream": stream}))
        except BaseException:
            self.memory.free(address)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
        """Frees when what is enqueued on `stream` is done; for Buffer, which calls it once."""
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
        """On the device from now on, until freed."""
        self.memory.keep_resident(*buffers)

    def function(
        self, *, reads: Iterable[str] = (), writes: Iterable[str] = (), stream: str, name: str | None = None
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
        """Decorator; as :meth:`ooc.allocator.Allocator.function`, with the parameter that is its stream."""
        return self.memory.function(reads=reads, writes=writes, stream=stream, name=name)

    def step(self) -> None:
        """Marks the end of an iteration."""
        self.memory.step()

    def summary(self) -> dict[str, Any]:
        """The figures so far; keys as in the README."""
        return self.memory.summary()

    def close(self) -> None:
        """The device is given back when the last buffer is closed."""
        self.memory.close()
