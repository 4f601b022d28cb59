"""New Python threads do not inherit the thread-local interception, so every way to start a thread turns it on."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import torch

from ooc.pytorch.patches import Patches

# Attributes that hold the interpreter's function, or a copy of it made when `threading` was imported.
_PLACES = (
    (_thread, "start_new_thread"),
    (_thread, "start_new"),
    (_thread, "start_joinable_thread"),
    (threading, "_start_new_thread"),
    (threading, "_start_joinable_thread"),
)


def install(patches: Patches) -> None:
    """Patches thread creation."""
    for module, name in _PLACES:
        patches.replace(module, name, _wrap)


def _wrap(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_intercepted(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            torch.ops.ooc.intercept_thread(True)
            return function(*args, **kwargs)

        return start(run, *arguments, **keywords)

    return start_intercepted
