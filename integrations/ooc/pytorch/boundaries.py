"""Finds where an iteration ends, without the program's help.

In training an iteration ends after each optimizer step. A step within another optimizer's step (sharded state,
wrappers) is a part of that one. Optimizers that step within the backward pass, one by one, end an iteration together,
when the next outermost module is called. In inference an iteration ends when the outermost module call returns with
gradients off; where threads serve side by side, one thread's calls at a time are iterations, each as a whole. A
checkpointed segment runs modules without gradients in the middle of a training iteration: one is open, or an argument
asks for gradients. Where none of that ends an iteration, the main thread's sequence is watched for what repeats.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ooc.pytorch.patches import Patches, look_like
from ooc_alloc import Core
from ooc_alloc.built_ins import pending_call


class _State:
    inside = False  # a module's call
    training_open = False


class _Depth(threading.local):
    def __init__(self) -> None:
        self.state = _State()  # of the calling thread


class _Serving:
    """Whose calls are iterations, where threads beside the main one call modules: one thread's at a time."""

    def __init__(self, take_sequence: Callable[[], bool], beside: Callable[[], None]) -> None:
        self._take_sequence, self._beside = take_sequence, beside
        self._lock = threading.Lock()
        self._busy = False

    def begins(self) -> bool:
        """Whether the calling thread's call will be an iteration, and no other's before it ended."""
        with self._lock:
            if self._busy or not self._take_sequence():
                self._beside()
                return False
            self._busy = True
            return True

    def ends(self) -> None:
        self._busy = False


# What PyTorch wraps around the step of every class of optimizers. All these functions have one code.
_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def _within_a_step(frame: FrameType | None) -> bool:
    """Whether the function that `frame` is of was called by an optimizer's step, however deep."""
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_code is _STEP:
            return True
    return False


def leave_loaders_out(patches: Patches, core: Core) -> None:
    """Keeps out of the sequence what a process does to receive batches of its loader's worker processes.

    One that comes early is unpacked an iteration earlier, so the operators for that differ from iteration to iteration.
    """
    patches.replace(_MultiProcessingDataLoaderIter, "__next__", lambda plain: _apart(plain, core))
    patches.replace(_MultiProcessingDataLoaderIter, "_reset", lambda plain: _apart(plain, core))


def _apart(plain: Callable[..., Any], core: Core) -> Callable[..., Any]:
    def apart(*args: Any, **kwargs: Any) -> Any:
        if core.in_function():
            return plain(*args, **kwargs)
        before = core.set_apart(True)
        try:
            return plain(*args, **kwargs)
        finally:
            core.set_apart(before)

    return functools.wraps(plain)(apart)


def find_repeats(patches: Patches, core: Core, boundary: Callable[[], None]) -> None:
    """Calls `boundary` where the calling thread, the main one, begins again what it has done before.

    That is for loops that nothing else ends: they have neither a module nor an optimizer. The core finds out in the
    middle of a function, so the interpreter is asked to call when it is back from there.
    """
    core.watch_repeats(*pending_call(boundary))
    patches.callback(core.watch_repeats)
    patches.replace(Optimizer, "__init__", lambda plain: _unwatched(plain, core))  # its steps are what ends iterations


def _unwatched(plain: Callable[..., None], core: Core) -> Callable[..., None]:
    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        core.watch_repeats()
        plain(self, *args, **kwargs)

    return functools.wraps(plain)(init)


def install(
    patches: Patches,
    boundary: Callable[[], None],
    take_sequence: Callable[[], bool] = lambda: False,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Calls `boundary` at the end of every iteration from now on.

    Args:
        patches: what is replaced, until it is closed.
        boundary: ends an iteration.
        take_sequence: as `Core.take_sequence`, for threads beside the one that calls this.
        beside: told of each such call that is no iteration, as another thread's is.
    """
    depth = _Depth()
    main = depth.state
    serving = _Serving(take_sequence, beside)
    stepped_in_backward = threading.Event()  # which may run in a thread of its own

    def end_training() -> None:
        depth.state.training_open = False
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
        state = depth.state
        if state.inside or torch.compiler.is_compiling():
            return plain_call(self, *args, **kwargs)
        if state.training_open and stepped_in_backward.is_set() and torch._C._current_graph_task_id() == -1:
            end_training()
        state.inside = True
        serves = False
        if state is not main and not (is_grad_enabled() or state.training_open or main.training_open or main.inside):
            serves = serving.begins()
        try:
            return plain_call(self, *args, **kwargs)
        finally:
            state.inside = False
            if is_grad_enabled():
                state.training_open = True
            elif not (
                state.training_open
                or torch._C._current_graph_task_id() != -1
                or not (serves or state is main)
                or any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
            ):
                boundary()
            if serves:
                serving.ends()

    look_like(call, plain_call.__code__.co_filename)
    patches.replace(torch.nn.Module, "__call__", lambda _: call)
