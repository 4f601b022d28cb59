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


class Resource(Allocator, MemoryResource):  # type: ignore[misc]
    """Buffers within a budget; see :class:`ooc.allocator.Allocator`.

    Running out of memory raises :class:`ooc_alloc.OutOfMemory`, a MemoryError whose message names a budget that works.
    """

    def allocate(self, size: int, *, stream: Any = None) -> Buffer:  # type: ignore[override]
        """Returns a new buffer, which `stream` may use at once. Raises OutOfMemory, or OocError once closed."""
        address = super().allocate(size, stream)
        # If the buffer cannot be made, cuda.core may have freed the memory already: freeing it again does nothing.
        try:
            return Buffer.from_handle(address, size, self, **({} if stream is None else {"stream": stream}))
        except BaseException:
            self.free(address)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any = None) -> None:
        """Frees the memory when the work enqueued on `stream` is done. Buffer calls this, once."""
        self.free(int(ptr), None if self.is_emulated else stream)

    @property
    def is_device_accessible(self) -> bool:
        return not self.is_emulated

    @property
    def is_host_accessible(self) -> bool:
        return self.is_emulated

    @property
    def device_id(self) -> int:
        return -1 if self.is_emulated else self._session.device_ordinal

    def function(  # type: ignore[override]
        self, *, reads: Iterable[str] = (), writes: Iterable[str] = (), stream: str, name: str | None = None
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
        """Decorator: as :meth:`ooc.allocator.Allocator.function`, but the stream parameter has to be named."""
        return super().function(reads=reads, writes=writes, stream=stream, name=name)
