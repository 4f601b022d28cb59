"""What CuPy, Numba and cuda.core share, driven directly: pins, declared functions, streams, the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from library_memory import KIB, MIB, QUARTER, SETTINGS, holds, moved, press, put

from ooc.allocator import Allocator, address_of, stream_of
from ooc_alloc import OocError, OutOfMemory
from swapd.config import ConfigError


class Array:
    """Something with device memory, as a library's array says it."""

    def __init__(self, memory: Allocator, size: int, seed: int, stream: Any = None) -> None:
        self.address = memory.allocate(size, stream)
        self.size = size
        self.seed = seed
        put(self.address, size, seed)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def intact(self) -> bool:
        return holds(self.address, self.size, self.seed)


@pytest.fixture(params=[False, True], ids=["waiting", "streams"])
def memory(request: pytest.FixtureRequest) -> Iterator[Allocator]:
    made = Allocator(**SETTINGS, asynchronous=request.param)
    yield made
    if not made.closed:
        made._core.audit()
    made.close()


def test_memory_is_pinned_until_it_is_declared_swappable(memory: Allocator) -> None:
    array = Array(memory, QUARTER, 1)
    press(memory)
    assert array.intact() and moved(memory) == 0
    memory.swappable(array)
    press(memory)
    assert moved(memory) == QUARTER

    @memory.function(reads=["x"])
    def intact(x: Array) -> bool:
        return x.intact()

    assert intact(array)
    memory.free(array.address)


def test_keep_resident_brings_it_back_for_good(memory: Allocator) -> None:
    array = Array(memory, QUARTER, 2)
    memory.swappable(array, array)
    press(memory)
    memory.keep_resident(array, array)
    assert array.intact()
    before = moved(memory)
    press(memory)
    assert array.intact() and moved(memory) == before
    memory.free(array.address)
    assert memory.memory_info() == (2 * MIB, 2 * MIB)


def test_more_than_the_budget_in_functions_and_a_plan(memory: Allocator) -> None:
    arrays = [Array(memory, QUARTER, seed) for seed in range(3)]
    memory.swappable(*arrays)
    for seed in range(3, 12):
        arrays.append(Array(memory, QUARTER, seed))
        memory.swappable(arrays[-1])

    @memory.function(reads="left", writes=("right",))
    def copy_next(left: Array, right: list[Array]) -> None:
        assert left.intact() and all(one.intact() for one in right)
        for one in right:
            one.seed += 1
            put(one.address, one.size, one.seed)

    for _ in range(4):
        for index in range(len(arrays)):
            copy_next(arrays[index - 1], [arrays[index]])
        memory.step()
    figures = memory.summary()
    assert figures["device_peak_bytes"] <= 2 * MIB and figures["steps"] == 4 and figures["plan_count"] >= 1
    assert {array.seed - index for index, array in enumerate(arrays)} == {4}
    for array in arrays:
        memory.free(array.address)


def test_a_function_that_does_not_fit_is_refused_and_the_next_one_runs(memory: Allocator) -> None:
    arrays = []
    for seed in range(5):
        arrays.append(Array(memory, QUARTER, seed))
        memory.swappable(arrays[-1])

    @memory.function(reads=["all_of_them"])
    def look(all_of_them: list[Array]) -> bool:
        return all(array.intact() for array in all_of_them)

    with pytest.raises(OutOfMemory, match=r"function look needs .* OOC_BUDGET="):
        look(arrays)
    assert look(arrays[:4]) and look(arrays[1:])
    for array in arrays:
        memory.free(array.address)


def test_pinned_memory_beyond_the_budget_is_refused(memory: Allocator) -> None:
    arrays = [Array(memory, QUARTER, seed) for seed in range(4)]
    with pytest.raises(OutOfMemory):
        memory.allocate(64 * KIB)
    assert memory.memory_info() == (0, 2 * MIB)
    memory.free(arrays[0].address)
    assert all(array.intact() for array in arrays[1:])
    assert memory.memory_info() == (QUARTER, 2 * MIB)
    again = memory.allocate(QUARTER)
    for address in (again, *(array.address for array in arrays[1:])):
        memory.free(address)


def test_small_arrays_take_memory_too(memory: Allocator) -> None:
    array = Array(memory, 100, 3)
    assert memory.memory_info() == (2 * MIB - 64 * KIB, 2 * MIB)  # a chunk
    memory.free(array.address)
    assert memory.memory_info() == (2 * MIB, 2 * MIB)


def test_size_0_and_frees_of_nothing(memory: Allocator) -> None:
    assert memory.allocate(0) == 0
    array = Array(memory, 100, 3)
    memory.free(0)
    memory.free(array.address + 8)
    assert array.intact() and memory.allocated_bytes == 100
    memory.free(array.address)
    memory.free(array.address)
    assert memory.allocated_bytes == 0


def test_memory_lives_on_after_close_and_then_the_device_is_given_back() -> None:
    memory = Allocator(**SETTINGS)
    array, other = Array(memory, QUARTER, 4), Array(memory, 100, 5)
    core = memory._core
    memory.close()
    memory.close()
    assert core.handle and array.intact() and other.intact()
    with pytest.raises(OocError, match="closed"):
        memory.allocate(100)
    with pytest.raises(OocError, match="closed"):
        memory.step()
    memory.free(array.address)
    assert core.handle and other.intact()
    memory.free(other.address)
    assert not core.handle
    memory.free(other.address)
    assert memory.memory_info()[0] == 0


def test_frees_come_from_any_thread(memory: Allocator) -> None:
    arrays = [Array(memory, 64 * KIB, seed) for seed in range(20)]
    threads = [
        threading.Thread(target=lambda mine=arrays[start::2]: [memory.free(array.address) for array in mine])
        for start in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.allocated_bytes == 0 and memory.memory_info()[0] == 2 * MIB


def test_every_wrong_use_has_its_words(memory: Allocator) -> None:
    array = Array(memory, QUARTER, 6)
    with pytest.raises(OocError, match="device 1"):
        memory.allocate(100, device_id=1)
    with pytest.raises(OocError, match="lies within one"):
        memory.swappable(array.address + 64)
    with pytest.raises(OocError, match="no allocation"):
        memory.keep_resident(12345)
    with pytest.raises(TypeError, match="a str has no device memory"):
        memory.swappable("text")
    with pytest.raises(ValueError, match="'y'"):
        memory.function(reads=["y"])(lambda x: None)
    with pytest.raises(ValueError, match="'s' as its stream"):
        memory.function(reads=["x"], stream="s")(lambda x: None)

    @memory.function(reads=["x"])
    def inner(x: Array) -> None:
        pass

    @memory.function(reads=["x"], name="outer")
    def outer(x: Array) -> None:
        inner(x)

    with pytest.raises(OocError, match="inner is called within another"):
        outer(array)
    inner(array)  # the failed one has ended
    with pytest.raises(TypeError):
        inner(3)
    memory.free(array.address)


def test_settings_are_those_of_everything_else() -> None:
    with pytest.raises(ConfigError, match="budget="):
        Allocator(alloc="emulated", budget="lots")
    with pytest.raises(OocError, match="alloc='off'"):
        Allocator(alloc="off")


class Handle:
    value = 77


@pytest.mark.parametrize(
    ("stream", "number"),
    [
        (None, 0),
        (5, 5),
        (type("CuPy", (), {"ptr": 9})(), 9),
        (type("Numba", (), {"handle": Handle()})(), 77),
        (type("NumbaDefault", (), {"handle": type("Null", (), {"value": None})()})(), 0),
        (type("Core", (), {"handle": 11})(), 11),
        (type("Protocol", (), {"__cuda_stream__": lambda self: (0, 13)})(), 13),
    ],
)
def test_streams_of_every_library(stream: Any, number: int) -> None:
    assert stream_of(stream) == number


def test_special_streams(memory: Allocator) -> None:
    """1 is the default stream. 2 is another one in each thread, and who waits for it may be a thread of ours."""
    array = Array(memory, QUARTER, 1, stream=1)
    with pytest.raises(OocError, match="handle 2"):
        memory.allocate(QUARTER, 2)
    memory.free(array.address, 2)
    assert memory.allocated_bytes == 0


def test_what_is_no_stream_and_no_array() -> None:
    with pytest.raises(TypeError, match="no CUDA stream"):
        stream_of("text")
    with pytest.raises(TypeError, match="no device memory"):
        address_of(object())
    assert address_of(type("Buffer", (), {"handle": 21, "size": 3})()) == 21
