"""The plain pair as another program sees it: two C functions, and a core made from the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EMULATED = {"OOC_ALLOC": "emulated", "OOC_EMULATED_MEMORY": "64MiB", "OOC_CHUNK_SIZE": "64KiB"}

# What a program in C would do; it knows nothing of our Python.
PROGRAM = """
    import ctypes, sys, threading
    library = ctypes.CDLL(sys.argv[1])
    library.ooc_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.ooc_malloc.restype = ctypes.c_void_p
    library.ooc_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.ooc_free.restype = None
    library.ooc_last_error.restype = ctypes.c_char_p
    MIB = 1 << 20

    def malloc(size, device=0):
        return library.ooc_malloc(size, device, None)

    def free(address, size=0, device=0):
        library.ooc_free(address, size, device, None)

    def error():
        return library.ooc_last_error().decode()
"""


def run(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")} | variables
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(source)
    library = ROOT / "ooc_alloc" / "lib" / "libooc_alloc.so"
    return subprocess.run(
        [sys.executable, "-c", text, str(library)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_core_is_made_on_first_use_and_keeps_to_the_budget() -> None:
    done = run(
        """
        blocks = [malloc(2 * MIB) for _ in range(4)]
        assert all(blocks) and len(set(blocks)) == 4
        for index, block in enumerate(blocks):
            ctypes.memset(block, index + 1, 2 * MIB)
        assert malloc(MIB + 1) is None
        print(error())
        for index, block in enumerate(blocks):
            assert ctypes.string_at(block, 2 * MIB) == bytes([index + 1]) * (2 * MIB)
            free(block, 2 * MIB)
        assert malloc(8 * MIB)
        """,
        OOC_BUDGET="8MiB",
        OOC_SMALL_LIMIT="64KiB",
        **EMULATED,
    )
    assert done.returncode == 0, done.stderr
    assert "the budget is 8388608 bytes" in done.stdout and "OOC_BUDGET=" in done.stdout
    assert done.stderr.count("ooc_malloc:") == 1, "said, and once"


def test_a_share_of_the_device_is_a_budget() -> None:
    done = run(
        """
        assert malloc(32 * MIB) and malloc(MIB) is None
        """,
        OOC_BUDGET="50%",
        OOC_SMALL_LIMIT="64KiB",
        **EMULATED,
    )
    assert done.returncode == 0, done.stderr


def test_size_0_null_and_unknown_addresses() -> None:
    done = run(
        """
        free(None)                       # before there is a core
        assert malloc(0) is None
        keep = malloc(100)
        assert keep and keep % 512 == 0
        ctypes.memset(keep, 7, 100)
        free(None)
        free(12345 << 12, 1)
        free(keep + 1, 99)
        assert ctypes.string_at(keep, 100) == bytes([7]) * 100
        free(keep, 100)
        free(keep, 100)
        assert malloc(-5) is None and "-5 bytes" in error()
        assert malloc(100, device=1) is None and "device 1" in error()
        """,
        OOC_BUDGET="8MiB",
        **EMULATED,
    )
    assert done.returncode == 0, done.stderr


def test_two_threads() -> None:
    done = run(
        """
        def work(number):
            for turn in range(200):
                size = (1 + (turn + number) % 5) * 300_000
                block = malloc(size)
                assert block
                ctypes.memset(block, number, size)
                assert ctypes.string_at(block, size) == bytes([number]) * size
                free(block, size)
            done.append(number)

        done = []
        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert sorted(done) == [1, 2]
        """,
        OOC_BUDGET="8MiB",
        **EMULATED,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OOC_BUDGET": "lots"}, "OOC_BUDGET='lots' is not valid"),
        ({"OOC_BUDGET": "0%"}, "OOC_BUDGET='0%' is not valid"),
        ({"OOC_BUDGET": "1TiB"}, "more than the device has"),
        ({"OOC_CHUNK_SIZE": "2 MiBs"}, "OOC_CHUNK_SIZE='2 MiBs' is not valid"),
        ({"OOC_SMALL_LIMIT": "-1"}, "OOC_SMALL_LIMIT='-1' is not valid"),
        ({"OOC_ALLOC": "gpu"}, "OOC_ALLOC='gpu' is not valid"),
        ({"OOC_ALLOC": "0"}, "OOC_ALLOC=0 turns the allocator off"),
        ({"OOC_EMULATED_MEMORY": "some"}, "OOC_EMULATED_MEMORY"),
    ],
)
def test_bad_values_give_null_and_are_said_once(variables: dict[str, str], words: str) -> None:
    done = run("assert malloc(100) is None and malloc(200) is None\nprint(error())", **{**EMULATED, **variables})
    assert done.returncode == 0, done.stderr
    assert words in done.stderr and done.stdout.strip() in done.stderr
    assert done.stderr.count("ooc_malloc:") == 1


def test_without_a_cuda_driver_the_reason_is_said() -> None:
    done = run(
        """
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            assert malloc(100) is None and "libcuda.so.1" in error(), error()
        else:
            block = malloc(100)
            assert block, error()
            free(block, 100)
        """,
        OOC_BUDGET="64MiB",
    )
    assert done.returncode == 0, done.stderr


def test_torch_finds_the_pair_by_name() -> None:
    """`CUDAPluggableAllocator` takes a file and two names; a PyTorch without CUDA has only the look-up."""
    done = run("for name in ('ooc_malloc', 'ooc_free', 'ooc_set_default_core'): assert hasattr(library, name)")
    assert done.returncode == 0, done.stderr
