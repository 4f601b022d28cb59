"""Compiled graphs bypass the dispatcher, so each call of one is a function, whose inputs and allocations are pinned.

A graph too large for the budget gets the out-of-memory error; compile a model block by block to train it out-of-core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_OUTPUT_CODE = "torch._inductor.output_code"


def install() -> Callable[[], None]:
    """Wraps inductor's compiled graphs, now or at the first `torch.compile`; returns the function that undoes this."""
    undos: list[Callable[[], None]] = []
    if _OUTPUT_CODE in sys.modules:
        return _wrap_graphs()
    plain_compile = torch.compile

    def compile(*args: Any, **kwargs: Any) -> Any:
        if not undos:
            __import__(_OUTPUT_CODE)
            undos.append(_wrap_graphs())
        return plain_compile(*args, **kwargs)

    compile.__doc__ = plain_compile.__doc__
    torch.compile = compile

    def undo() -> None:
        torch.compile = plain_compile
        for each in undos:
            each()

    return undo


def _wrap_graphs() -> Callable[[], None]:
    graph = sys.modules[_OUTPUT_CODE].CompiledFxGraph
    plain_call = graph.__call__

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

    graph.__call__ = call

    def undo() -> None:
        graph.__call__ = plain_call

    return undo
