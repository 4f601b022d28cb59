"""CuPy's arrays in memory of the allocator.

    import cupy
    import ooc.cupy as ooc

    with ooc.Memory(budget="8GiB") as memory:      # CuPy allocates here until the end of the block
        a = cupy.zeros((4096, 4096))               # pinned: any CuPy function may use it
        memory.swappable(a)                        # from now on used in declared functions only

        @memory.function(writes=["x"])
        def double(x):
            x *= 2

        double(a)
        memory.step()

Every array is an allocation of its own, made for CuPy's current stream. No pool of CuPy's is needed, as the core keeps
freed memory for the next array of that size. As with CuPy's own pool, a program that uses an array on another stream
orders the two streams itself. See :mod:`ooc.allocator` for what is pinned and when.

CuPy's CFunctionAllocator is not used, as it does not pass the stream. Nor is its PythonFunctionAllocator, which loses
the memory of an array that dies in a reference cycle: the garbage collector takes its free function away too early.
"""

from __future__ import annotations

import weakref
from typing import Any

import cupy

from ooc.allocator import Allocator
from ooc_alloc import OocError, OutOfMemory

__all__ = ["Memory", "OocError", "OutOfMemory"]


class _Owner:
    """An object that CuPy keeps for as long as the memory can be reached."""


class Memory(Allocator):
    """CuPy's allocator while installed; see :class:`ooc.allocator.Allocator`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._before: Any = None
        self._installed = False

    def malloc(self, size_bytes: int) -> Any:
        """CuPy's MemoryPointer to fresh memory, for `cupy.cuda.set_allocator`.

        Raises CuPy's own OutOfMemoryError, with our message. The memory is freed with the last array on it.
        """
        device_id = 0 if self.is_emulated else cupy.cuda.runtime.getDevice()
        stream = self.current_stream()
        try:
            address = self.allocate(size_bytes, stream, device_id)
        except OutOfMemory as error:
            refused = cupy.cuda.memory.OutOfMemoryError(size_bytes, self.allocated_bytes, self.budget_bytes)
            refused.args = (f"{refused}: {error}",)
            raise refused from None
        owner = _Owner()
        weakref.finalize(owner, self.free, address, stream).atexit = False  # the stream lives as long as the array
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size_bytes, owner, device_id), 0)

    def current_stream(self) -> Any:
        if self.is_emulated:
            return None
        return cupy.cuda.get_current_stream()

    def install(self) -> None:
        """Makes CuPy allocate here from now on, in all threads. Arrays that exist already stay where they are."""
        if not self._installed:
            self._before = cupy.cuda.get_allocator()
            cupy.cuda.set_allocator(self.malloc)
            self._installed = True

    def uninstall(self) -> None:
        """Makes CuPy allocate where it did before. Arrays stay valid."""
        if self._installed:
            cupy.cuda.set_allocator(self._before)
            self._installed = False

    def close(self) -> None:
        """Uninstalls the allocator and closes it. The device is given back when the last array is freed."""
        self.uninstall()
        super().close()

    def __enter__(self) -> Memory:
        self.install()
        return self
