"""What verdicts and costs depend on beside the operator: the processor, PyTorch and its settings, and our own code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import torch

from swapd.splitting.store import Key

FOLDER = Path(__file__).parent
_CPU = torch.device("cpu")


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


def key(operator: str, shapes: str, device: torch.device = _CPU) -> Key:
    """Under which the store keeps what was measured of an operator; asked each time, as programs change settings."""
    return Key(processor(device), library(device), operator, shapes)


def library(device: torch.device = _CPU) -> str:
    """PyTorch's version, those of its settings that choose kernels, and our own."""
    if device.type == "cuda":
        settings = _gpu()
    else:
        settings = [f"{torch.get_num_threads()} threads", "oneDNN" if torch._C._get_mkldnn_enabled() else "no oneDNN"]
    settings.append(f"matmul {torch.get_float32_matmul_precision()}")
    if torch.are_deterministic_algorithms_enabled():
        settings.append("deterministic")
    libraries = ("MKL_", "ONEDNN_", "CUBLAS_", "CUDNN_")
    known = " ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(libraries))
    return f"torch {torch.__version__}, {', '.join(settings)}, ways {version()}" + (f", {known}" if known else "")


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
def version() -> str:
    """A digest of the sources that may decide how an operator is divided: those in this folder, and winograd.py."""
    sources = [path.read_bytes() for path in (*sorted(FOLDER.glob("*.py")), FOLDER.parent / "winograd.py")]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]
