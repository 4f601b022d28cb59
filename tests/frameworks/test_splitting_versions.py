"""A verdict is on the code that divided: an edit of that code voids it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ooc.pytorch import build
from ooc.pytorch.splitting import conditions
from ooc.pytorch.splitting.calls import Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.registry import Handler
from ooc.pytorch.splitting.runtime import Runtime


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the handlers' folder and of what lies beside it, whose files count as the sources."""
    made = tmp_path / "splitting"
    shutil.copytree(conditions.FOLDER, made, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(conditions.FOLDER.parent / "winograd.py", tmp_path)
    monkeypatch.setattr(conditions, "FOLDER", made)
    conditions.version.cache_clear()
    yield made
    conditions.version.cache_clear()


def edit(folder: Path, name: str) -> None:
    with open(folder / name, "a", encoding="utf-8") as file:
        file.write("\n# edited\n")
    conditions.version.cache_clear()


@pytest.mark.parametrize("name", ["tables.py", "parts.py", "kernels.py", "../winograd.py"])
def test_an_edit_is_another_version(folder: Path, name: str) -> None:
    before = conditions.version(), conditions.library()
    edit(folder, name)
    assert conditions.version() != before[0] and conditions.library() != before[1]


class Core:
    """As much of a core as deciding takes."""

    def stats(self) -> dict[str, int]:
        return {"budget_bytes": 16 << 20, "slab_bytes": 0, "chunk_bytes": 1 << 16}


def test_a_verdict_is_kept_until_an_edit(folder: Path) -> None:
    build.load()
    compared: list[Tensor] = []

    def run(values: Tensor) -> Tensor:
        compared.append(values)
        return torch.cat([values[:1].sum(1), values[1:].sum(1)])

    def handler(context: Context, values: Tensor) -> Tensor:
        context.choose("", [Split("rows", 2, run)], lambda whole: whole.sum(1))
        return values.sum(1)

    def compares() -> bool:
        """In a session of its own, of all that is known only the file is there."""
        compared.clear()
        runtime = Runtime(Core(), "exact", folder.parent / "store.sqlite")  # type: ignore[arg-type]
        runtime.run("aten::sum.dim_IntList", Handler(handler), False, (torch.ones(5000, 3),), {})
        return bool(compared)

    assert compares() and not compares()
    edit(folder, "tables.py")
    assert compares() and not compares()


def child(text: str) -> str:
    """The output of a process of its own, in which nothing was imported yet."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=True
    ).stdout


def test_each_operator_is_registered_once() -> None:
    """And every module with handlers is in the list of those that are imported."""
    answer = child("""
        import pkgutil
        import sys
        import ooc.pytorch.splitting as package
        from ooc.pytorch.splitting import registry

        class Once(dict):
            def __setitem__(self, name, handler):
                assert name not in self, (name, handler, self[name])
                super().__setitem__(name, handler)

        registry.named = Once()
        assert not any(f"{package.__name__}.{name}" in sys.modules for name in registry.MODULES)
        registry.find("aten::dot")
        assert len(registry.named) > 100
        known = set(registry.named), list(registry.finders)
        for module in pkgutil.iter_modules(package.__path__):
            if module.name not in ("layers", "measure"):  # for `swapd split`
                __import__(f"{package.__name__}.{module.name}")
        assert known == (set(registry.named), list(registry.finders))
        print("once")
    """)
    assert answer == "once\n"


def test_no_operator_is_of_two_families() -> None:
    """Else it would depend on the order of imports who divides it."""
    answer = child("""
        import torch
        from ooc.pytorch.splitting import registry
        registry.find("aten::dot")
        known = 0
        for name in torch._C._dispatch_get_all_op_names():
            overload = registry.overload_of(name)
            who = [find.__module__ for find in registry.finders if overload is not None and find(overload) is not None]
            assert len(who) <= 1, (name, who)
            known += len(who)
        print(known > 500)
    """)
    assert answer == "True\n"
