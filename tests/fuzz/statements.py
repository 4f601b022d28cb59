"""The grammar of random programs: each template draws one statement that suits the tensors there are.

A template returns Python source, or None where nothing suits it. The program runs while it is drawn (programs.py), so
templates look at real tensors; what a statement then does, raising included, is what plain PyTorch does. The forms
that a template chooses from are in forms.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

from tests.fuzz import forms

FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["int64", "int32", "uint8", "int8", "bool"]
DTYPES = ["float32"] * 6 + FLOATS + INTEGERS + ["complex64"]
# Elements: a few, about a chunk, several chunks, more than some budgets.
COUNTS = [0, 1, 7, 60, 1000, 1000, 4096, 4096, 5000, 5000, 12000, 16384, 40000, 100000]
MAX_LIVE_BYTES = 6 << 20
SMALLER_BYTES = 1 << 19  # for what makes a larger one of it


class Names:
    """What templates draw from: the names of a program, with what they mean now."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.space: dict[str, Any] = {}
        self.exported = False  # arrays, or tensors by way of DLPack, have been made of somebody's memory
        self._made = 0

    def choose(self, values: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def new(self) -> str:
        self._made += 1
        return f"v{self._made}"

    def live(self, kind: Any = torch.Tensor) -> list[str]:
        return [name for name, value in self.space.items() if name[0] == "v" and isinstance(value, kind)]

    def live_bytes(self) -> int:
        storages = {}
        for name in self.live():
            try:
                storage = self.space[name].untyped_storage()
            except (RuntimeError, NotImplementedError):
                continue
            storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    def tensor(self, suits: Callable[[torch.Tensor], bool] | None = None) -> str | None:
        """A tensor that suits; not one that views have made much larger than its memory."""
        small = [name for name in self.live() if self.space[name].numel() <= 4 * COUNTS[-1]]
        found = [name for name in small if suits is None or suits(self.space[name])]
        return self.choose(found) if found else None

    def like(self, name: str, suits: Callable[[torch.Tensor], bool] = lambda tensor: True) -> str | None:
        """A tensor of the same shape that suits."""
        shape = self.space[name].shape
        return self.tensor(lambda other: other.shape == shape and suits(other))

    def fill(self, table: Sequence[str], **values: Any) -> str:
        """A form of a table, with names for what it makes."""
        form: str = self.choose(table)
        return form.format(new=self.new(), more=self.new(), n=self.number(0, 1 << 20), **values)


def is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def _plain(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad


def _has_history(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view whose base was written has lost it
        return False


def _smaller(tensor: torch.Tensor) -> bool:
    return tensor.nbytes < SMALLER_BYTES


def _shape(names: Names, count: int) -> tuple[int, ...]:
    way = names.number(0, 4)
    if count < 2 or way == 0:
        return (count,)
    if way == 1:
        return (max(count // 32, 1), 32)
    if way == 2:
        side = math.isqrt(count)
        return (side, side)
    if way == 3:
        return (2, max(count // 64, 1), 32)
    return (3, 7, max(count // 21, 1))


def make(names: Names) -> str | None:
    if names.live_bytes() > MAX_LIVE_BYTES:
        return None
    dtype, shape = names.choose(DTYPES), _shape(names, names.choose(COUNTS))
    is_number = dtype in FLOATS or dtype == "complex64"
    table = forms.MADE if is_number else forms.MADE_BOOLS if dtype == "bool" else forms.MADE_INTEGERS
    return names.fill(table, shape=shape, count=math.prod(shape), dtype=f"dtype=torch.{dtype}")


def unary(names: Names) -> str | None:
    x = names.tensor()
    return x and names.fill(forms.UNARY, x=x)


def binary(names: Names) -> str | None:
    x = names.tensor()
    if x is None:
        return None
    shape = names.space[x].shape
    y = names.tensor(lambda other: other.shape == shape or other.numel() == 1) or x
    pair = names.choose(forms.PAIRS).format(x=x, y=y)
    return f"{names.new()} = torch.{names.choose(forms.BINARY)}({pair})"


def with_out(names: Names) -> str | None:
    x = names.tensor(_plain)
    if x is None:
        return None
    dtype, storage = names.space[x].dtype, names.space[x].untyped_storage()._cdata

    def suits(other: torch.Tensor) -> bool:  # into its own memory it has no defined result
        return other.dtype == dtype and _plain(other) and other.untyped_storage()._cdata != storage

    return names.fill(forms.OUT, x=x, out=names.like(x, suits) or f"torch.zeros_like({x})")


def in_place(names: Names) -> str | None:
    x = names.tensor()
    if x is None:
        return None
    shape = names.space[x].shape
    y = names.tensor(lambda other: other.shape == shape or other.numel() == 1) or x
    return names.fill(forms.IN_PLACE, x=x, y=y, mask=f"torch.ones({tuple(shape)}, dtype=torch.bool)")


def assign(names: Names) -> str | None:
    x = names.tensor(lambda tensor: tensor.dim() > 0 and tensor.numel() > 0)
    if x is None:
        return None
    y = names.tensor(lambda other: other.numel() == 1) or "1"
    index = names.choose(forms.INDEXES).format(x=x)
    return names.fill(forms.ASSIGNED, x=x, y=y, index=index)


def reduce(names: Names) -> str | None:
    x = names.tensor()
    if x is None:
        return None
    dims = names.space[x].dim()
    if dims == 0 or names.number(0, 1):
        return names.fill(forms.WHOLE, x=x)
    return names.fill(forms.ALONG, x=x, d=names.number(-1, dims - 1))


def select(names: Names) -> str | None:
    x = names.tensor(_smaller)
    return x and names.fill(forms.SELECTING, x=x)


def view(names: Names) -> str | None:
    x = names.tensor()
    if x is None:
        return None
    tensor = names.space[x]
    permuted, few = list(reversed(range(tensor.dim()))), max(tensor.numel() // 4, 1)
    return names.fill(forms.VIEWS, x=x, shape=list(tensor.shape), permuted=permuted, few=few)


def combine(names: Names) -> str | None:
    x = names.tensor(_smaller)
    return x and names.fill(forms.COMBINING, x=x, y=names.like(x) or x)


def multiply(names: Names) -> str | None:
    x = names.tensor(lambda tensor: tensor.dim() == 2 and is_float(tensor) and 0 < tensor.numel() < 50_000)
    if x is None:
        return None
    rows, columns = names.space[x].shape
    if max(rows, columns) > 600:
        return None
    return names.fill(forms.MULTIPLYING, x=x, rows=rows, columns=columns)


def move(names: Names) -> str | None:
    x = names.tensor(lambda tensor: tensor.dim() > 0 and tensor.shape[0] > 0 and _smaller(tensor))
    if x is None:
        return None
    rows = names.space[x].shape[0]
    index = f"torch.randint(0, {rows}, ({names.choose([1, 5, rows])},))"
    return names.fill(forms.MOVING, x=x, rows=rows, index=index)


def lists(names: Names) -> str | None:
    x = names.tensor(lambda tensor: is_float(tensor) and _plain(tensor))
    if x is None:
        return None
    dtype = names.space[x].dtype
    y = names.like(x, lambda other: other.dtype == dtype and _plain(other)) or f"{x}.clone()"
    return names.fill(forms.LISTS, x=x, y=y)


def alias(names: Names) -> str | None:
    """An array over a tensor's memory, or a tensor over the memory of an array or of another tensor."""
    x = names.tensor()
    if x is None:
        return None
    names.exported = True
    return names.fill(forms.ALIASES, x=x)


def through_array(names: Names) -> str | None:
    arrays = names.live(numpy.ndarray)
    return names.fill(forms.ARRAYS, a=names.choose(arrays)) if arrays else None


def raw(names: Names) -> str | None:
    x = names.tensor(lambda tensor: _plain(tensor) and tensor.numel() > 0)
    return x and names.fill(forms.RAW, x=x)


def storages(names: Names) -> str | None:
    """Tensors that get another memory. What was exported keeps its tensor, not that tensor's memory."""
    x = names.tensor(_plain)
    if x is None or names.exported:
        return None
    tensor = names.space[x]
    y = names.tensor(lambda other: other.dtype == tensor.dtype and other is not tensor)
    if y is None:  # a larger one would begin with bytes that nobody defined
        return f"{x}.resize_({max(tensor.numel() // 2, 1)})" if tensor.numel() > 1 else None
    return names.fill(forms.STORAGES, x=x, y=y)


def autograd(names: Names) -> str | None:
    x = names.tensor(lambda tensor: tensor.requires_grad and is_float(tensor) and _has_history(tensor))
    if x is None:
        leaf = names.tensor(lambda tensor: is_float(tensor) and _smaller(tensor))
        return leaf and names.fill(forms.GRAPH_BEGINS, x=leaf)
    leaf = names.tensor(lambda tensor: tensor.requires_grad and not _has_history(tensor))
    return names.fill(forms.GRAPHS + (forms.GRADIENTS if leaf else []), x=x, leaf=leaf)


def saved(names: Names) -> str | None:
    x = names.tensor(lambda tensor: is_float(tensor) and 2 * tensor.nbytes < SMALLER_BYTES)
    return x and f"with saved_on_host(): {names.new()} = ({x}.detach().requires_grad_().exp() * {x}.detach()).tanh()"


def threads(names: Names) -> str | None:
    x, y = names.tensor(_smaller), names.tensor(_smaller)
    if x is None or y is None:
        return None
    left, right = (names.choose(forms.IN_THREADS).format(x=each) for each in (x, y))
    return f"{names.new()}, {names.new()} = together(lambda: {left}, lambda: {right})"


def training(names: Names) -> str | None:
    kind, width = names.choose(["mlp", "conv", "attention", "lstm"]), names.choose([16, 64, 160])
    optimizer = names.choose(["sgd", "adam", "adamw_foreach", "adamw_fused", "adagrad"])
    model, data, losses = names.new(), names.new(), names.new()
    call = f"train({model}, {data}, {optimizer!r}, {names.number(1, 6)}, {bool(names.number(0, 1))})"
    return f"{model}, {data} = make_model({kind!r}, {width}); {losses} = {call}"


def loop(names: Names) -> str | None:
    """A few statements that repeat, an iteration each, so that they get a plan."""
    body = []
    for _ in range(names.number(1, 5)):
        x = names.tensor(is_float)
        if x is None:
            return None
        body.append("    " + names.fill(forms.REPEATED, x=x, y=names.like(x, is_float) or x))
    return "\n".join([f"for _ in range({names.number(3, 8)}):", *body, "    boundary()"])


def forget(names: Names) -> str | None:
    live = [name for name in names.space if name[0] == "v"]
    return names.fill(forms.FORGOTTEN, x=names.choose(live)) if len(live) >= 4 else None


def pressure(names: Names) -> str | None:
    return names.fill(forms.PRESSURE)


TEMPLATES: list[tuple[Callable[[Names], str | None], int]] = [
    (make, 5), (unary, 4), (binary, 4), (in_place, 4), (view, 5), (reduce, 3), (alias, 4), (through_array, 4),
    (assign, 3), (with_out, 2), (select, 2), (combine, 2), (multiply, 2), (move, 2), (lists, 1), (raw, 3),
    (storages, 1), (autograd, 3), (saved, 1), (threads, 1), (training, 1), (loop, 2), (forget, 3), (pressure, 3),
]  # fmt: skip
_CHOICES = [template for template, weight in TEMPLATES for _ in range(weight)]


def statement(names: Names) -> str:
    """One statement; a new tensor where the template that was drawn has none to work on."""
    return names.choose(_CHOICES)(names) or make(names) or "gc.collect()"
