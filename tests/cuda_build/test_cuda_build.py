"""The adapter against a CUDA build of PyTorch, on a machine without a GPU (`make check-cuda-build`).

It compiles without warnings, all its symbols resolve, it fills every function of PyTorch's allocator, and without a
GPU it says so. What PyTorch's functions for CUDA memory then do is run on a stand-in for the CUDA runtime
(stand_in.cpp), which has no kernels: nothing here ran on a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ooc_alloc
from ooc.pytorch import build
from tests.cuda_build import stand_in

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECKOUT = f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"  # on PYTHONPATH
TORCH = Path(torch.__file__).parent
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
TIMEOUT_SECONDS = 300

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built for the CPU alone")


@pytest.fixture(scope="session")
def adapter() -> Path:
    return build.build()


def checks() -> list[str]:
    text = (HERE / "checks.py").read_text()
    bodies = re.findall(r"^def (\w+)\(\) -> None:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    return [name for name, body in bodies if re.search(r"^    (start\(|torch\.cuda\.init\(\))", body, re.MULTILINE)]


# ---- building -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", sorted(path.name for path in build.SOURCES.glob("*.cpp")))
def test_compiles_without_warnings(source: str, tmp_path: Path) -> None:
    words = build.command(tmp_path / "none")
    flags = words[1 : words.index("-xc++")]
    command = [words[0], *flags, "-fsyntax-only", *WARNINGS, str(build.SOURCES / source)]
    done = subprocess.run([word for word in command if word != "-shared"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def test_every_symbol_resolves(adapter: Path) -> None:
    folders = [TORCH / "lib", build.cuda_folders()[1], *TORCH.parent.glob("nvidia/*/lib")]
    variables = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders))}
    done = subprocess.run(["ldd", "-r", str(adapter)], env=variables, capture_output=True, text=True, check=True)
    assert "libtorch_cuda.so" in done.stdout
    assert not [line for line in (done.stdout + done.stderr).splitlines() if "undefined" in line or "not found" in line]


def virtual_functions() -> set[str]:
    """Names of the functions that an allocator for CUDA may define, from PyTorch's headers."""
    names = set()
    for header, kind in (
        ("cuda/CUDACachingAllocator.h", "CUDAAllocator"),
        ("core/CachingDeviceAllocator.h", "DeviceAllocator"),
    ):
        text = (TORCH / "include" / "c10" / header).read_text()
        body = re.search(rf"(?:class|struct)(?: C10_API)? {kind} : public .*?\n}};", text, re.DOTALL)
        assert body is not None, f"{header} has no {kind}"
        names |= set(re.findall(r"virtual [^;{()]*?(\w+)\(", body.group(0)))
    return names


def test_every_function_is_filled(adapter: Path) -> None:
    done = subprocess.run(["nm", "-C", str(adapter)], capture_output=True, text=True, check=True)
    ours = set(re.findall(r" [tT] ooc_torch::CudaAllocator::(\w+)(?:\[abi:\w+\])?\(", done.stdout))
    names = virtual_functions()
    assert len(names) > 35 and "checkPoolLiveAllocations" in names and "cacheInfo" in names
    assert names - ours == set()


# ---- without a GPU --------------------------------------------------------------------------------------------------


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    kept["OOC_PLANNING"] = "blocking"
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**kept, "PYTHONPATH": CHECKOUT, **variables}, capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip


WITHOUT = """
import torch, ooc.pytorch as ooc
try:
    ooc.enable(alloc={alloc!r}, budget="16MiB", chunk_size="64KiB")
except Exception as error:
    print(type(error).__name__, error)
else:
    x = torch.randn(4, 1 << 18)
    print(ooc.summary()["device"], ooc.summary()["live_peak_bytes"] >= 4 << 20, torch.equal(x.clone(), x))
"""


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu(adapter: Path) -> None:
    asked = run(["-c", WITHOUT.format(alloc="cuda")])
    assert asked.stdout.startswith("OocError OOC_ALLOC=cuda: there is no CUDA device"), asked.stderr
    assert run(["-c", WITHOUT.format(alloc="auto")]).stdout == "emulated True True\n"


PYTHON_KEY = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import ooc.pytorch as ooc
ooc.enable(alloc="emulated", budget="16MiB", chunk_size="64KiB", small_limit=1, policy="demand")
core = ooc._active().core

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        core.evict_all()
        before = core.stats()["functions"]
        result = function(*arguments, **(keywords or {}))
        print(function, core.stats()["functions"] - before)
        return result

class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        inner = [each.inner if isinstance(each, cls) else each for each in arguments]
        core.evict_all()
        return function(*inner, **(keywords or {}))

x = torch.arange(1 << 18, dtype=torch.float32)
with Mode():
    y = x.sin().mul_(2)
wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, x.shape, dtype=x.dtype)
wrapped.inner = x
z = wrapped.cos()
torch.zeros(1).add_(1)
core.evict_all()
print(torch.equal(y, x.sin() * 2), torch.equal(z, x.cos()))
"""


def test_modes_and_subclasses_of_python_call_functions(adapter: Path) -> None:
    done = run(["-c", PYTHON_KEY])
    assert done.stdout == "aten.sin.default 1\naten.mul_.Tensor 1\nTrue True\n", f"{done.stdout}\n{done.stderr[-3000:]}"


# ---- on the stand-in ------------------------------------------------------------------------------------------------


AT_START = """
import ctypes, os, threading
import torch
from ooc_alloc.autoload import activate
activate()
emulated = ctypes.CDLL(os.environ["OOC_TEST_EMULATED_DRIVER"])
def calls():
    names = (b"cuInit", b"cuDeviceGetCount", b"cuDevicePrimaryCtxRetain", b"cuMemCreate")
    return sum(map(emulated.ooc_emulated_call_count, names))
import ooc
print(ooc.enabled(), calls(), torch.cuda.is_initialized(), flush=True)
if os.fork() == 0:
    waiting = torch._C._is_multithreading_enabled()
    ooc.disable()
    print(waiting, torch._C._is_multithreading_enabled(), ooc.enabled(), flush=True)
    os._exit(0)
os.wait()

def use(seed):
    numbers = [torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed + n)) for n in range(12)]
    tensors = [each.cuda() for each in numbers]
    assert all(torch.equal(each.cpu(), right) for each, right in zip(tensors, numbers))
    figures = ooc.summary()
    assert figures["device_peak_bytes"] <= figures["budget_bytes"] == 32 << 20 and figures["swap_out_bytes"] > 0

for _ in range(2):
    child = os.fork()
    if child == 0:
        use(7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(calls(), torch.cuda.is_initialized(), flush=True)
thread = threading.Thread(target=use, args=(3,))
thread.start()
thread.join()
use(5)  # in a thread that was there before
print(calls() > 0, "done")
"""


def test_import_torch_makes_no_driver_call_and_forked_children_use_cuda(adapter: Path) -> None:
    library = stand_in.stand_in()
    done = run(
        ["-c", AT_START],
        LD_PRELOAD=str(library),
        LD_LIBRARY_PATH=str(library.parent),
        OOC_TEST_EMULATED_DRIVER=str(ooc_alloc.library_path("libooc_emulated_cuda.so")),
        OOC_ALLOC="1",
        OOC_BUDGET="32MiB",
        OOC_CHUNK_SIZE="2MiB",
    )
    expected = ["True 0 False", "False True False", "0 False", "True done"]
    assert done.stdout.splitlines() == expected, f"{done.stdout[-1000:]}\n{done.stderr[-5000:]}"


@pytest.mark.parametrize("name", checks())
def test_on_the_stand_in(name: str, adapter: Path) -> None:
    library = stand_in.stand_in()
    done = run(
        [str(HERE / "checks.py"), name],
        LD_PRELOAD=str(library),
        LD_LIBRARY_PATH=str(library.parent),
        OOC_TEST_EMULATED_DRIVER=str(ooc_alloc.library_path("libooc_emulated_cuda.so")),
        OOC_EMULATED_MEMORY="1GiB",
        OOC_EMULATED_GRANULARITY="2MiB",  # a GPU's, which the session counts on
        OOC_CHECK_UNIT=str(4 << 20),
        PYTHONFAULTHANDLER="1",
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.endswith("done\n")
    assert "ended the capture" not in done.stderr, done.stderr[-3000:]
