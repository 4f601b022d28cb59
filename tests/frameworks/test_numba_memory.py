"""Numba's own objects on the allocator's memory. Without a GPU no kernel runs: memory is written by the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed (the extra `numba`)")

from library_memory import MIB, QUARTER, SETTINGS, holds, moved, press, put
from numba import cuda
from numba.cuda.cudadrv import driver

import ooc.numba as ooc
from ooc_alloc import OocError

ROOT = Path(__file__).resolve().parents[2]


if not hasattr(driver, "_logger"):
    driver._logger = driver.make_logger()  # as Numba does when it finds a driver


class Context:
    """What a manager and its pointers need of Numba's context, which needs a device."""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(driver, "_memory_manager", None)
    memory = ooc.install(**SETTINGS)
    assert driver._memory_manager is ooc.Manager
    context = Context()
    made = ooc.Manager(context=context)
    made.initialize()
    yield made
    made.deallocations.clear()
    memory.close()
    monkeypatch.setattr(ooc, "_memory", None)


def address(pointer: Any) -> int:
    return int(pointer.device_pointer_value or 0)


def test_memory_is_freed_with_its_pointer_and_the_views_of_it(manager: Any) -> None:
    memory = ooc.installed()
    pointer = manager.memalloc(QUARTER)
    put(address(pointer), QUARTER, 1)
    view = pointer.view(4096)
    del pointer
    manager.deallocations.clear()
    assert memory.allocated_bytes == QUARTER and holds(address(view) - 4096, QUARTER, 1)
    del view
    manager.deallocations.clear()
    assert memory.allocated_bytes == 0


def test_frees_are_collected_and_deferred(manager: Any) -> None:
    memory = ooc.installed()
    with manager.defer_cleanup():
        for _ in range(3):
            manager.memalloc(QUARTER)
        manager.deallocations.clear()
        assert memory.allocated_bytes == 3 * QUARTER
    manager.deallocations.clear()
    assert memory.allocated_bytes == 0


def test_what_waits_to_be_freed_is_freed_when_memory_is_short(manager: Any) -> None:
    kept = [manager.memalloc(QUARTER) for _ in range(3)]
    manager.deallocations.memory_capacity = 1 << 40  # so that it waits
    manager.memalloc(QUARTER)
    assert ooc.installed().allocated_bytes == 4 * QUARTER
    last = manager.memalloc(QUARTER)
    put(address(last), QUARTER, 9)
    assert ooc.installed().allocated_bytes == 4 * QUARTER and len(kept) == 3


def test_out_of_memory_is_numbas_own_error_with_our_words(manager: Any) -> None:
    kept = [manager.memalloc(QUARTER) for _ in range(4)]
    with pytest.raises(driver.CudaAPIError, match=r"\[2\] out of memory: .*OOC_BUDGET="):
        manager.memalloc(QUARTER)
    assert manager.get_memory_info() == cuda.MemoryInfo(free=0, total=2 * MIB)
    assert len(kept) == 4


def test_size_0(manager: Any) -> None:
    pointer = manager.memalloc(0)
    assert address(pointer) == 0 and pointer.size == 0
    del pointer
    manager.deallocations.clear()


def test_pinned_then_swappable(manager: Any) -> None:
    memory = ooc.installed()
    pointer = manager.memalloc(QUARTER)
    put(address(pointer), QUARTER, 4)
    press(memory)
    assert holds(address(pointer), QUARTER, 4) and moved(memory) == 0
    memory.swappable(address(pointer))
    press(memory)
    assert moved(memory) == QUARTER

    class Array:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"data": (address(pointer), False)}

    @memory.function(reads=["x"])
    def look(x: Any) -> bool:
        return holds(address(pointer), QUARTER, 4)

    assert look(Array())


def test_memory_outlives_the_manager_and_reset(manager: Any) -> None:
    memory = ooc.installed()
    pointer = manager.memalloc(QUARTER)
    put(address(pointer), QUARTER, 5)
    manager.memalloc(QUARTER)
    manager.reset()
    assert memory.allocated_bytes == QUARTER and holds(address(pointer), QUARTER, 5)
    memory.close()
    assert holds(address(pointer), QUARTER, 5)
    del pointer
    manager.deallocations.clear()
    assert not memory._core.handle


def test_ipc_is_refused_and_a_second_installation_too(manager: Any) -> None:
    with pytest.raises(OocError, match="IPC handle"):
        manager.get_ipc_handle(manager.memalloc(100))
    with pytest.raises(OocError, match="installed already"):
        ooc.install(**SETTINGS)
    assert manager.interface_version == 1


def test_numba_finds_the_plugin_by_its_variable() -> None:
    text = (
        "from numba.cuda.cudadrv import driver\n"
        "driver._ensure_memory_manager()\n"
        "manager = driver._memory_manager(context=None)\n"
        "print(type(manager).__module__, manager.get_memory_info().total)"
    )
    variables = {"NUMBA_CUDA_MEMORY_MANAGER": "ooc.numba", "OOC_BUDGET": "3MiB", "OOC_ALLOC": "emulated"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ooc.numba", str(3 * MIB)]
