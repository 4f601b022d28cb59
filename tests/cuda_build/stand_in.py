"""Builds the stand-in for CUDA and its kernels, and runs programs with `device="cuda"` on them, without a GPU.

    python -m tests.cuda_build.stand_in [--seed N] [--budget 64MiB] script.py ARGUMENTS     (`make cuda-run`)

The program runs in an environment with a CUDA build of PyTorch. With a seed its streams' work comes late at random.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import ooc_alloc
from ooc.pytorch import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "stand_in"
NATIVE = ROOT / "ooc_alloc" / "csrc"
WARNINGS = ("-Wall", "-Wextra", "-Werror")


def stand_in() -> Path:
    """The library that is PyTorch's CUDA runtime, and by its other name the driver."""
    includes = [flag for path in build.cuda_folders()[0] for flag in ("-isystem", str(path))]
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", *WARNINGS, f"-I{NATIVE}", *includes]
    return _built("stand_in", [*flags, str(HERE / "stand_in.cpp"), str(NATIVE / "driver.cpp"), "-ldl"])


def computing() -> Path:
    """The library with the kernels."""
    words = build.command(Path("none"))
    flags = [word for word in words[1 : words.index("-xc++")] if word != "-DAT_PER_OPERATOR_HEADERS"]
    libraries = [word for word in words[words.index("-xnone") + 1 : words.index("-o")] if word != "-Wl,-z,defs"]
    return _built("computing", [*flags, "-g", *WARNINGS, str(HERE / "computing.cpp"), *libraries])


def _built(name: str, arguments: list[str]) -> Path:
    """The library, compiled if none of these sources and arguments is there."""
    key = hashlib.sha256("\n".join([build.compiler(), *arguments]).encode())
    for word in arguments:
        if word.endswith(".cpp"):
            key.update(Path(word).read_bytes())
    folder = BUILT / f"{name}-{key.hexdigest()[:16]}"
    library = folder / f"{name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = folder / f"{name}.part"
            done = subprocess.run(
                [build.compiler(), *arguments, "-o", str(part)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[-6000:]
            part.rename(library)
        for other in ("libcuda.so.1", "libnvidia-ml.so.1"):
            if not (folder / other).exists():
                (folder / other).symlink_to(library.name)
    return library


def delays(seed: int | None) -> str:
    """Fault rules by which the work of streams comes late at random, the same for the same seed."""
    if seed is None:
        return ""
    often = f"probability=0.2,seed={seed},delay=300us"
    seldom = f"probability=0.01,seed={seed + 1000},delay=5ms"
    calls = ("cuLaunchHostFunc", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuEventRecord")
    return ";".join(f"{call}:{how}" for call in calls for how in (seldom, often))


def environment(seed: int | None = None, **variables: str) -> dict[str, str]:
    """The variables with which a Python process has the stand-in as its CUDA device."""
    library = stand_in()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    paths = [str(ROOT), str(ROOT / "integrations"), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "OOC_TEST_EMULATED_DRIVER": str(ooc_alloc.library_path("libooc_emulated_cuda.so")),
        "OOC_EMULATED_MEMORY": "4GiB",
        "OOC_EMULATED_GRANULARITY": "64KiB",
        "OOC_EMULATED_FAULTS": delays(seed),
        "OMP_NUM_THREADS": "1",
        "OOC_PLANNING": "blocking",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **variables,
    }


def command(script: Path | str, *arguments: str) -> list[str]:
    """Runs a program on the kernels, with whatever `OOC_*` the environment says."""
    return [sys.executable, str(HERE / "program.py"), str(computing()), str(script), *arguments]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_build.stand_in", description=__doc__)
    parser.add_argument("--seed", type=int, help="of random delays of streams; without it nothing comes late")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script and its arguments")
    asked = parser.parse_args()
    given = {name: value for name, value in os.environ.items() if name.startswith("OOC_")}
    return subprocess.run(command(*asked.program), env={**environment(asked.seed), **given}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
