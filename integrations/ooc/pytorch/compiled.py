"""Compiled graphs bypass the dispatcher, so each call of one is a function, whose inputs and allocations are pinned.

A graph too large for the budget gets the out-of-memory error; compile a model block by block to train it out-of-core.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from ooc.pytorch.patches import Patches

_OUTPUT_CODE = "torch._inductor.output_code"


def install(patches: Patches) -> None:
    """Wraps inductor's compiled graphs, now or at the first `torch.compile`."""
    wrapped = False

    def wrap_graphs() -> None:
        nonlocal wrapped
        if not wrapped:
            wrapped = True
            patches.replace(importlib.import_module(_OUTPUT_CODE).CompiledFxGraph, "__call__", _as_function)

    def compile_wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            wrap_graphs()
            return plain(*args, **kwargs)

        compile.__doc__ = plain.__doc__
        return compile

    if _OUTPUT_CODE in sys.modules:
        wrap_graphs()
    else:
        patches.replace(torch, "compile", compile_wrapped)


def _as_function(plain_call: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any) -> Any:
        if torch.ops.ooc.in_scope():
            return plain_call(self, inputs)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        tensors += [value for value in (self.constants or {}).values() if isinstance(value, torch.Tensor)]
        opened = torch.ops.ooc.scope_begin(f"compiled_graph:{self.cache_key or ''}", tensors)
        del tensors  # so that the graph can free its inputs as it goes
        torch.ops.ooc.intercept_thread(False)
        results: Any = ()
        try:
            results = plain_call(self, inputs)
            return results
        finally:
            torch.ops.ooc.intercept_thread(True)
            if opened:
                torch.ops.ooc.scope_end([value for value in results if isinstance(value, torch.Tensor)])

    return call
