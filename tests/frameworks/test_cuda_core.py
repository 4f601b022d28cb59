"""cuda.core's own buffers on the allocator's memory. Without a GPU no kernel runs: memory is written by the host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed (the extra `cuda-core`)")

from cuda.core import Buffer, MemoryResource
from library_memory import QUARTER, SETTINGS, holds, moved, press, put

import ooc.cuda_core as ooc
from ooc_alloc import OocError


@pytest.fixture
def resource() -> Iterator[ooc.Resource]:
    made = ooc.Resource(**SETTINGS)
    yield made
    made.close()


def make(resource: ooc.Resource, seed: int, size: int = QUARTER) -> Buffer:
    buffer = resource.allocate(size)
    put(int(buffer.handle), size, seed)
    return buffer


def test_a_buffer_knows_its_resource_and_is_freed_once(resource: ooc.Resource) -> None:
    buffer = make(resource, 1)
    assert isinstance(resource, MemoryResource) and buffer.memory_resource is resource
    assert (buffer.size, buffer.device_id) == (QUARTER, -1)  # the emulated device is none of cuda.core's
    assert buffer.is_host_accessible and not buffer.is_device_accessible
    assert holds(int(buffer.handle), QUARTER, 1)
    buffer.close()
    assert resource.allocated_bytes == 0
    buffer.close()
    other = make(resource, 2)
    del other
    gc.collect()
    assert resource.allocated_bytes == 0


def test_pinned_then_swappable(resource: ooc.Resource) -> None:
    buffer = make(resource, 3)
    press(resource)
    assert holds(int(buffer.handle), QUARTER, 3) and moved(resource) == 0
    resource.swappable(buffer)
    press(resource)
    assert moved(resource) == QUARTER

    @resource.function(reads=["x"], stream="stream")
    def look(x: Buffer, stream: Any = None) -> bool:
        return holds(int(x.handle), QUARTER, 3)

    assert look(buffer)
    resource.step()
    resource.keep_resident(buffer)
    press(resource)
    assert holds(int(buffer.handle), QUARTER, 3)
    assert resource.summary()["demand_swap_in_count"] >= 1
    buffer.close()


def test_out_of_memory_is_a_memory_error_with_our_words(resource: ooc.Resource) -> None:
    kept = [make(resource, seed) for seed in range(4)]
    with pytest.raises(MemoryError, match="OOC_BUDGET="):
        resource.allocate(QUARTER)
    assert all(holds(int(buffer.handle), QUARTER, seed) for seed, buffer in enumerate(kept))


def test_size_0(resource: ooc.Resource) -> None:
    buffer = resource.allocate(0)
    assert int(buffer.handle) == 0 and buffer.size == 0
    buffer.close()


def test_buffers_outlive_the_resource(resource: ooc.Resource) -> None:
    buffer = make(resource, 4)
    core = resource._core
    resource.close()
    assert core.handle and holds(int(buffer.handle), QUARTER, 4)
    with pytest.raises(OocError, match="closed"):
        resource.allocate(100)
    buffer.close()
    assert not core.handle


def test_a_buffer_that_cannot_be_made_leaves_nothing(resource: ooc.Resource, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def from_handle(*_: Any, **__: Any) -> Buffer:
            raise RuntimeError("no context")

    monkeypatch.setattr(ooc, "Buffer", Broken)
    with pytest.raises(RuntimeError, match="no context"):
        resource.allocate(QUARTER)
    assert resource.allocated_bytes == 0
