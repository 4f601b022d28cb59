"""The core's Python wrapper where functions use parts of variables, or host memory in place of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from ooc_alloc import READ, WRITE, Core, OutOfMemory, library_path

CHUNK = 64 << 10


@pytest.fixture
def core() -> Iterator[Core]:
    made = Core(
        str(library_path("libooc_emulated_cuda.so")),
        budget_bytes=4 * CHUNK,
        host_budget_bytes=64 * CHUNK,
        chunk_bytes=CHUNK,
        small_limit_bytes=1024,
        run_daemon=False,
    )
    yield made
    made.audit()
    assert made.stats()["device_peak_bytes"] <= 4 * CHUNK
    made.close()


def fill(core: Core, address: int, chunks: int) -> None:
    for chunk in range(chunks):
        core.function_begin(core.function_id("fill"), [(address + chunk * CHUNK, WRITE, CHUNK)])
        ctypes.memset(address + chunk * CHUNK, chunk + 1, CHUNK)
        core.function_end()


def test_a_variable_of_three_budgets_is_used_in_ranges_and_recorded_so(core: Core) -> None:
    address = core.malloc_absent(12 * CHUNK)
    assert core.stats()["device_bytes"] == 0
    core.boundary()
    fill(core, address, 12)
    core.function_begin(core.function_id("read"), [(address + CHUNK, READ, 3 * CHUNK), (address + 6 * CHUNK, READ, 1)])
    assert ctypes.string_at(address + CHUNK, 3 * CHUNK) == b"".join(bytes([value]) * CHUNK for value in (2, 3, 4))
    assert core.residency(address, 12).tolist() == [1 <= chunk < 4 or chunk == 6 for chunk in range(12)]
    core.function_end()
    core.function_begin(core.function_id("make"), [])
    core.malloc(2 * CHUNK - 1)
    core.function_end()
    arrays = core.trace_arrays(core.boundary())
    assert arrays.use_first_chunk.tolist() == [*range(12), 1, 6, 0]
    assert arrays.use_chunk_count.tolist() == [1] * 12 + [3, 1, 2]
    assert arrays.use_function.tolist() == [*range(12), 12, 12, 13]
    assert arrays.use_access.tolist() == [WRITE] * 12 + [READ, READ, WRITE]


def test_what_fits_nowhere_runs_on_host_memory(core: Core) -> None:
    address = core.malloc_absent(12 * CHUNK)
    fill(core, address, 12)
    identifier = core.function_id("large")
    with pytest.raises(OutOfMemory, match=f"function large needs {12 * CHUNK} bytes"):
        core.function_begin(identifier, [(address, READ)])
    core.function_begin_host(identifier, [(address, READ | WRITE)])
    assert ctypes.string_at(address, 12 * CHUNK) == b"".join(bytes([chunk + 1]) * CHUNK for chunk in range(12))
    ctypes.memset(address, 99, 12 * CHUNK)
    core.function_end()
    core.function_begin(core.function_id("read"), [(address + 7 * CHUNK, READ, 4 * CHUNK)])
    assert ctypes.string_at(address + 7 * CHUNK, 4 * CHUNK) == b"c" * (4 * CHUNK)
    core.function_end()
    assert core.stats()["host_backed_function_count"] == 1


def test_measuring_can_be_turned_off(core: Core) -> None:
    core.set_measuring(False)
    core.function_begin(core.function_id("f"), [])
    with pytest.raises(OutOfMemory, match="function f needs"):
        core.malloc(5 * CHUNK)
    core.function_end()
    core.set_measuring(True)
    core.function_begin(core.function_id("f"), [])
    core.free(core.malloc(5 * CHUNK))
    with pytest.raises(OutOfMemory, match="function f needs"):
        core.function_end()
