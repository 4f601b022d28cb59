"""Numba's device arrays in memory of the allocator: an External Memory Manager plugin.

    import ooc.numba as ooc

    memory = ooc.install(budget="8GiB")          # before Numba uses the device
    a = cuda.to_device(numpy.zeros(1 << 20))     # pinned: any kernel may use it
    memory.swappable(a)                          # from now on used in declared functions only

    @memory.function(writes=["x"])
    def double(x):
        kernel[blocks, threads](x)

Without changing the program, ``NUMBA_CUDA_MEMORY_MANAGER=ooc.numba OOC_BUDGET=8GiB python program.py`` does the same.

Numba does not say on which stream memory is used. So, as with Numba's own manager, a free waits until the whole device
is idle; frees are collected so that this happens rarely. See :mod:`ooc.allocator` for what is pinned and when.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda.cudadrv import driver

from ooc.allocator import Allocator
from ooc_alloc import OocError, OutOfMemory

__all__ = ["Manager", "Memory", "OocError", "OutOfMemory", "install"]

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Memory(Allocator):
    """See :class:`ooc.allocator.Allocator`. A function that names no stream parameter runs on the default stream."""

    def swappable(self, *things: Any) -> None:
        """As :meth:`Allocator.swappable`, but waits for the device first, as Numba's streams are not known here."""
        if not self.is_emulated:
            cuda.synchronize()
        super().swappable(*things)


_memory: Memory | None = None


def install(**settings: Any) -> Memory:
    """Makes Numba allocate here, with any of the settings of docs/settings.md.

    Raises:
        OocError: it was installed already, or Numba has a context, so that its memory manager cannot change any more.
        ConfigError: a setting cannot be used.
    """
    global _memory
    if _memory is not None and not _memory.closed:
        raise OocError("Numba's memory manager is installed already")
    if any(device.primary_context is not None for device in driver.driver.list_devices()):
        raise OocError("Numba uses the device already: install before its first device array or kernel")
    _memory = Memory(**settings)
    cuda.set_memory_manager(Manager)
    return _memory


def installed() -> Memory:
    """What Numba allocates from. It is made from the environment if `install` was not called. Raises as `install`."""
    global _memory
    if _memory is None:
        _memory = Memory()
    return _memory


class Manager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """The plugin; Numba makes one for each context. Pinned host memory stays Numba's own."""

    @property
    def interface_version(self) -> int:
        return 1

    def initialize(self) -> None:
        """Opens the device when Numba is about to use the context, so that a wrong setting is reported here."""
        memory = installed()
        self.deallocations.memory_capacity = memory.budget_bytes

    def memalloc(self, size: int) -> Any:
        """Returns memory that is freed with the pointer. Raises CudaAPIError (out of memory), with our text."""
        memory = installed()

        def attempt() -> int:
            try:
                return memory.allocate(size)
            except OutOfMemory as error:
                raise driver.CudaAPIError(_OUT_OF_MEMORY, f"out of memory: {error}") from None

        address = self._attempt_allocation(attempt)  # tries again after the collected frees are carried out
        context = weakref.proxy(self.context) if self.context is not None else None
        finalizer = self._finalizer(memory, address, size) if address else None
        return cuda.MemoryPointer(context, driver.binding.CUdeviceptr(address), size, finalizer=finalizer)

    def _finalizer(self, memory: Memory, address: int, size: int) -> Callable[[], None]:
        context, deallocations = self.context, self.deallocations

        def free(freed: int) -> None:
            if not memory.is_emulated:
                context.synchronize()
            memory.free(freed)

        return lambda: deallocations.add_item(free, address, size)

    def get_memory_info(self) -> Any:
        """What can still be pinned, and the budget: (free, total) bytes."""
        return cuda.MemoryInfo(*installed().memory_info())

    def get_ipc_handle(self, memory: Any) -> Any:
        """Raises OocError: an IPC handle names one piece of memory for good, but chunks behind an address change."""
        raise OocError(
            "memory of this allocator cannot be shared with another process by an IPC handle: copy it to the host, or "
            "allocate it before the manager is installed"
        )

    def reset(self) -> None:
        """Frees what Numba has let go of. Arrays that can still be reached keep their memory."""
        super().reset()
        if _memory is not None and not _memory.closed:
            _memory.release_cached()


_numba_memory_manager = Manager  # the name that NUMBA_CUDA_MEMORY_MANAGER looks for
