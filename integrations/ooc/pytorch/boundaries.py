"""Finds where an iteration ends, without the program's help.

In training an iteration ends after each optimizer step. In inference it ends when the outermost module call returns
with gradients off. A checkpointed segment runs modules without gradients in the middle of a training iteration: one is
open, or an argument asks for gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ooc.pytorch.patches import Patches, look_like


class _Depth(threading.local):
    inside = False
    training_open = False


def install(patches: Patches, boundary: Callable[[], None]) -> None:
    """Calls `boundary` at the end of every iteration from now on."""
    depth = _Depth()
    main = threading.get_ident()

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        depth.training_open = False
        boundary()

    patches.callback(register_optimizer_step_post_hook(after_step).remove)
    plain_call = torch.nn.Module.__call__
    is_grad_enabled = torch.is_grad_enabled

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if depth.inside or torch.compiler.is_compiling():
            return plain_call(self, *args, **kwargs)
        depth.inside = True
        try:
            return plain_call(self, *args, **kwargs)
        finally:
            depth.inside = False
            if is_grad_enabled():
                depth.training_open = True
            elif not (
                depth.training_open
                or torch._C._current_graph_task_id() != -1
                or threading.get_ident() != main
                or any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
            ):
                boundary()

    look_like(call, plain_call.__code__.co_filename)
    patches.replace(torch.nn.Module, "__call__", lambda _: call)
