"""What verdicts and costs depend on beside the operator: the processor, PyTorch and its settings, and our own code."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
_CPU = torch.device("cpu")
_PACKAGE = __name__.rpartition(".")[0]


@cache
def processor(device: torch.device = _CPU) -> str:
    """The GPU, or the processor and the instructions that PyTorch uses of it: what results depend on."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def library(module: str, device: torch.device = _CPU) -> str:
    """PyTorch's version, those of its settings that choose kernels, and the version of one of our modules."""
    settings = _gpu() if device.type == "cuda" else _cpu()
    settings.append(f"matmul {torch.get_float32_matmul_precision()}")
    if torch.are_deterministic_algorithms_enabled():
        settings.append("deterministic")
    libraries = ("MKL_", "ONEDNN_", "CUBLAS_", "CUDNN_")
    known = " ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(libraries))
    return f"torch {torch.__version__}, {', '.join(settings)}, ways {version(module)}" + (f", {known}" if known else "")


def _cpu() -> list[str]:
    return [f"{torch.get_num_threads()} threads", "oneDNN" if torch._C._get_mkldnn_enabled() else "no oneDNN"]


def _gpu() -> list[str]:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    chosen = {
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic,
        "TF32": cudnn.allow_tf32,
        "products in TF32": products.allow_tf32,
        "sums of float16": products.allow_fp16_reduced_precision_reduction,
        "sums of bfloat16": products.allow_bf16_reduced_precision_reduction,
    }
    number = cudnn.version() if cudnn.enabled else None  # type: ignore[no-untyped-call]
    return [f"cuDNN {number}", *(name for name, on in chosen.items() if on)]


@cache
def version(module: str) -> str:
    """A digest of the sources of a module and of all that it imports from this folder, directly or through others.

    An operator is divided by code in its handler's module and in those, so an edit of another file does not count.
    """
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = _source(name)
            waiting.extend(_imports(sources[name]))
    return hashlib.sha256(b"".join(sources[name] for name in sorted(sources))).hexdigest()[:12]


def _source(module: str) -> bytes:
    """A module's source; empty if the module has no file, such as one that was typed at a prompt."""
    package, _, name = module.rpartition(".")
    path = FOLDER / f"{name}.py" if package == _PACKAGE else getattr(sys.modules.get(module), "__file__", None)
    with contextlib.suppress(OSError):
        return b"" if path is None else Path(path).read_bytes()
    return b""


def _imports(source: bytes) -> Iterator[str]:
    """The modules of this folder that a source imports anywhere in it. Yields none if the source is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # a handler of a module that is written in C
        nodes = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in found:
            package, _, last = name.rpartition(".")
            if package == _PACKAGE and (FOLDER / f"{last}.py").exists():
                yield name
