"""CuPy, Numba and cuda.core with real kernels and copies on swappable memory, at twice the budget. Needs a GPU.

Each runs in a process of its own: a library decides once where its memory comes from.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu

SETTINGS = 'alloc="cuda", budget="64MiB", chunk_size="2MiB"'
COUNT, ELEMENTS = 16, 1 << 20  # of 8 bytes

CUPY = f"""
import cupy
import numpy as np
import ooc.cupy as ooc

with ooc.Memory({SETTINGS}) as memory:
    arrays = []
    for index in range({COUNT}):
        arrays.append(cupy.full(({ELEMENTS},), index, dtype=np.float64))
        memory.swappable(arrays[-1])

    @memory.function(reads=["left"], writes=["right"])
    def add(left, right):
        right += left

    @memory.function(reads=["array"])
    def fetch(array):
        return cupy.asnumpy(array)

    expected = [np.full(({ELEMENTS},), index, dtype=np.float64) for index in range({COUNT})]
    for _ in range(5):
        for index in range({COUNT}):
            add(arrays[index - 1], arrays[index])
            expected[index] += expected[index - 1]
        memory.step()
    assert all((fetch(array) == values).all() for array, values in zip(arrays, expected))
    check(memory.summary())
"""

NUMBA = f"""
import numpy as np
import ooc.numba as ooc

memory = ooc.install({SETTINGS})
from numba import cuda

@cuda.jit
def kernel(left, right):
    index = cuda.grid(1)
    if index < right.size:
        right[index] += left[index]

arrays = []
for index in range({COUNT}):
    arrays.append(cuda.to_device(np.full(({ELEMENTS},), index, dtype=np.float64)))
    memory.swappable(arrays[-1])

@memory.function(reads=["left"], writes=["right"])
def add(left, right):
    kernel[{ELEMENTS} // 256, 256](left, right)

@memory.function(reads=["array"])
def fetch(array):
    return array.copy_to_host()

expected = [np.full(({ELEMENTS},), index, dtype=np.float64) for index in range({COUNT})]
for _ in range(5):
    for index in range({COUNT}):
        add(arrays[index - 1], arrays[index])
        expected[index] += expected[index - 1]
    memory.step()
assert all((fetch(array) == values).all() for array, values in zip(arrays, expected))
check(memory.summary())
"""

CUDA_CORE = f"""
from cuda.core import Device
import ooc.cuda_core as ooc

device = Device()
device.set_current()
stream = device.create_stream()
memory = ooc.Resource({SETTINGS})
BYTES = 8 * {ELEMENTS}
buffers = []
for index in range({COUNT}):
    buffers.append(memory.allocate(BYTES, stream=stream))
    buffers[-1].fill(index, stream=stream)
    memory.swappable(buffers[-1])

@memory.function(reads=["source"], writes=["target"], stream="stream")
def copy(source, target, stream):
    source.copy_to(target, stream=stream)

values = list(range({COUNT}))
for _ in range(5):
    for index in range({COUNT}):
        copy(buffers[index - 3], buffers[index], stream)
        values[index] = values[index - 3]
    memory.step()

from cuda.bindings import driver
import numpy as np

@memory.function(reads=["source"], stream="stream")
def fetch(source, stream):
    host = np.empty(BYTES, dtype=np.uint8)
    stream.sync()
    assert driver.cuMemcpyDtoH(host.ctypes.data, int(source.handle), BYTES)[0] == driver.CUresult.CUDA_SUCCESS
    return host

assert all((fetch(buffer, stream) == value).all() for buffer, value in zip(buffers, values))
check(memory.summary())
"""

CHECK = """
def check(figures):
    assert figures["device_peak_bytes"] <= figures["budget_bytes"] == 64 << 20, figures
    assert figures["swap_out_bytes"] > 0 and figures["swap_in_bytes"] > 0, figures
    assert figures["external_fragmentation_ratio"] == 0, figures
    print("right")
"""


@pytest.mark.parametrize(
    ("library", "program"), [("cupy", CUPY), ("numba.cuda", NUMBA), ("cuda.core", CUDA_CORE)], ids=lambda text: text[:9]
)
def test_twice_the_budget(library: str, program: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("no NVIDIA GPU")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHECK) + program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
