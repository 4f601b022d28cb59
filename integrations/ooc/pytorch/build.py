"""Builds the adapter against the installed PyTorch, once, and keeps it in the user's cache.

It takes one compiler call. `torch.utils.cpp_extension` would do the same by way of setuptools and ninja, which PyTorch
itself does not need. `-DNDEBUG` is required: PyTorch's headers change layout without it. For a PyTorch that is
built for CUDA the part for CUDA devices is compiled too, against the headers that its own packages bring; no CUDA
toolkit and no GPU is needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import torch

import ooc_alloc
from swapd.ranks import local_rank

SOURCES = Path(__file__).parent / "csrc"
HEADERS = Path(ooc_alloc.__file__).parent / "csrc"
TOOLKITS = ("/usr/local/cuda-{}", "/usr/local/cuda")  # where toolkits usually are, by major version
_TIMEOUT_SECONDS = 900


class AdapterError(RuntimeError):
    """The adapter cannot be built or loaded; the message says what to install or set."""


def cache_directory() -> Path:
    """Where built adapters are kept: `$XDG_CACHE_HOME/ooc_alloc`, by default `~/.cache/ooc_alloc`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ooc_alloc"


def compiler() -> str:
    """The C++ compiler: `$CXX`, else g++, c++ or clang++. Raises AdapterError if there is none."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    raise AdapterError(
        f"no C++ compiler found ({asked or 'g++, c++, clang++'}): the PyTorch adapter is compiled at first use. "
        "Install one (Debian: apt-get install g++) or point CXX to it."
    )


def for_cuda() -> bool:
    """Whether the installed PyTorch is built for CUDA; the adapter is then built for CUDA too."""
    return torch.version.cuda is not None


def cuda_folders() -> tuple[list[Path], Path]:
    """The folders of the CUDA runtime's headers and the folder of its library, in the version PyTorch was built for.

    PyTorch's own packages bring them; a CUDA toolkit ($CUDA_HOME, /usr/local/cuda) serves too.

    Raises:
        AdapterError: the headers or the library are nowhere.
    """
    major = (torch.version.cuda or "").split(".")[0]
    roots = [folder for root in _package_folders("nvidia") for folder in (root / f"cu{major}", root / "cuda_runtime")]
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += [Path(place.format(major)) for place in TOOLKITS]
    # Since CUDA 13 the folder crt is in a package of its own; Triton, which PyTorch needs too, brings one as well.
    inner = [root / "include" for root in roots]
    inner += [folder / "backends" / "nvidia" / "include" for folder in _package_folders("triton")]
    crt = next((folder for folder in inner if (folder / "crt" / "host_defines.h").exists()), None)
    for root in roots:
        libraries = [folder for folder in (root / "lib", root / "lib64") if (folder / f"libcudart.so.{major}").exists()]
        if libraries and crt is not None and (root / "include" / "cuda_runtime_api.h").exists():
            return list(dict.fromkeys((root / "include", crt))), libraries[0]
    raise AdapterError(
        f"PyTorch is built for CUDA {torch.version.cuda}, but the headers and the library of the CUDA {major} runtime "
        f"are not there: pip install nvidia-cuda-runtime nvidia-cuda-crt (of version {major}), or point CUDA_HOME to a "
        f"CUDA {major} toolkit"
    )


def _package_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []


def command(target: Path) -> list[str]:
    """The compiler call that builds the adapter into `target`."""
    root = Path(torch.__file__).parent
    library = ooc_alloc.library_path()
    return [
        compiler(),
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        "-DNDEBUG",
        "-DAT_PER_OPERATOR_HEADERS",  # halves the compile time
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{HEADERS}",
        f"-isystem{root / 'include'}",
        f"-isystem{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        *(["-DOOC_WITH_DISTRIBUTED"] if torch.distributed.is_available() else ()),
        *(_cuda_flags() if for_cuda() else ()),
        "-xc++",
        *(word for path in _sources() for word in ("-include", str(path))),  # as one: PyTorch's headers are read once
        "/dev/null",
        "-xnone",
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        *(_cuda_libraries() if for_cuda() else ()),
        str(library),
        f"-Wl,-rpath,{library.parent}",
        "-Wl,-z,defs",  # a missing symbol fails now, not when the program runs
        "-o",
        str(target),
    ]


def _sources() -> list[Path]:
    return [path for path in sorted(SOURCES.glob("*.cpp")) if for_cuda() or not path.name.startswith("cuda_")]


def _cuda_flags() -> list[str]:
    # The header itself shows whether PyTorch has this: a version number says little of what had been merged by then.
    header = Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDACachingAllocator.h"
    rejection = ["-DOOC_HAS_OOM_REJECTION"] if "OomRejectionObserver" in header.read_text() else []
    includes = [flag for folder in cuda_folders()[0] for flag in ("-isystem", str(folder))]
    return ["-DOOC_WITH_CUDA", *rejection, *includes]


def _cuda_libraries() -> list[str]:
    folder = cuda_folders()[1]
    major = (torch.version.cuda or "").split(".")[0]
    return ["-lc10_cuda", "-ltorch_cuda", f"-L{folder}", f"-l:libcudart.so.{major}"]


def adapter_path() -> Path:
    """Where the adapter for this PyTorch, this source and this library is, or will be."""
    parts = (torch.__version__, torch.version.cuda, torch.__file__, ooc_alloc.library_path(), sys.platform)
    key = hashlib.sha256("\n".join(map(str, parts)).encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__), HEADERS / "ooc_alloc.h"):
        key.update(path.read_bytes())
    return cache_directory() / f"adapter-{key.hexdigest()[:20]}.so"


def build() -> Path:
    """Path of the adapter, which is built if it is not there yet. If many processes ask at once, one of them compiles.

    Raises:
        AdapterError: there is no compiler, the compiler failed (the message has its words), or the cache cannot be
            written.
    """
    path = adapter_path()
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "a+")  # noqa: SIM115
    except OSError as error:
        raise AdapterError(f"cannot write the adapter's cache {path.parent}: {error}; set XDG_CACHE_HOME") from error
    with lock:
        waited = _take(lock)
        if path.exists():
            return path
        lock.seek(0)
        if waited and (words := lock.read()):  # the other process failed, and this one would fail too
            raise AdapterError(words)
        lock.truncate(0)
        try:
            _compile(path)
        except AdapterError as error:
            lock.write(str(error))
            raise
    return path


def _take(lock: IO[str]) -> bool:
    """Waits until no other process compiles; returns whether one did."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        if local_rank() is None:  # among ranks, the one that compiles says so already
            _say("waiting for another process that is compiling the PyTorch adapter")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return True


def _say(text: str) -> None:
    print(f"ooc_alloc: {text}", file=sys.stderr, flush=True)


def _compile(path: Path) -> None:
    takes = "a minute" if for_cuda() else "half a minute"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / "adapter.so"
        words = command(target)
        _say(f"compiling the PyTorch adapter, which takes about {takes}, once for this PyTorch; kept in {path.parent}")
        try:
            result = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise AdapterError(f"the compiler could not be run: {error}") from error
        if result.returncode != 0 or not target.exists():
            reason = result.stderr[-4000:] or f"{compiler()} said nothing and made nothing"
            raise AdapterError(f"building the PyTorch adapter failed:\n{reason}")
        os.replace(target, path)


def load() -> None:
    """Builds the adapter if need be, and loads it: `torch.ops.ooc` is there afterwards. Raises AdapterError."""
    path = build()
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:  # a full disk cut the file short, or it is another machine's
        path.unlink(missing_ok=True)
        raise AdapterError(
            f"the PyTorch adapter cannot be loaded, and was removed so that the next start builds it anew: {error}"
        ) from error


if __name__ == "__main__":
    print(build())
