"""Roofline: how long an operator takes on a named device, from its arithmetic and the bytes that it touches.

PyTorch's own formulas (`torch.utils.flop_counter`) count the arithmetic. Bytes are those of the operands: each is read
or written once, and one that is updated in place counts twice. Which arithmetic float32 runs in follows the program's
own switches (`torch.backends.cudnn.allow_tf32`, `torch.backends.cuda.matmul.allow_tf32`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from swapd.devices.roofline import Device

_ARITHMETIC = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# Operators that read only as many elements of their first operand as they return.
_GATHERS = {"aten::embedding", "aten::index_select", "aten::gather", "aten::index.Tensor"}
# Operators that write their first operand without reading it, and those that touch nothing.
_OVERWRITES = {f"aten::{name}_" for name in ("copy", "zero", "normal", "uniform")} | {"aten::fill_.Scalar"}
_ALLOCATES = ("aten::empty", "aten::new_empty")


# PyTorch's formulas know CUDA's fused attention; they are the same for the CPU's.
_aten = torch.ops.aten
_SAME_FORMULA = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def kind_of(name: str) -> str:
    """The class of an operator that computes: a key of `swapd.devices.roofline.EFFICIENCY`."""
    if "convolution" in name:
        return "convolution"
    return "attention" if "attention" in name else "matmul"


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among `values` and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that a tensor shows; an expanded one counts no more than its storage has."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class Roofline:
    """Times of operators on a device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def seconds(self, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
        """Seconds of `function` (an OpOverload called `name`), given its arguments and its result."""
        inputs = list(tensors_in([*args, *kwargs.values()]))
        outputs = list(tensors_in([result]))
        kind = kind_of(name)
        leading = inputs[0].dtype if inputs else torch.float32
        return self.device.seconds(
            self._flops(function, args, kwargs, result),
            self._touched_bytes(name, function, inputs, outputs),
            self._arithmetic(leading, kind),
            kind,
        )

    def kernel_seconds(self, tensors: Sequence[torch.Tensor]) -> float:
        """Seconds of a generated kernel: these tensors pass memory once, and its arithmetic is not known."""
        return self.device.seconds(0.0, float(sum(map(tensor_bytes, tensors))), "float32", "matmul")

    @staticmethod
    def _flops(function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
        formula = flop_registry.get(_SAME_FORMULA.get(function.overloadpacket, function.overloadpacket))
        return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))

    @staticmethod
    def _touched_bytes(name: str, function: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
        if name.startswith(_ALLOCATES):
            return 0.0
        written = sum(map(tensor_bytes, outputs))
        if name in _OVERWRITES:
            return written + sum(map(tensor_bytes, inputs[1:]))
        if name in _GATHERS:
            return 2 * written + sum(map(tensor_bytes, inputs[1:]))
        if function._schema.is_mutable and not outputs:  # returns nothing: lists updated in place
            written = tensor_bytes_of_writes(function, inputs)
        return written + sum(map(tensor_bytes, inputs))

    @staticmethod
    def _arithmetic(dtype: torch.dtype, kind: str) -> str:
        if dtype == torch.float32:
            flags = torch.backends.cudnn if kind == "convolution" else torch.backends.cuda.matmul
            return "tf32" if flags.allow_tf32 else "float32"
        return _ARITHMETIC.get(dtype, "float32")


def tensor_bytes_of_writes(function: Any, inputs: list[torch.Tensor]) -> int:
    """Bytes that an operator over lists writes in place: the share of its lists that the schema marks as written."""
    arguments = [a for a in function._schema.arguments if "List[Tensor]" in str(a.type)]
    writes = sum(1 for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return sum(map(tensor_bytes, inputs)) * writes // max(len(arguments), 1)
