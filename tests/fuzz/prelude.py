"""What every random program may use, in plain memory and out-of-core: `from tests.fuzz.prelude import *`.

Names that only mean something out-of-core (`boundary`, `evict`, `budget`) do nothing in plain memory.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack, to_dlpack

from ooc_alloc import OutOfMemory

__all__ = [
    "Double", "F", "Named", "Sub", "boundary", "budget", "bump", "checkpoint", "evict", "from_dlpack", "gc",
    "hooked", "make_model", "nn", "numpy", "peek", "poke", "roundtrip", "saved_on_host", "to_dlpack", "together",
    "torch", "train",
]  # fmt: skip

warnings.simplefilter("ignore")


# ---- only out-of-core ------------------------------------------------------------------------------------------------


def _session() -> Any:
    import ooc

    return ooc.pytorch._session


def boundary() -> None:
    """An iteration ends."""
    if (session := _session()) is not None:
        session.explicit_step()


def evict() -> None:
    """Everything that may leave the device leaves it."""
    if (session := _session()) is not None:
        session.core.evict_all()


def budget(share: float) -> None:
    """The budget becomes this share of what it was at the start, if what is pinned fits into that."""
    if (session := _session()) is not None:
        with suppress(OutOfMemory):
            session.core.set_budget(int(session.budget_bytes * share))


# ---- subclasses ------------------------------------------------------------------------------------------------------


class Sub(torch.Tensor):
    """A subclass without anything of its own."""


class Named(torch.Tensor):
    """A subclass that sees every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


# ---- autograd --------------------------------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    """x * 2, which saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * 2 + 0 * (y - 2 * x)


def hooked(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """The tensor, whose gradient will be scaled on its way, through NumPy."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gradient.detach().numpy() * numpy.asarray(scale, gradient.detach().numpy().dtype))

    if tensor.requires_grad and tensor._base is None:  # PyTorch dies of one on a view whose base was written
        tensor.register_hook(hook)
    return tensor


@contextmanager
def saved_on_host() -> Iterator[None]:
    """What backward passes need is kept as arrays."""

    def pack(tensor: torch.Tensor) -> Any:
        return tensor.detach().numpy().copy(), tensor.stride()

    def unpack(packed: Any) -> torch.Tensor:
        return torch.from_numpy(packed[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


# ---- raw memory ------------------------------------------------------------------------------------------------------


def poke(tensor: torch.Tensor, index: int, byte: int) -> None:
    """Writes a byte of a tensor's memory through its address."""
    if tensor.numel():
        count = tensor.untyped_storage().nbytes()
        ctypes.c_uint8.from_address(tensor.untyped_storage().data_ptr() + index % count).value = byte


def peek(tensor: torch.Tensor, index: int) -> int:
    """Reads a byte of it."""
    if not tensor.numel():
        return -1
    count = tensor.untyped_storage().nbytes()
    return ctypes.c_uint8.from_address(tensor.untyped_storage().data_ptr() + index % count).value


def bump(array: numpy.ndarray, index: int) -> None:
    """Changes an element of an array in place."""
    if array.size and array.flags.writeable:
        at = numpy.unravel_index(index % array.size, array.shape)
        array[at] = ~array[at] if array.dtype == bool else array[at] + array.dtype.type(1)


def roundtrip(value: Any, way: str) -> Any:
    """A copy through a file, a pickle or deepcopy."""
    if way == "deepcopy":
        return copy.deepcopy(value)
    if way == "pickle":
        return pickle.loads(pickle.dumps(value))
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# ---- threads ---------------------------------------------------------------------------------------------------------


def together(*calls: Callable[[], Any]) -> tuple[Any, ...]:
    """The results of calls that run at the same time, each in a thread; the first error is raised."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, torch.OutOfMemoryError))
    return tuple(results)


# ---- training --------------------------------------------------------------------------------------------------------


def make_model(kind: str, width: int) -> tuple[nn.Module, torch.Tensor]:
    """A model and its input."""
    if kind == "mlp":
        model: nn.Module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width))
        return model, torch.randn(16, width)
    if kind == "conv":
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)), torch.randn(2, 3, width // 4, width // 4)
    if kind == "attention":
        encoder = nn.TransformerEncoderLayer(width // 8 * 8, 4, 2 * width, batch_first=True)
        return encoder, torch.randn(2, 12, width // 8 * 8)
    return nn.LSTM(width, width // 2, batch_first=True), torch.randn(3, 5, width)


def train(model: nn.Module, x: torch.Tensor, optimizer: str, steps: int, ends: bool) -> list[torch.Tensor]:
    """The losses of some steps; with `ends` an iteration ends after each."""
    model(x)  # lazy layers
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.01),
        "adamw_foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
        "adamw_fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    }[optimizer](list(model.parameters()))
    losses = []
    for _ in range(steps):
        made.zero_grad()
        output = model(x)
        output = output[0] if isinstance(output, tuple) else output
        loss = output.float().pow(2).mean()
        loss.backward()
        made.step()
        losses.append(loss.detach())
        if ends:
            boundary()
    return losses
