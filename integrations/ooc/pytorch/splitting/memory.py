"""Where the tensors of a division lie: variables of which the device has parts, or plain memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry

CPU = torch.device("cpu")
NO_LIMIT = 1 << 62  # bytes of a part, where everything fits


class _Thread(threading.local):
    verifying = False  # a division: in plain memory, except on a GPU


_thread = _Thread()


def _verify(on: bool) -> bool:
    before, _thread.verifying = _thread.verifying, on
    return before


@contextmanager
def _mode(switch: Callable[[bool], bool], on: bool) -> Iterator[None]:
    """While inside, a mode of this thread is on, or off. `switch` sets it, and returns what it was."""
    before = switch(on)
    try:
        yield
    finally:
        switch(before)


class Memory:
    """Memory for one call.

    Args:
        part_bytes: what one part may use at once, for all its operands and results, in whole chunks.
        chunk_bytes: the unit of residency; 1 where there is no core.
        managed: the device whose memory a core manages (`torch.ops.ooc`), if one does.
    """

    def __init__(self, part_bytes: int, chunk_bytes: int, managed: torch.device | None) -> None:
        self.part_bytes = part_bytes
        self.chunk_bytes = chunk_bytes
        self.device = managed or CPU  # of the operator's large tensors
        self._managed = managed is not None

    def own_bytes(self, size_bytes: int) -> int:
        """Bytes that new memory takes on the device: whole chunks, or its own size if it is smaller than a chunk."""
        chunk = self.chunk_bytes
        return size_bytes if size_bytes < chunk else -(-size_bytes // chunk) * chunk

    def empty(
        self,
        like: Tensor | None = None,
        *,
        size: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """A large result, not initialised, of which nothing is on the device until it is written in parts.

        `like` (it may be on the device "meta") gives the sizes, strides and type that the other arguments leave out.
        If nothing gives strides, the result is contiguous. `device` is the context's or the CPU; by default the first.
        """
        shape = tuple(size if size is not None else like.shape if like is not None else ())
        kind = dtype if dtype is not None else like.dtype if like is not None else torch.get_default_dtype()
        if stride is None:
            stride = like.stride() if like is not None and size is None else geometry.contiguous(shape)
        here = device is None or device.type == self.device.type
        if self._managed and here and (not self.verifying or self.on_gpu):
            made: Tensor = torch.ops.ooc.empty_absent(list(shape), list(stride), kind)
            return made
        return torch.empty_strided(shape, tuple(stride), dtype=kind, device=CPU)

    def move(self, target: Tensor, source: Any) -> int:
        """Copies `source`, a number or a tensor that may be broadcast, in as many parts as needed; returns how many."""
        tensors = [target, source] if isinstance(source, Tensor) else [target]
        everything = self.part_bytes >= NO_LIMIT
        indexes = [()] if everything else list(geometry.blocks(tensors, self.part_bytes, self.chunk_bytes))
        for index in indexes:
            part = geometry.narrowed(target, index)
            if isinstance(source, Tensor):
                part.copy_(geometry.narrowed(source, index))
            else:
                part.fill_(source)
        return len(indexes)

    @property
    def on_gpu(self) -> bool:
        """Whether kernels cannot use plain memory."""
        return self.device.type != "cpu"

    @property
    def verifying(self) -> bool:
        """Whether this thread is verifying a division."""
        return _thread.verifying

    @contextmanager
    def plain(self, plain: bool = True) -> Iterator[None]:
        """While inside, this thread's memory comes from the host, and its operators are no functions; or they are."""
        with _mode(torch.ops.ooc.plain, plain) if self._managed else nullcontext(), _mode(_verify, plain):
            yield

    def trial(self) -> AbstractContextManager[None]:
        """While inside, this thread verifies a division: as in `plain`, except that a GPU's operators are functions."""
        return _mode(_verify, True) if self.on_gpu else self.plain()

    def undivided(self) -> AbstractContextManager[None]:
        """While inside, a GPU's operators run in one piece, on host memory where they do not fit."""
        return _mode(torch.ops.ooc.undivided, True) if self.on_gpu else nullcontext()

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on a device, the GPU or the CPU, with the same strides and offset; for use inside of `trial`."""
        line = geometry.storage_line(tensor)
        target = self.empty(like=line, device=device)
        self.move(target, line)
        return target.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """Copies a managed tensor into plain memory, for use inside of `plain`."""
        if not self._managed:
            target.copy_(source)
            return
        with self.plain(False):
            self.move(target, source)
