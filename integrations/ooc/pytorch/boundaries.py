"""Finds where an iteration ends, without the program's help.

In training an iteration ends after each optimizer step. A step within another optimizer's step (sharded state,
wrappers) is a part of that one. Optimizers that step within the backward pass, one by one, end an iteration together,
when the next outermost module is called. In inference an iteration ends when the outermost module call returns with
gradients off. A checkpointed segment runs modules without gradients in the middle of a training iteration: one is
open, or an argument asks for gradients.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ooc.pytorch.patches import Patches, look_like


class _Depth(threading.local):
    inside = False
    training_open = False


# What PyTorch wraps around the step of every class of optimizers. All these functions have one code.
_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def _within_a_step(frame: FrameType | None) -> bool:
    """Whether the function that `frame` is of was called by an optimizer's step, however deep."""
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_code is _STEP:
            return True
    return False


def install(patches: Patches, boundary: Callable[[], None]) -> None:
    """Calls `boundary` at the end of every iteration from now on."""
    depth = _Depth()
    main = threading.get_ident()
    stepped_in_backward = threading.Event()  # which may run in a thread of its own

    def end_training() -> None:
        depth.training_open = False
        stepped_in_backward.clear()
        boundary()

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The stack is asked, as no hook is called after a step that raises.
        if _within_a_step(sys._getframe(1)):
            return
        if torch._C._current_graph_task_id() != -1:
            stepped_in_backward.set()
        else:
            end_training()

    patches.callback(register_optimizer_step_post_hook(after_step).remove)
    plain_call = torch.nn.Module.__call__
    is_grad_enabled = torch.is_grad_enabled

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if depth.inside or torch.compiler.is_compiling():
            return plain_call(self, *args, **kwargs)
        if depth.training_open and stepped_in_backward.is_set() and torch._C._current_graph_task_id() == -1:
            end_training()
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
