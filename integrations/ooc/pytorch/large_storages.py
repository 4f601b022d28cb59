"""Storages larger than the budget, where PyTorch handles storages and not tensors: torch.save, torch.load, deepcopy.

They are copied by operators on lines of bytes, which are split like all others; so with OOC_SPLIT=off they raise.
safetensors wants all that it saves at addresses at once, which together may be larger: it gets copies.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def plain_memory() -> Iterator[None]:
    """While inside, what this thread allocates comes from the host, and its operators are no functions."""
    before = torch.ops.ooc.plain(True)
    try:
        yield
    finally:
        torch.ops.ooc.plain(before)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of one dimension, byte by byte."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def plain_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a storage in plain host memory."""
    with plain_memory():
        target = torch.empty(storage.nbytes(), dtype=torch.uint8)
    target.copy_(as_bytes(storage))
    return target.untyped_storage()


def managed_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a storage in a variable of its own, of which no part need be on the device."""
    target: torch.Tensor = torch.ops.ooc.empty_absent([storage.nbytes()], [1], torch.uint8)
    target.copy_(as_bytes(storage))
    return target.untyped_storage()


def tolist(original: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `Tensor.tolist`: where it does not fit, it reads a copy, so parts of large tensors can be printed."""

    @functools.wraps(original)
    def call(self: torch.Tensor) -> Any:
        try:
            return usual(self)
        except torch.OutOfMemoryError:
            if self.layout != torch.strided or self.device.type != "cpu":
                raise
            with plain_memory():
                target = torch.empty(self.shape, dtype=self.dtype)
            return original(target.copy_(self.detach()))

    return call


def clone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `UntypedStorage.clone`: a storage that does not fit is copied in parts."""

    @functools.wraps(original)
    def call(self: torch.UntypedStorage) -> Any:
        try:
            return original(self)
        except torch.OutOfMemoryError:
            if type(self) is not torch.UntypedStorage or self.device.type != "cpu":
                raise
            return managed_copy(self)

    return call


def reader(original: Any) -> Any:
    """Replaces `torch._C.PyTorchFileReader`, with which torch.load reads storages."""

    class PyTorchFileReader(original):  # type: ignore[misc]
        """A storage that does not fit is read into plain memory first."""

        def get_storage_from_record(self, *args: Any) -> Any:
            try:
                return super().get_storage_from_record(*args)
            except torch.OutOfMemoryError:
                with plain_memory():
                    read = super().get_storage_from_record(*args)
                return torch.empty(0, dtype=read.dtype).set_(managed_copy(read.untyped_storage()))

    return PyTorchFileReader


def saved(folder: Path | None, original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces what tells safetensors the address of a tensor that it saves: it is that of a copy.

    safetensors keeps the copy until the file is written. With a disk the copy is a file of its own there, without a
    name, as memory may have no room for it.
    """

    @functools.wraps(original)
    def call(tensor: torch.Tensor) -> Any:
        if tensor.device.type != "cpu" or not tensor.nbytes or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return original(tensor)  # where a GPU is managed, tensors of the CPU are plain memory
        with plain_memory():
            if folder is None:
                target = torch.empty(tensor.shape, dtype=tensor.dtype)
            else:
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk is an error here, a signal later
                    name = f"/proc/self/fd/{file.fileno()}"
                    target = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
                target = target.view(tensor.shape)
        return original(target.copy_(tensor.detach()))

    return call
