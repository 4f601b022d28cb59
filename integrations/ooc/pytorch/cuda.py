"""The memory of a CUDA device: chooses the device, and makes `torch.cuda` report the budget.

The allocator itself is in the adapter (csrc/cuda_allocator.h). It must be installed before PyTorch initialises CUDA.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from typing import Any

import torch

from ooc.pytorch import build, threads
from ooc.pytorch.patches import Patches
from ooc_alloc import Core, OocError
from swapd.config import Config
from swapd.ranks import sharing
from swapd.session import CudaDevice

DRIVER = "libcuda.so.1"
_EMULATED = "set OOC_ALLOC=emulated to manage this process's CPU tensors on the emulated device"
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvmap")  # of a GPU in a server, under WSL, and in a Jetson


def choose(alloc: str) -> CudaDevice | None:
    """The CUDA device to manage, or None for the emulated one. `alloc` is the setting: auto, cuda or emulated.

    Raises:
        OocError: CUDA is asked for and cannot be had, or PyTorch uses it already.
    """
    if alloc == "cpu":
        return None
    missing = _what_is_missing()
    if missing is not None:
        if alloc == "cuda":
            raise OocError(f"OOC_ALLOC=cuda: {missing}; {_EMULATED}")
        return None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise OocError(
            "CUDA was initialised before the allocator was turned on, and its memory is PyTorch's own by now: call "
            "enable() before the first CUDA tensor, or set OOC_ALLOC=1 when the program starts"
        )
    return CudaDevice(ordinal=_ordinal(), driver=DRIVER, ranks=sharing(torch.cuda.device_count()))


def can_wait() -> bool:
    """Whether there is a CUDA device that PyTorch has not initialised, as far as can be seen without a driver call."""
    if torch.version.cuda is None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    count: int = torch.cuda._device_count_nvml()
    return count > 0 or (count < 0 and any(map(glob.glob, _DEVICE_FILES)))


class Waiting:
    """What there is until PyTorch initialises CUDA: threads whose operators will be seen, and a hook.

    Args:
        config: what the allocator will be turned on with.
        start: turns it on, when PyTorch is about to initialise CUDA.
    """

    def __init__(self, config: Config, start: Callable[[], None]) -> None:
        self.config = config
        build.load()
        torch.ops.ooc.intercept_thread(True)
        self._patches = Patches()
        threads.install(self._patches)

        def before(initialise: Callable[[], None]) -> Callable[[], None]:
            def cuda_init() -> None:
                start()
                initialise()

            return cuda_init

        self._patches.replace(torch._C, "_cuda_init", before)

    def end(self) -> None:
        self._patches.close()
        torch.ops.ooc.intercept_thread(False)


def _what_is_missing() -> str | None:
    if torch.version.cuda is None:
        kind = "ROCm" if torch.version.hip is not None else "the CPU alone"
        return f"this PyTorch ({torch.__version__}) is built for {kind}"
    if torch.cuda.device_count() == 0:
        return "there is no CUDA device, or no driver for it (look at nvidia-smi and CUDA_VISIBLE_DEVICES)"
    return None


def _ordinal() -> int:
    """The number of the one device that this process manages: its rank's if a launcher set one, else the first."""
    rank = os.environ.get("LOCAL_RANK", "")
    count = torch.cuda.device_count()
    return int(rank) if rank.isdecimal() and int(rank) < count else 0


def install(patches: Patches, core: Core, ordinal: int) -> None:
    """Makes `torch.cuda.mem_get_info` report the budget."""
    plain = torch.cuda.memory.mem_get_info

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        if index != ordinal:
            return plain(device)
        return memory_info(core)

    mem_get_info.__doc__ = plain.__doc__
    for module in (torch.cuda, torch.cuda.memory):
        patches.replace(module, "mem_get_info", lambda _: mem_get_info)


def memory_info(core: Core) -> tuple[int, int]:
    """Bytes that can be allocated without moving anything, and bytes of the budget."""
    stats = core.stats()
    idle = stats["free_bytes"] + stats["cached_bytes"] + stats["slab_bytes"] - stats["slab_used_bytes"]
    taken = max(stats["device_bytes"] - idle, 0)
    return int(max(stats["budget_bytes"] - taken, 0)), int(stats["budget_bytes"])
