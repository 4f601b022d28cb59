"""What the tests of CuPy, Numba and cuda.core share: the emulated device, whose memory the host can write."""

from __future__ import annotations

import ctypes
from typing import Any

from ooc.allocator import Allocator
from ooc_alloc import library_path

KIB, MIB = 1 << 10, 1 << 20
SETTINGS: dict[str, Any] = {"alloc": "emulated", "budget": "2MiB", "chunk_size": "64KiB", "small_limit": "4KiB"}
QUARTER = 512 * KIB  # four of these fill the budget


def wait() -> None:
    """The host reaches memory when the device has done its work, as a kernel on a stream would."""
    ctypes.CDLL(str(library_path("libooc_emulated_cuda.so"))).ooc_emulated_synchronize()


def put(address: int, size: int, seed: int) -> None:
    """Fills device memory with bytes made of a seed; it must be on the device."""
    wait()
    ctypes.memmove(address, pattern(size, seed), size)


def get(address: int, size: int) -> bytes:
    wait()
    return ctypes.string_at(address, size)


def pattern(size: int, seed: int) -> bytes:
    return bytes((seed * 31 + index * 7) % 251 for index in range(256)) * -(-size // 256)


def holds(address: int, size: int, seed: int) -> bool:
    return get(address, size) == pattern(size, seed)[:size]


def press(memory: Allocator) -> None:
    """Leaves nothing on the device that may leave it; what is there afterwards are other bytes."""
    core = memory._core
    core.function_begin(core.function_id("press"), ())
    room = (memory.budget_bytes - int(core.stats()["pinned_bytes"])) // (64 * KIB) - 1
    blocks = [core.malloc(64 * KIB) for _ in range(room)]
    wait()
    for block in blocks:
        ctypes.memset(block, 0xEE, 64 * KIB)
    core.function_end()
    for block in blocks:
        core.free(block)
    core.evict_all()
    core.release_cached()


def moved(memory: Allocator) -> int:
    """Bytes that left the device by a copy, so far."""
    return int(memory.summary()["swap_out_bytes"])
