"""Swapped data that a program touches in no function: the access is a fault, and never finds other bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

PROGRAM = """
    import ctypes
    from ooc_alloc import Core, library_path

    CHUNK = 64 << 10
    core = Core(
        str(library_path("libooc_emulated_cuda.so")), budget_bytes=8 * CHUNK, host_budget_bytes=64 * CHUNK,
        chunk_bytes=CHUNK, small_limit_bytes=1024,
    )
    core.function_begin(core.function_id("make"), ())
    address = core.malloc(3 * CHUNK)
    ctypes.memset(address, 42, 3 * CHUNK)
    core.function_end()
    core.function_begin(core.function_id("nothing"), ())
    core.function_end()
    core.evict_all()
    assert core.stats()["swap_out_bytes"] == 3 * CHUNK
    print("swapped", flush=True)
    ctypes.string_at(address, 3 * CHUNK)
    print("read", flush=True)
"""


def test_the_access_is_a_fault() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGSEGV and done.stdout.split() == ["swapped"], done.stderr
