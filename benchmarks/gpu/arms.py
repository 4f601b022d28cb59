"""The arms: what each does to a model, around a step, and what it counts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.cases import IN_CORE, OURS, UVM
from benchmarks.gpu.models import Job, checkpoint_blocks
from benchmarks.gpu.offload import OffloadActivations


class Arm:
    """The in-core arm, and the base of the others."""

    early = False  # the job is made before the memory is taken away: it is the host's business

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request

    def start(self) -> None:
        """Before CUDA is used."""

    def adopt(self, job: Job, device: torch.device) -> None:
        """Once the job is made."""

    def forward(self) -> AbstractContextManager[Any]:
        """Around the forward pass of a step."""
        return nullcontext()

    def step_ended(self) -> None:
        """After each optimizer step."""

    def counters(self) -> dict[str, float]:
        """Running totals: out_bytes, in_bytes, stall_seconds; what cannot be counted is left out."""
        return {"out_bytes": 0, "in_bytes": 0, "stall_seconds": 0.0} if self.request["arm"] == IN_CORE else {}

    def memory(self, device: torch.device) -> dict[str, int]:
        """live_peak_bytes, device_peak_bytes: of this process, without the context and libraries' own memory."""
        if device.type != "cuda":
            return {}
        return {
            "live_peak_bytes": torch.cuda.max_memory_allocated(device),
            "device_peak_bytes": torch.cuda.max_memory_reserved(device),
        }

    def limit(self, budget_bytes: int | None, device: torch.device) -> None:
        """Holds PyTorch's allocator to exactly the budget; the ballast beside it holds it to a little more."""
        if budget_bytes is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), device)

    def facts(self) -> dict[str, Any]:
        """What else is worth keeping in the record."""
        return {}


class Ours(Arm):
    """Our allocator, with a plan or (demand) without."""

    def start(self) -> None:
        import ooc

        self._ooc = ooc
        settings: dict[str, Any] = {
            "alloc": self.request.get("alloc", "cuda"),
            "chunk_size": self.request["chunk_bytes"],
            "policy": "demand" if self.request["arm"] == "demand" else "auto",
        }
        if self.request["budget_bytes"] is not None:
            settings["budget"] = self.request["budget_bytes"]
        ooc.enable(**settings | self.request.get("settings", {}))

    def limit(self, budget_bytes: int | None, device: torch.device) -> None:
        """It keeps to its budget by itself."""

    def counters(self) -> dict[str, float]:
        stats = self._ooc.summary()
        return {
            "out_bytes": stats["swap_out_bytes"],
            "in_bytes": stats["swap_in_bytes"],
            "stall_seconds": stats["stall_seconds"],
        }

    def memory(self, device: torch.device) -> dict[str, int]:
        stats = self._ooc.summary()
        return {name: stats[name] for name in ("live_peak_bytes", "device_peak_bytes")}

    def facts(self) -> dict[str, Any]:
        return {"summary": self._ooc.summary()}


class SaveOnCpu(Arm):
    """PyTorch's own hooks, counted."""

    def adopt(self, job: Job, device: torch.device) -> None:
        self._out_bytes = self._in_bytes = 0
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def counted_pack(tensor: Tensor) -> Any:
            self._out_bytes += tensor.numel() * tensor.element_size()
            return pack(tensor)

        def counted_unpack(packed: Any) -> Tensor:
            tensor = unpack(packed)
            self._in_bytes += tensor.numel() * tensor.element_size()
            return tensor

        hooks.pack_hook, hooks.unpack_hook = counted_pack, counted_unpack
        self._hooks = hooks

    def forward(self) -> AbstractContextManager[Any]:
        return self._hooks

    def counters(self) -> dict[str, float]:
        return {"out_bytes": self._out_bytes, "in_bytes": self._in_bytes}


class Offload(Arm):
    """Streamed activation offloading."""

    def adopt(self, job: Job, device: torch.device) -> None:
        kept = [*job.model.parameters(), *job.model.buffers()]
        self._hooks = OffloadActivations(device, kept, **self.request.get("offload", {}))

    def forward(self) -> AbstractContextManager[Any]:
        return self._hooks

    def step_ended(self) -> None:
        self._hooks.step_ended()

    def counters(self) -> dict[str, float]:
        return {"out_bytes": self._hooks.out_bytes, "in_bytes": self._hooks.in_bytes}


class Checkpoint(Arm):
    """Activation checkpointing of every block; nothing is copied."""

    def adopt(self, job: Job, device: torch.device) -> None:
        checkpoint_blocks(job.blocks)

    def counters(self) -> dict[str, float]:
        return {"out_bytes": 0, "in_bytes": 0}


class Fsdp(Arm):
    """FSDP2 on one rank: parameters, gradients and optimizer state in host memory, the optimizer on the host."""

    early = True

    def start(self) -> None:
        import torch.distributed

        self._store = tempfile.TemporaryDirectory(prefix="ooc-bench-")
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{os.path.join(self._store.name, 'store')}",
            rank=0,
            world_size=1,
        )

    def adopt(self, job: Job, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        cuda = device.type == "cuda"
        if cuda:  # NCCL takes its buffers now, and not beside the ballast
            torch.cuda.set_device(device)
            torch.distributed.all_reduce(torch.zeros(1, device=device))
        policy = CPUOffloadPolicy() if cuda else OffloadPolicy()
        mesh = init_device_mesh(device.type, (1,))
        for block in [*job.blocks, job.model]:
            fully_shard(block, mesh=mesh, offload_policy=policy)


class Uvm(Arm):
    """Managed memory for everything. Only where the working set fits the device: `run.py` refuses the rest."""

    def start(self) -> None:
        use_uvm = getattr(torch.cuda.memory, "_use_uvm", None)
        if use_uvm is None:
            raise NotImplementedError(f"PyTorch {torch.__version__} has no torch.cuda.memory._use_uvm")
        torch.autograd.set_multithreading_enabled(False)  # type: ignore[no-untyped-call]  # the backward pass too
        self._context = use_uvm()
        self._context.__enter__()


_ARMS: dict[str, Callable[[dict[str, Any]], Arm]] = {
    IN_CORE: Arm,
    **{name: Ours for name in OURS},
    "save_on_cpu": SaveOnCpu,
    "offload": Offload,
    "checkpoint": Checkpoint,
    "fsdp": Fsdp,
    UVM: Uvm,
}


def make_arm(request: dict[str, Any]) -> Arm:
    """The arm that a request names. Raises KeyError."""
    return _ARMS[request["arm"]](request)


def local_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as a plain tensor, wherever it is."""
    for name, parameter in model.named_parameters():
        yield name, parameter.to_local() if hasattr(parameter, "to_local") else parameter
