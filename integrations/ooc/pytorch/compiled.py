"""Functions inside the graphs that Inductor compiles.

The Python wrapper of a graph allocates tensors and calls library operators as any program does, so those are functions
already. Its own kernels bypass the dispatcher: each is replaced by a callable that makes it a function of the tensors
that it is given, at the point where the wrapper's module waits for its kernels. Modules of Inductor's caches get there,
too.

A graph stays one function, whose inputs and allocations are pinned, if its wrapper is C++ (`cpp_wrapper`), if it
replays CUDA graphs, or if its kernels are given bare addresses. What was compiled before the allocator was turned on is
compiled anew, as Dynamo guards the dispatch keys of tensors, of which ours is one.
"""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

from ooc.pytorch.patches import Patches

log = logging.getLogger("ooc.pytorch")

_OUTPUT_CODE, _ASYNC_COMPILE = "torch._inductor.output_code", "torch._inductor.async_compile"
_KERNEL = re.compile(r"^(\w+) = async_compile\.(\w+)\((?:(\[.*?\]),)?", re.MULTILINE)
_TAKE_TENSORS = ("cpp_pybinding", "triton", "multi_kernel")  # of async_compile; the rest take addresses
_OPENED = "_ooc_functions"  # an attribute of graphs: their kernels are functions
_opened_modules: set[str] = set()  # by the name that the compiled graph has for its module


def install(patches: Patches) -> None:
    """Opens what Inductor compiles, from now or from the first `torch.compile` on."""
    installed = False

    def wrap() -> None:
        nonlocal installed
        if not installed:
            installed = True
            graph = importlib.import_module(_OUTPUT_CODE).CompiledFxGraph
            patches.replace(graph, "post_compile", _note_whether_opened)
            patches.replace(graph, "__call__", _call)
            patches.replace(importlib.import_module(_ASYNC_COMPILE).AsyncCompile, "wait", _wait)

    def compile_wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            wrap()
            return plain(*args, **kwargs)

        compile.__doc__ = plain.__doc__
        return compile

    if _OUTPUT_CODE in sys.modules:
        wrap()
    else:
        patches.replace(torch, "compile", compile_wrapped)


class KernelFunction:
    """A generated kernel that runs as a function of ours.

    `reads` says of the first positional arguments which of them the kernel only reads; what is not said it may write.
    """

    def __init__(self, name: str, kernel: Any, reads: list[bool]) -> None:
        self.__name__, self.kernel, self._reads = name, kernel, reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.kernel, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """How Triton's kernels are launched."""
        return self._run(self.kernel.run, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def _run(self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for value, reads in zip(chain(args, kwargs.values()), chain(self._reads, repeat(False))):
            if not isinstance(value, torch.Tensor):
                value = getattr(value, "base", None)  # of Triton's descriptors of tensors
            if isinstance(value, torch.Tensor):
                tensors[reads].append(value)
        opened = torch.ops.ooc.scope_begin.default(self.__name__, *tensors)
        try:
            return kernel(*args, **kwargs)
        finally:
            if opened:
                torch.ops.ooc.scope_end.default([])


def _wait(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, scope: dict[str, Any]) -> None:
        plain(self, scope)
        source = _source(scope)
        kernels = _KERNEL.findall(source)
        if not source or "CppWrapperCodeCache" in source or any(kind not in _TAKE_TENSORS for _, kind, _ in kernels):
            return
        for name, kind, types in kernels:
            scope[name] = KernelFunction(name, scope[name], _reads(kind, types, scope[name]))
        _opened_modules.add(scope["__name__"].rpartition(".")[2])

    return wait


def _source(scope: dict[str, Any]) -> str:
    """Of a module that Inductor wrote; empty if it cannot be read."""
    try:
        return Path(scope["__file__"]).read_text()
    except (KeyError, OSError):
        return ""


def _reads(kind: str, types: str, kernel: Any) -> list[bool]:
    if kind == "cpp_pybinding":
        return [str(type).startswith("const ") for type in ast.literal_eval(types)]
    names = getattr(getattr(kernel, "fn", None), "arg_names", [])
    written = (getattr(kernel, "inductor_meta", None) or {}).get("mutated_arg_names", [])
    return [re.fullmatch(r"in_ptr\d+", name) is not None and name not in written for name in names]


def _note_whether_opened(plain: Callable[..., Any]) -> Callable[..., Any]:
    def post_compile(self: Any, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        plain(self, example_inputs, constants, graph_kwargs)
        opened = self.cache_key in _opened_modules and not graph_kwargs.get("cudagraphs")
        setattr(self, _OPENED, opened)
        if not opened:
            log.warning(
                "a compiled graph is one function, all of which must fit: its wrapper is C++, it replays CUDA graphs, "
                "or its kernels take addresses (docs/compatibility.md)"
            )

    return post_compile


def _call(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any) -> Any:
        if getattr(self, _OPENED, False) or torch.ops.ooc.in_scope():
            return plain(self, inputs)
        return _call_as_one_function(plain, self, inputs)

    return call


def _call_as_one_function(plain: Callable[..., Any], graph: Any, inputs: Any) -> Any:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    tensors += [value for value in (graph.constants or {}).values() if isinstance(value, torch.Tensor)]
    opened = torch.ops.ooc.scope_begin(f"compiled_graph:{graph.cache_key or ''}", tensors, [])
    del tensors  # so that the graph can free its inputs as it goes
    torch.ops.ooc.intercept_thread(False)
    results: Any = ()
    try:
        results = plain(graph, inputs)
        return results
    finally:
        torch.ops.ooc.intercept_thread(True)
        if opened:
            torch.ops.ooc.scope_end([value for value in results if isinstance(value, torch.Tensor)])
