"""One activation under PyTorch: a session of the swap daemon, PyTorch's allocator, and the hooks around it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import swapd.session
from integrations.pytorch import boundaries, build, compiled, raw_access, threads
from ooc_alloc import OocError
from swapd.config import Config

_LARGEST_SLICE = 8 << 20  # also with memory to spare: the call needs a slice at once, and `min_budget_bytes` says so


class Session(swapd.session.Session):
    """Raises ConfigError, OocError or build.AdapterError; then nothing was changed."""

    def __init__(self, config: Config) -> None:
        if config.alloc == "cuda" or (config.alloc == "auto" and torch.version.cuda and torch.cuda.device_count() > 0):
            raise OocError(
                "memory of a CUDA device is not managed yet; set OOC_ALLOC=emulated to manage this process's CPU "
                "tensors on the emulated device"
            )
        build.load()
        super().__init__(config)
        self._explicit = False
        torch.ops.ooc.install(self.core.handle, min(_LARGEST_SLICE, max(self.budget_bytes // 8, 1)))
        torch.ops.ooc.intercept_thread(True)
        self._undo = [
            threads.install(),
            raw_access.install(self.core),
            compiled.install(),
            boundaries.install(self.automatic_boundary),
        ]
        self.started()

    def automatic_boundary(self) -> None:
        if not self._explicit:
            self.boundary()

    def explicit_step(self) -> None:
        self._explicit = True  # from now on the program says where iterations end
        self.boundary()

    def keep_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            raw_access.pin_for_life(self.core, tensor)

    def detach(self) -> None:
        """Ends the session: every tensor becomes plain memory at the same address."""
        if not self.stop():
            return
        for undo in reversed(self._undo):
            undo()
        torch.ops.ooc.uninstall()
        torch.ops.ooc.intercept_thread(False)
        self.core.detach()
