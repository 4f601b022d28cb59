"""Compiled graphs in fake mode: Inductor compiles as always, and its kernels are recorded instead of run.

Dynamo traces programs on fake tensors if the modes around them are PyTorch's own, and so `FakeRun` says that it is one.
What Inductor compiles is what it compiles where our allocator is on, in the same caches. Of a generated module four
kinds of things reach behind the dispatcher, and are replaced here: its kernels, its allocations, its views, and its
checks of alignment. While no fake run is on they do what they did.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ooc.pytorch import compiled, kernel_groups, source_lines
from ooc.pytorch.patches import Patches

if TYPE_CHECKING:
    from ooc.pytorch.fake_mode import FakeRun

_run: FakeRun | None = None


@contextmanager
def recording_kernels(run: FakeRun) -> Iterator[None]:
    """Until the end of the block, graphs tell `run` of their kernels. Inductor is imported where it is used."""
    global _run
    with Patches() as patches:
        if "torch._dynamo" in sys.modules:
            _install(patches)
        else:
            patches.replace(torch, "compile", functools.partial(_compile, patches))
        _run = run
        try:
            yield
        finally:
            _run = None


def _compile(patches: Patches, plain: Callable[..., Any]) -> Callable[..., Any]:
    install = functools.cache(_install)  # once

    def compile_faked(*args: Any, **kwargs: Any) -> Any:
        install(patches)
        return plain(*args, **kwargs)

    return compile_faked


def _install(patches: Patches) -> None:
    patches.replace(importlib.import_module("torch._inductor.async_compile").AsyncCompile, "wait", _wait)
    kernel_groups.install(patches)
    source_lines.install(patches)
    # Modules that were loaded before have kernels that run.
    importlib.import_module("torch._inductor.codecache").PyCodeCache.cache_clear()


def _wait(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, scope: dict[str, Any]) -> None:
        plain(self, scope)
        if not compiled.open_module(scope, FakeKernel):
            return
        for device in ("cpu", "cuda"):
            _replace(scope, f"empty_strided_{device}", _empty_strided)
        _replace(scope, "reinterpret_tensor", _reinterpret)
        _replace(scope, "assert_alignment", lambda *args: None)

    return wait


def _replace(scope: dict[str, Any], name: str, fake: Callable[..., Any]) -> None:
    plain = scope.get(name)
    if plain is not None:
        scope[name] = lambda *args: plain(*args) if _run is None else fake(*args)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    assert _run is not None
    return _run.allocate(size, stride, dtype)


def _reinterpret(base: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(base, size, stride, base.storage_offset() + offset)


class FakeKernel(compiled.KernelFunction):
    """A generated kernel that is recorded if a fake run is on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _run is None:
            return self.kernel(*args, **kwargs)
        self._record(_run, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """How Triton's kernels are launched."""
        if _run is None:
            return self.kernel.run(*args, **kwargs)
        self._record(_run, args, kwargs)

    def _record(self, run: FakeRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run.kernel(self.name_at(compiled.line_of_caller(2)), *self.operands(args, kwargs))
