"""Builds the adapter against the installed PyTorch, once, and keeps it in the user's cache.

One C++ file and one compiler call: `torch.utils.cpp_extension` would do the same by way of setuptools and ninja, which
an installed PyTorch does not need to have. `-DNDEBUG` is required: PyTorch's headers change layout without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import ooc_alloc

log = logging.getLogger("ooc.pytorch")

SOURCE = Path(__file__).parent / "csrc" / "adapter.cpp"
_TIMEOUT_SECONDS = 900


class AdapterError(RuntimeError):
    """The adapter cannot be built or loaded; the message says what to install or set."""


def cache_directory() -> Path:
    """Where built adapters are kept: `$XDG_CACHE_HOME/ooc_alloc`, by default `~/.cache/ooc_alloc`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ooc_alloc"


def _header() -> Path:
    return Path(ooc_alloc.__file__).parent / "csrc"


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
        "-DAT_PER_OPERATOR_HEADERS",  # half the compile time
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{_header()}",
        f"-I{root / 'include'}",
        f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCE),
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        str(library),
        f"-Wl,-rpath,{library.parent}",
        "-o",
        str(target),
    ]


def adapter_path() -> Path:
    """Where the adapter for this PyTorch, this source and this library is, or will be."""
    key = hashlib.sha256()
    for part in (torch.__version__, str(torch.__file__), str(ooc_alloc.library_path()), sys.platform):
        key.update(part.encode())
    key.update(SOURCE.read_bytes())
    key.update((_header() / "ooc_alloc.h").read_bytes())
    return cache_directory() / f"adapter-{key.hexdigest()[:20]}.so"


def build() -> Path:
    """Path of the adapter, built if it is not there yet. Safe in many processes at once.

    Raises:
        AdapterError: no compiler, or it failed (its words are in the message), or the cache cannot be written.
    """
    path = adapter_path()
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115
    except OSError as error:
        raise AdapterError(f"cannot write the adapter's cache {path.parent}: {error}; set XDG_CACHE_HOME") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        log.info("building the PyTorch adapter (once for this PyTorch)")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            target = Path(folder) / "adapter.so"
            try:
                result = subprocess.run(
                    command(target), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise AdapterError(f"the compiler could not be run: {error}") from error
            if result.returncode != 0 or not target.exists():
                words = result.stderr[-4000:] or f"{compiler()} said nothing and made nothing"
                raise AdapterError(f"building the PyTorch adapter failed:\n{words}")
            os.replace(target, path)
    return path


def load() -> None:
    """Builds the adapter if need be, and loads it: `torch.ops.ooc` is there afterwards. Raises AdapterError."""
    path = build()
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:  # cut short by a full disk, or of another machine
        path.unlink(missing_ok=True)
        raise AdapterError(
            f"the PyTorch adapter cannot be loaded, and was removed so that the next start builds it anew: {error}"
        ) from error


if __name__ == "__main__":
    print(build())
