"""One call of an operator that does not fit, the ways to run it in parts, and why it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keywords
Sample = Callable[[Given], Given]  # makes arguments that a verification may use of random ones


class CannotSplit(Exception):
    """No division may be taken. `inexact`: there is one, but it changes bits; `cause`: the operator's own error."""

    def __init__(self, reason: str, inexact: bool = False, cause: Exception | None = None) -> None:
        super().__init__(reason)
        self.inexact = inexact
        self.cause = cause


class NotYet(Exception):
    """It is being found out whether a division gives the same bits; until then the call runs in some other way."""


@contextmanager
def its_own_errors() -> Iterator[None]:
    """Around an operator that runs on "meta": turns its error into a CannotSplit that has the error as its cause."""
    try:
        yield
    except Exception as error:
        raise CannotSplit(str(error), cause=error) from None


@dataclass(frozen=True)
class Split:
    """One way to run a call in parts. `how` names all that the rounding depends on, except the number of parts."""

    how: str
    parts: int
    run: Callable[..., Any]  # called as the handler is, without the context; gives the operator's result
    rounds: bool = False  # it divides sums, so it changes bits on some data, whatever a verification on others shows


_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def _named_shape(value: Any) -> str:
    """A value as text: a tensor's size, type, and strides where unusual; or what is no tensor."""
    if isinstance(value, Tensor):
        kind = _TYPES.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        size = "x".join(map(str, value.shape))
        return f"{kind}[{size}]" + ("" if value.is_contiguous() else "/" + "x".join(map(str, value.stride())))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_named_shape, value)) + "]"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, float) and value * 4 != int(value * 4 if abs(value) < 1e6 else 0):
        return "*"  # a learning rate, say, which may change with each step; operators treat 2, 0.5 or -1 apart
    if isinstance(value, torch.UntypedStorage):
        return f"storage of {value.nbytes()} bytes"
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Call:
    """One call of an operator that does not fit."""

    operator: str  # such as aten::add.Tensor
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @cached_property
    def shapes(self) -> str:
        """The arguments as text: tensors' sizes, types, and strides where unusual, and everything that is no tensor."""
        named = [f"{name}={_named_shape(value)}" for name, value in self.keywords.items()]
        return ", ".join([*map(_named_shape, self.arguments), *named])
