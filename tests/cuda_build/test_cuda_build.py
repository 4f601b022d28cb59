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
    words = [word for word in build.command(tmp_path / "none") if not word.endswith(".cpp")]
    flags = words[1 : words.index(f"-L{TORCH / 'lib'}")]
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


# ---- on the stand-in ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand_in")
    library = folder / "stand_in.so"
    includes = [flag for path in build.cuda_folders()[0] for flag in ("-isystem", str(path))]
    native = ROOT / "ooc_alloc" / "csrc"
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{native}"]
    sources = [str(HERE / "stand_in.cpp"), str(native / "driver.cpp")]
    command = [build.compiler(), *flags, *includes, *sources, "-ldl", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    (folder / "libcuda.so.1").symlink_to(library.name)
    return library


@pytest.mark.parametrize("name", checks())
def test_on_the_stand_in(name: str, adapter: Path, stand_in: Path) -> None:
    done = run(
        [str(HERE / "checks.py"), name],
        LD_PRELOAD=str(stand_in),
        LD_LIBRARY_PATH=str(stand_in.parent),
        OOC_TEST_EMULATED_DRIVER=str(ooc_alloc.library_path("libooc_emulated_cuda.so")),
        OOC_EMULATED_MEMORY="1GiB",
        OOC_EMULATED_GRANULARITY="2MiB",  # a GPU's, which the session counts on
        OOC_CHECK_UNIT=str(4 << 20),
        PYTHONFAULTHANDLER="1",
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.endswith("done\n")
    assert "ended the capture" not in done.stderr, done.stderr[-3000:]
