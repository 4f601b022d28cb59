"""CuPy's own objects on the allocator's memory. Without a GPU no kernel runs: memory is written by the host."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed (the extra `cupy`)")

import cupy
from library_memory import MIB, QUARTER, SETTINGS, holds, moved, press, put

import ooc.cupy as ooc
from ooc_alloc import OocError


@pytest.fixture
def memory() -> Iterator[ooc.Memory]:
    made = ooc.Memory(**SETTINGS)
    yield made
    made.close()


class View:
    """The part of an ndarray that says where its memory is; a real one asks the device for its stream."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (1,), "typestr": "|u1", "data": (self.pointer.ptr, False), "version": 3}


def test_memory_is_freed_with_the_last_pointer_to_it(memory: ooc.Memory) -> None:
    pointer = memory.malloc(QUARTER)
    put(pointer.ptr, QUARTER, 1)
    view = pointer + 4096
    del pointer
    assert memory.allocated_bytes == QUARTER and holds(view.mem.ptr, QUARTER, 1)
    del view
    assert memory.allocated_bytes == 0


def test_pinned_then_swappable(memory: ooc.Memory) -> None:
    pointer = memory.malloc(QUARTER)
    array = View(pointer)
    put(pointer.ptr, QUARTER, 2)
    press(memory)
    assert holds(pointer.ptr, QUARTER, 2) and moved(memory) == 0
    memory.swappable(array)
    press(memory)
    assert moved(memory) == QUARTER

    @memory.function(reads=["x"])
    def look(x: View) -> bool:
        return holds(x.pointer.ptr, QUARTER, 2)

    assert look(array)
    memory.keep_resident(array)
    press(memory)
    assert holds(pointer.ptr, QUARTER, 2)


def test_out_of_memory_is_cupys_own_error_with_our_words(memory: ooc.Memory) -> None:
    kept = [memory.malloc(QUARTER) for _ in range(4)]
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        memory.malloc(QUARTER)
    text = str(caught.value)
    assert f"allocating {QUARTER:,} bytes" in text and f"{2 * MIB:,}" in text and "OOC_BUDGET=" in text
    kept.pop()
    assert memory.malloc(QUARTER).ptr


def test_size_0_is_a_null_pointer_that_nobody_frees(memory: ooc.Memory) -> None:
    pointer = memory.malloc(0)
    assert pointer.ptr == 0
    del pointer
    assert memory.allocated_bytes == 0


def test_arrays_outlive_the_block(memory: ooc.Memory) -> None:
    pointer = memory.malloc(QUARTER)
    put(pointer.ptr, QUARTER, 3)
    memory.close()
    assert holds(pointer.ptr, QUARTER, 3)
    with pytest.raises(OocError, match="closed"):
        memory.malloc(100)
    del pointer
    assert not memory._core.handle


def test_arrays_that_die_together_with_their_memory_are_freed() -> None:
    """In one garbage cycle, which the collector empties in any order."""
    memory = ooc.Memory(**SETTINGS)
    core = memory._core
    cycle: dict[str, Any] = {"memory": memory, "pointer": memory.malloc(QUARTER)}
    cycle["cycle"] = cycle
    memory.close()
    assert core.handle
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an exception in a finalizer
        del memory, cycle
        gc.collect()
    assert not core.handle


def test_install_and_uninstall() -> None:
    before = cupy.cuda.get_allocator()
    with ooc.Memory(**SETTINGS) as memory:
        assert cupy.cuda.get_allocator() == memory.malloc
        memory.install()
    assert cupy.cuda.get_allocator() == before
    memory.uninstall()
    assert cupy.cuda.get_allocator() == before


def test_the_other_device_is_refused(memory: ooc.Memory) -> None:
    with pytest.raises(OocError, match="device 1"):
        memory.allocate(100, None, 1)
