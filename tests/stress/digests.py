"""Digests: what a result is, bit for bit, in a short text that two processes can compare."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy
import torch


def digest(value: Any) -> str:
    """Type, shape, layout and every byte (NaN payloads too) of a nest of tensors, arrays, numbers and texts."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, numpy.ndarray):
        return f"array{value.shape}{value.dtype}:{_hash(value.tobytes())}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{digest(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(digest(item) for item in value) + "]"
    if isinstance(value, Exception):
        return error_text(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def error_text(error: BaseException) -> str:
    """The exception's type and the first line of its message, without addresses."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '0x', line)[:200]}"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _tensor(tensor: torch.Tensor) -> str:
    with torch.no_grad():
        tensor = tensor.detach()
        head = f"{str(tensor.dtype)[6:]}{_shape(tensor)}"
        if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            return f"{type(tensor).__name__}({','.join(digest(getattr(tensor, name)) for name in names)})"
        if tensor.is_nested:
            return f"nested[{','.join(_tensor(part) for part in tensor.unbind())}]"
        if tensor.layout is torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
            return f"coo{head}{tensor.is_coalesced()}[{','.join(map(_tensor, parts))}]"
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            return f"{tensor.layout}{head}[{','.join(map(_tensor, parts))}]"
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
            return f"{tensor.layout}{head}[{','.join(map(_tensor, parts))}]"
        if tensor.is_mkldnn:
            return f"mkldnn[{_tensor(tensor.to_dense())}]"
        if tensor.is_quantized:
            return f"{head}[{_tensor(tensor.int_repr())}]"
        if tensor.device.type != "cpu":
            return f"{head}@{tensor.device}"
        dense = tensor.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
        return f"{head}:{_hash(dense.view(torch.uint8).numpy().tobytes())}"


def _shape(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(list(tensor.shape))
