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
import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

from ooc.pytorch import kernel_groups, source_lines
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
            kernel_groups.install(patches)
            source_lines.install(patches)

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

    Args:
        name: of the function; calls whose source lines are known have these in their functions' names.
        kernel: what is called.
        reads: of the first positional arguments, whether the kernel only reads it; what is not said it may write.
        pointers: how many of the first positional arguments are all its tensors, if that is known.
    """

    def __init__(self, name: str, kernel: Any, reads: list[bool], pointers: int | None = None) -> None:
        self.__name__, self.kernel, self._reads = name, kernel, reads
        self.lines: dict[int, str] = {}  # words for source lines, by the line of the generated module that calls
        self._functions: dict[tuple[int, int], int] = {}  # numbers of functions, by the place in the code that calls
        # Where the reads are a slice of the arguments, as they are in C++, nothing has to be looked at in a call.
        first, count = (reads.index(True) if True in reads else 0), sum(reads[:pointers])
        self._pointers = pointers if pointers is not None and all(reads[first : first + count]) else None
        self._first, self._end = first, first + count

    @functools.cached_property
    def _begin(self) -> Callable[..., bool]:
        """Without what Python puts around an operator, which is a quarter of the call."""
        operator: Callable[..., bool] = torch.ops.ooc.kernel_begin.default._op
        return operator

    @functools.cached_property
    def _finish(self) -> Callable[[], None]:
        operator: Callable[[], None] = torch.ops.ooc.kernel_end.default._op
        return operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pointers is None or kwargs:
            return self._run(self.kernel, args, kwargs)
        opened = self._begin(self._function(1), args[: self._pointers], self._first, self._end)
        try:
            return self.kernel(*args)
        finally:
            if opened:
                self._finish()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """How Triton's kernels are launched."""
        return self._run(self.kernel.run, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def operands(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[torch.Tensor], int, int]:
        """The tensors among a call's arguments; those from the first number to before the second are only read."""
        if self._pointers is not None and not kwargs:
            return args[: self._pointers], self._first, self._end
        tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for value, only_read in zip(chain(args, kwargs.values()), chain(self._reads, repeat(False))):
            if not isinstance(value, torch.Tensor):
                value = getattr(value, "base", None)  # of Triton's descriptors of tensors
            if isinstance(value, torch.Tensor):
                tensors[only_read].append(value)
        written, read = tensors
        return written + read, len(written), len(written) + len(read)

    def _run(self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = self._begin(self._function(2), *self.operands(args, kwargs))
        try:
            return kernel(*args, **kwargs)
        finally:
            if opened:
                self._finish()

    def _function(self, depth: int) -> int:
        """The number of the function that a call is, from so many frames above."""
        frame = sys._getframe(depth + 1)
        place = (id(frame.f_code), frame.f_lasti)  # to find the line takes longer
        number = self._functions.get(place)
        if number is None:
            number = torch.ops.ooc.function_id(self.name_at(frame.f_lineno))
            if number >= 0:
                self._functions[place] = number
        return number

    def name_at(self, line: int) -> str:
        """The name of the function that a call in this line of the generated module is."""
        return f"{self.__name__} at {self.lines[line]}" if self.lines.get(line) else self.__name__


def line_of_caller(depth: int) -> int:
    """The line that runs now, so many frames above the one that asks."""
    return sys._getframe(depth + 1).f_lineno


def _wait(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, scope: dict[str, Any]) -> None:
        plain(self, scope)
        if open_module(scope, KernelFunction):
            _opened_modules.add(scope["__name__"].rpartition(".")[2])

    return wait


def open_module(scope: dict[str, Any], make: Callable[..., KernelFunction]) -> bool:
    """Replaces a generated module's kernels. Returns false, and does nothing, where some of them take addresses."""
    source = _source(scope)
    kernels = _KERNEL.findall(source)
    if not source or "CppWrapperCodeCache" in source or any(kind not in _TAKE_TENSORS for _, kind, _ in kernels):
        return False
    for name, kind, types in kernels:
        pointers = types.count("*") if kind == "cpp_pybinding" else None
        scope[name] = make(name, scope[name], _reads(kind, types, scope[name]), pointers)
    for line, (name, lines) in source_lines.calls_of(source).items():
        if isinstance(scope.get(name), KernelFunction):
            scope[name].lines[line] = lines
    return True


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
