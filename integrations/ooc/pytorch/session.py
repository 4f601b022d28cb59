"""One activation under PyTorch: a session of the swap daemon, PyTorch's allocator, and the hooks around it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import swapd.session
from ooc.prometheus.exporting import export
from ooc.pytorch import boundaries, build, compiled, cuda, raw_access, threads
from ooc.pytorch.patches import Patches
from ooc.pytorch.recompute import Remaker
from ooc.pytorch.source_lines import not_the_users
from ooc.pytorch.splitting import fast, mmcnn, runtime
from ooc_alloc import Iteration, OocError, OutOfMemory
from swapd.config import Config, ConfigError

_LARGEST_SLICE = 8 << 20  # bytes, even with memory to spare: each needs room at once, as `min_budget_bytes` says


class TorchSession(swapd.session.Session):
    """One activation. If making it raises ConfigError, OocError or build.AdapterError, nothing was changed."""

    def __init__(self, config: Config) -> None:
        device = cuda.choose(config.alloc)
        if device is not None and config.split == "fast":
            raise ConfigError("OOC_SPLIT=fast measures convolutions of CPU tensors alone; give exact, allow or off")
        limits = swapd.session.limits_of(config, device)  # before the build, which takes half a minute
        build.load()
        super().__init__(config, device, limits)
        self._explicit = False
        self.cuda = device
        slice_bytes = min(_LARGEST_SLICE, max(self.budget_bytes // 8, 1))
        if device is None:
            torch.ops.ooc.install(self.core.handle, slice_bytes)
        else:
            torch.ops.ooc.install_cuda(self.core.handle, slice_bytes, device.ordinal)
        torch.ops.ooc.intercept_thread(True)
        self._patches = Patches()
        threads.install(self._patches)
        raw_access.install(self._patches, self.core, config.disk)
        compiled.install(self._patches)
        boundaries.install(self._patches, self.automatic_boundary, self.take_sequence, self.call_beside)
        boundaries.leave_loaders_out(self._patches, self.core)
        boundaries.find_repeats(self._patches, self.core, self.automatic_boundary)
        self._runtime: runtime.Runtime | None = None
        torch.ops.ooc.allow_rounding(config.split in ("allow", "fast"))
        if config.split != "off":
            where = torch.device("cpu") if device is None else torch.device("cuda", device.ordinal)
            workspaces = fast.Limits(config.workspace, config.workspace_total, config.micro_batches)
            rules = mmcnn.Rules(self.core) if config.policy == "mmcnn" else None
            self._runtime = runtime.Runtime(self.core, config.split, config.split_store, where, workspaces, rules)
            runtime.install(self._runtime)
            self._patches.callback(runtime.uninstall)
        if config.recompute == "exact":
            self.planner.remaker = Remaker(checks=config.strict)
        if device is not None:
            cuda.install(self._patches, self.core, device.ordinal)
        self.started()
        export(self)

    def automatic_boundary(self) -> None:
        if not self._explicit and not (self.cuda is not None and torch.cuda.is_current_stream_capturing()):
            self.boundary()

    def iteration_ended(self, ended: Iteration) -> None:
        if self._runtime is not None:
            self._runtime.ended(lambda: self.planner.recorded(ended).whole if ended.functions else None)

    def take_sequence(self) -> bool:
        if self._explicit or self.closed or self.forked or self.core.in_function():
            return False
        return self.core.take_sequence()

    def call_beside(self) -> None:
        self.planner.calls_beside += 1

    def explicit_step(self) -> None:
        self._explicit = True  # from now on the program says where iterations end
        self.boundary()

    def in_child(self) -> None:
        super().in_child()
        if self.planner.remaker is not None:
            self.planner.remaker.forget()

    def record_places(self, on: bool) -> None:
        torch.ops.ooc.record_places(on, not_the_users(), os.path.join(os.getcwd(), ""))

    def split_figures(self) -> dict[str, Any] | None:
        return self._runtime.figures() if self._runtime is not None else None

    def split_rows(self) -> list[dict[str, Any]]:
        """How functions ran in parts so far, once every comparison of parts is done."""
        if self._runtime is None:
            return []
        self._runtime.verifier.wait()
        return self._runtime.tally.rows()

    def sleep(self) -> int:
        try:
            return self.core.sleep()
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def wake(self) -> int:
        try:
            return self.core.wake()
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(str(error)) from None

    def keep_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            raw_access.pin_for_life(self.core, tensor)

    def memory_snapshot(self, path: Path) -> None:
        if self.cuda is None:
            raise OocError("PyTorch's memory snapshots are of CUDA devices: report() shows the emulated one's memory")
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Ends the session: every tensor becomes plain memory at the same address. Raises OocError on a CUDA device."""
        if self.cuda is not None:
            raise OocError(
                "the allocator cannot be turned off while CUDA is in use: what has left the device has no other place. "
                "End the process, or leave it on"
            )
        if not self.stop():
            return
        self._patches.close()
        torch.ops.ooc.uninstall()
        torch.ops.ooc.intercept_thread(False)
        self.core.detach()
