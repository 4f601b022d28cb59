"""Streamed activation offloading, the way torchtune's and TRL's `OffloadActivations` do it; written anew here.

What autograd saves in the forward pass is copied to pinned host memory on a stream of its own while the next layers
run; the device memory is let go a few tensors later, when the copy is over. In the backward pass tensors come back in
reverse order, each a few ahead of its use (by the number that it was saved under), again on a stream of its own.

Left on the device: tensors smaller than 1 MiB, parameters, and the last few that were saved (the backward pass begins
with them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 20
STASH = 4  # tensors on their way out that still hold device memory
AHEAD = 3  # tensors on their way back before they are asked for


class _Lane:
    """A stream beside the computation; on a device without streams everything is in order anyhow."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        self._context: AbstractContextManager[Any] = (
            torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()
        )
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # what is copied has been computed
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def mark(self) -> torch.cuda.Event | None:
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


@dataclass
class _Saved:
    """A tensor that was saved. `ready`: what the stream that uses `back` has to wait for."""

    host: Tensor
    device: torch.device
    back: Tensor | None  # on the device: still, or again
    ready: torch.cuda.Event | None = None
    used: bool = False


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    """Hooks for one forward and backward pass after another; `out_bytes`, `in_bytes`: copied so far each way.

    Args:
        keep: tensors that stay, such as the parameters.
        smallest_bytes: smaller ones stay too.
    """

    def __init__(self, device: torch.device, keep: Iterable[Tensor], smallest_bytes: int = SMALLEST_BYTES) -> None:
        super().__init__(self._pack, self._unpack)
        self._out, self._in = _Lane(device), _Lane(device)
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in keep}
        self._smallest = smallest_bytes
        self._saved: dict[int, _Saved] = {}
        self._leaving: deque[tuple[_Saved, torch.cuda.Event | None]] = deque()
        self._next = 0
        self._pinned = device.type == "cuda"
        self.out_bytes = self.in_bytes = 0

    def _stays(self, tensor: Tensor) -> bool:
        small = tensor.numel() * tensor.element_size() < self._smallest
        plain = tensor.layout == torch.strided and tensor.device.type in ("cuda", "cpu")
        return small or not plain or tensor.untyped_storage().data_ptr() in self._keep

    def _pack(self, tensor: Tensor) -> Tensor | int:
        if self._stays(tensor):
            return tensor
        number, self._next = self._next, self._next + 1
        source = tensor.detach()
        with self._out:
            host = torch.empty_strided(
                source.size(), source.stride(), dtype=source.dtype, device="cpu", pin_memory=self._pinned
            )
            host.copy_(source, non_blocking=True)
        self.out_bytes += source.numel() * source.element_size()
        self._saved[number] = _Saved(host, source.device, source)  # held until copied
        self._leaving.append((self._saved[number], self._out.mark()))
        while len(self._leaving) > STASH:
            gone, copied = self._leaving.popleft()
            _wait(copied)  # its memory is not used again before
            gone.back = None
        return number

    def _fetch(self, number: int) -> None:
        saved = self._saved.get(number)
        if saved is None or saved.back is not None:
            return
        with self._in:
            saved.back = torch.empty_strided(
                saved.host.size(), saved.host.stride(), dtype=saved.host.dtype, device=saved.device
            )
            saved.back.copy_(saved.host, non_blocking=True)
        self.in_bytes += saved.host.numel() * saved.host.element_size()
        saved.ready = self._in.mark()

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._leaving.clear()  # the forward pass is over: those stay
        self._fetch(packed)
        for number in range(packed - 1, packed - 1 - AHEAD, -1):
            if number in self._saved and not self._saved[number].used:
                self._fetch(number)
        saved = self._saved[packed]
        result = saved.back
        assert result is not None
        _wait(saved.ready)
        if saved.ready is not None:
            result.record_stream(torch.cuda.current_stream())
        saved.used, saved.back, saved.ready = True, None, None
        return result

    def step_ended(self) -> None:
        """Lets the host copies go."""
        self._saved.clear()
        self._leaving.clear()
