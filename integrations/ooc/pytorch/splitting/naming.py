"""A call's arguments as text: the part of a verdict's key that says for which arguments it was found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def named_shape(value: Any) -> str:
    """A value as text: a tensor's size, type, and strides where unusual; or what is no tensor."""
    if isinstance(value, Tensor):
        kind = _TYPES.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        size = "x".join(map(str, value.shape))
        return f"{kind}[{size}]" + ("" if value.is_contiguous() else "/" + "x".join(map(str, value.stride())))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(named_shape, value)) + "]"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, float) and value * 4 != int(value * 4 if abs(value) < 1e6 else 0):
        return (
            "*"  # a learning rate, say, which may change with each step; 2, 0.5 or -1 stay: operators treat these apart
        )
    if isinstance(value, torch.UntypedStorage):
        return f"storage of {value.nbytes()} bytes"
    return str(value).removeprefix("torch.")
