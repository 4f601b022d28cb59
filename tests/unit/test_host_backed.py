"""OOC_HOST_BACKED: an access that no function announced is slow and right; without the option it is a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import ooc.numpy as ooc

PROGRAM = """
    import ctypes, sys
    from ooc_alloc import READ, WRITE, Core, library_path

    CHUNK = 64 << 10
    core = Core(
        str(library_path("libooc_emulated_cuda.so")), budget_bytes=8 * CHUNK, host_budget_bytes=64 * CHUNK,
        chunk_bytes=CHUNK, small_limit_bytes=1024, host_backed=sys.argv[1] == "1", asynchronous=sys.argv[2] == "1",
    )
    core.function_begin(core.function_id("make"), ())
    address = core.malloc(3 * CHUNK)
    ctypes.memset(address, 42, 3 * CHUNK)
    core.function_end()
    core.function_begin(core.function_id("nothing"), ())
    core.function_end()
    core.evict_all()
    core.release_cached()
    assert core.stats()["device_bytes"] == 0 and core.stats()["swap_out_bytes"] == 3 * CHUNK
    print("swapped", flush=True)
    assert ctypes.string_at(address, 3 * CHUNK) == bytes([42]) * (3 * CHUNK)
    ctypes.memset(address + CHUNK, 43, CHUNK)
    assert core.stats()["device_bytes"] == 0
    core.function_begin(core.function_id("read"), [(address, READ)])
    assert ctypes.string_at(address, 3 * CHUNK) == b"*" * CHUNK + b"+" * CHUNK + b"*" * CHUNK
    assert core.stats()["resident_bytes"] == 3 * CHUNK
    core.function_end()
    core.audit()
    core.close()
    print("right", flush=True)
"""


def run(host_backed: str, asynchronous: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), host_backed, asynchronous],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("asynchronous", ["0", "1"])
def test_with_the_option_the_bytes_are_found(asynchronous: str) -> None:
    done = run("1", asynchronous)
    assert done.returncode == 0 and done.stdout.split() == ["swapped", "right"], done.stderr


def test_plans_move_host_backed_memory_too() -> None:
    """Four times oversubscribed, by the daemon's threads; the bits are those of plain NumPy."""
    settings = {"alloc": "emulated", "budget": "1MiB", "chunk_size": "64KiB", "small_limit": "4KiB"}
    hosts = [np.random.default_rng(seed).random((128, 128)) for seed in range(32)]
    with ooc.Device(**settings, host_backed=True) as device:
        arrays = [device.array(host) for host in hosts]

        @device.function(reads=["left"], writes=["target"])
        def add(target: np.ndarray, left: np.ndarray) -> None:
            target += np.sqrt(left)

        for _ in range(6):
            for index in range(len(arrays)):
                add(arrays[index], arrays[index - 5])
                hosts[index] += np.sqrt(hosts[index - 5])
            device.step()
        figures = device.summary()
        for array, host in zip(arrays, hosts, strict=True):
            assert array.to_numpy().tobytes() == host.tobytes()
    assert figures["planned_iteration_count"] >= 2 and figures["device_peak_bytes"] <= 1 << 20
    assert figures["external_fragmentation_ratio"] == 0  # the audit agrees


def test_without_it_the_access_is_a_fault() -> None:
    done = run("0", "0")
    assert done.returncode == -signal.SIGSEGV and done.stdout.split() == ["swapped"], done.stderr
