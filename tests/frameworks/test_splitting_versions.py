"""A verdict is on the code that divided: an edit of that code voids it, no other edit does."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ooc.pytorch.splitting as package
from ooc.pytorch import build
from ooc.pytorch.splitting import conditions
from ooc.pytorch.splitting.calls import Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.registry import Handler
from ooc.pytorch.splitting.runtime import Runtime

LINEAR = f"{package.__name__}.linear"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the handlers' folder, whose files count as the sources."""
    made = tmp_path / "splitting"
    shutil.copytree(conditions.FOLDER, made, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(conditions, "FOLDER", made)
    conditions.version.cache_clear()
    yield made
    conditions.version.cache_clear()


def edit(folder: Path, name: str) -> None:
    with open(folder / name, "a", encoding="utf-8") as file:
        file.write("\n# edited\n")
    conditions.version.cache_clear()


@pytest.mark.parametrize("name", ["linear.py", "dividers.py", "parts.py", "context.py", "geometry.py"])
def test_an_edit_of_what_a_handler_is_made_of_is_another_version(folder: Path, name: str) -> None:
    before = conditions.version(LINEAR)
    edit(folder, name)
    assert conditions.version(LINEAR) != before


@pytest.mark.parametrize("name", ["pooling.py", "convolution.py", "movement.py", "runtime.py", "operators.py"])
def test_an_edit_of_anything_else_is_the_same_version(folder: Path, name: str) -> None:
    before = conditions.version(LINEAR)
    edit(folder, name)
    assert conditions.version(LINEAR) == before


def test_the_costs_of_kernels_are_of_the_code_that_runs_and_times_them(folder: Path) -> None:
    module = f"{package.__name__}.measure"
    versions = [conditions.version(module)]
    for name in ("context.py", "kernels.py", "measure.py"):
        edit(folder, name)
        versions.append(conditions.version(module))
    assert versions[0] == versions[1] and len(set(versions)) == 3


def test_a_handler_from_elsewhere_has_the_version_of_its_own_file_and_of_what_it_imports(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(folder.parent / "program.py"))
    program = folder.parent / "program.py"
    program.write_text("from ooc.pytorch.splitting.context import Context\n")
    versions = [conditions.version(__name__)]
    edit(folder, "pooling.py")
    assert conditions.version(__name__) == versions[0]
    edit(folder, "context.py")
    versions.append(conditions.version(__name__))
    program.write_text("from ooc.pytorch.splitting import context\n")
    conditions.version.cache_clear()
    versions.append(conditions.version(__name__))
    assert len(set(versions)) == 3
    assert conditions.version("typed at a prompt")
    assert conditions.version("_ctypes")  # which is no text


def test_the_package_itself_has_no_code() -> None:
    """What every handler imports without saying so; it is in no version."""
    (text,) = ast.parse((conditions.FOLDER / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)


class Core:
    """As much of a core as deciding takes."""

    def stats(self) -> dict[str, int]:
        return {"budget_bytes": 16 << 20, "slab_bytes": 0, "chunk_bytes": 1 << 16}


def test_a_verdict_is_kept_by_an_unrelated_edit_and_voided_by_a_related_one(folder: Path) -> None:
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
        runtime = Runtime(Core(), "exact", folder.parent / "store.jsonl")  # type: ignore[arg-type]
        runtime.run("aten::sum.dim_IntList", Handler(handler, LINEAR), False, (torch.ones(5000, 3),), {})
        return bool(compared)

    assert compares() and not compares()
    edit(folder, "pooling.py")
    assert not compares()
    edit(folder, "linear.py")
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
        from ooc.pytorch.splitting import operators, registry

        class Once(dict):
            def __setitem__(self, name, handler):
                assert name not in self, (name, handler, self[name])
                super().__setitem__(name, handler)

        registry.named = Once()
        assert not any(f"{package.__name__}.{name}" in sys.modules for name in operators.MODULES)
        operators.find("aten::dot")
        assert len(registry.named) > 100
        found = {handler.module for handler in registry.named.values()} | {f.__module__ for f in registry.finders}
        assert found == {f"{package.__name__}.{name}" for name in operators.MODULES}, found
        for module in pkgutil.iter_modules(package.__path__):
            if module.name not in ("layers", "measure"):  # for `swapd split`
                __import__(f"{package.__name__}.{module.name}")
        assert len(found) == len({h.module for h in registry.named.values()} | {f.__module__ for f in registry.finders})
        print("once")
    """)
    assert answer == "once\n"


def test_no_operator_is_of_two_families() -> None:
    """Else it would depend on the order of imports who divides it."""
    answer = child("""
        import torch
        from ooc.pytorch.splitting import operators, registry
        operators.find("aten::dot")
        known = 0
        for name in torch._C._dispatch_get_all_op_names():
            overload = registry.overload_of(name)
            who = [find.__module__ for find in registry.finders if overload is not None and find(overload) is not None]
            assert len(who) <= 1, (name, who)
            known += len(who)
        print(known > 500)
    """)
    assert answer == "True\n"
