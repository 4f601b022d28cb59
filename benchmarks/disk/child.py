"""Runs a training script in this process and notes after every optimizer step the time and what the kernel counted.

    python -m benchmarks.disk.child OUTPUT.json DEVICE THREADS WAY SCRIPT [ARGUMENT ...]

WAY is `plain` or `checkpointed`: every block of the model is then computed again in the backward pass
(`torch.utils.checkpoint`). Nothing is imported that a plain program would not have: its memory is measured too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.disk import counting

BLOCKS = {"gpt.py": "Block", "resnet50.py": "Bottleneck"}  # what is computed again as a whole


class Steps:
    """One entry a step, from one call of :meth:`step` to the next."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.entries: list[dict[str, Any]] = []
        self.loading = counting.memory_bytes()
        counting.forget_peak()
        self.before = counting.everything(device)
        self.began = time.perf_counter()

    def step(self, *_: Any) -> None:
        seconds = time.perf_counter() - self.began
        now = counting.everything(self.device)
        self.entries.append({"seconds": seconds, **counting.difference(now, self.before), **counting.memory_bytes()})
        self.before = now
        self.began = time.perf_counter()


def write(output: Path, steps: Steps, threads: int, **more: Any) -> None:
    """The child's part of the record."""
    record = {"threads": threads, "steps": steps.entries, **counting.memory_bytes(), "loading": steps.loading, **more}
    output.write_text(json.dumps(record), encoding="utf-8")


def load_program(script: Path) -> ModuleType:
    """The script as a module whose `main` has not run."""
    spec = importlib.util.spec_from_file_location("measured_program", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def checkpoint(block: Any) -> None:
    """Every block of the class keeps its input alone, and is computed again when its gradient is needed."""
    from torch.utils.checkpoint import checkpoint as again

    forward: Callable[..., Any] = block.forward

    def kept_input(self: Any, x: Any) -> Any:
        return again(forward, self, x, use_reentrant=False) if x.requires_grad else forward(self, x)

    block.forward = kept_input


def main() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    output, device, threads, way, script, *arguments = sys.argv[1:]
    torch.set_num_threads(int(threads))
    program = load_program(Path(script))
    if way == "checkpointed":
        checkpoint(getattr(program, BLOCKS[Path(script).name]))
    steps = Steps(device)
    register_optimizer_step_post_hook(steps.step)
    sys.argv = [script, *arguments]
    program.main()
    write(Path(output), steps, torch.get_num_threads())


if __name__ == "__main__":
    main()
