"""The rule between packages, enforced by reading every import statement: ooc -> swapd -> ooc_alloc."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"ooc_alloc": ROOT, "swapd": ROOT, "ooc": ROOT / "integrations"}  # each may import those before it
FRAMEWORKS = {"torch", "torchvision", "transformers", "accelerate", "lightning", "cupy", "numba", "jax", "tensorflow"}
# Only where they are used.
LAZY = {"accelerate", "cuda", "cupy", "grafana_foundation_sdk", "lightning", "matplotlib", "numba", "safetensors"}
LAZY |= {"scipy", "sklearn", "transformers"}

# Ways into C, each of which one file alone takes.
INTO_C = {"cffi": "ooc_alloc/library.py", "ctypes": "ooc_alloc/built_ins.py", "_ctypes": "ooc_alloc/built_ins.py"}
ENTRY_POINT = "ooc_alloc/autoload.py"  # turns everything on, and until then imports nothing of it


class Import(NamedTuple):
    file: str
    line: int
    module: str
    at_top: bool  # runs when the file is imported


def imports_of(file: str, text: str) -> list[Import]:
    """Every import in a file's text, those in functions and conditions included; ``TYPE_CHECKING`` blocks left out."""
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(file, node.lineno, name.name, at_top) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            found.append(Import(file, node.lineno, node.module or "", at_top))
            found.extend(Import(file, node.lineno, f"{node.module}.{name.name}", at_top) for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child, at_top)
        else:
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                visit(child, at_top and not is_function)

    visit(ast.parse(text), True)
    return found


def all_imports() -> list[Import]:
    return [
        found
        for package, folder in PACKAGES.items()
        for path in sorted((folder / package).rglob("*.py"))
        for found in imports_of(path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))
    ]


def violations(imports: list[Import]) -> list[str]:
    """A line for each import that breaks a rule."""
    broken = []
    for found in imports:
        package, target = found.file.split("/")[0], found.module.split(".")[0]
        later = list(PACKAGES)[list(PACKAGES).index(package) + 1 :]
        where = f"{found.file}:{found.line} imports {found.module}"
        if target in later and (found.file != ENTRY_POINT or found.at_top):
            broken.append(f"{where}: {package} may not know {target}")
        if package != "ooc" and target in FRAMEWORKS:
            broken.append(f"{where}: {package} may not know a framework")
        if target in LAZY and found.at_top and not may_import_at_top(found.file, target):
            broken.append(f"{where} when it is loaded: optional libraries are imported where they are used")
        if target in INTO_C and found.file != INTO_C[target]:
            looks_up = found.module == "ctypes.util"
            allowed = looks_up and found.file == "swapd/devices/doctor.py"
            if not allowed:
                broken.append(f"{where}: {target} lives in {INTO_C[target]}")
    return broken


def may_import_at_top(file: str, target: str) -> bool:
    """An integration's own module is imported by those who use that library."""
    return file.startswith(f"ooc/{target}")


def test_the_rule_holds() -> None:
    imports = all_imports()
    assert {found.file.split("/")[0] for found in imports} == set(PACKAGES)
    assert len(imports) > 100
    assert violations(imports) == []


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other, each group sorted (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        path.append(name)
        for target in arrows[name]:
            if target not in number:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in path:
                lowest[name] = min(lowest[name], number[target])
        if lowest[name] == number[name]:
            group = path[path.index(name) :]
            del path[path.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in arrows:
        if name not in number:
            visit(name)
    return found


def module_arrows() -> dict[str, set[str]]:
    """For each module of ours, the modules of ours that it imports anywhere, ``TYPE_CHECKING`` blocks included."""
    modules = {}
    for package, folder in PACKAGES.items():
        for path in (folder / package).rglob("*.py"):
            modules[".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")] = path
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        text = path.read_text(encoding="utf-8").replace("if TYPE_CHECKING:", "if True:")
        named = {found.module for found in imports_of(name, text) if found.module in modules} - {name}
        # `from package import module` names the package too, which is not what it needs.
        arrows[name] = {one for one in named if not any(other.startswith(f"{one}.") for other in named)}
    return arrows


def test_no_circle_of_imports() -> None:
    arrows = module_arrows()
    assert len(arrows) > 100 and "swapd.planning.plan" in arrows["swapd.planner"]
    assert circles(arrows) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ooc_alloc/x.py", "import swapd.planning.plan"),
        ("ooc_alloc/x.py", "from ooc import numpy"),
        (ENTRY_POINT, "import swapd.config"),
        ("swapd/x.py", "def f():\n    from ooc.pytorch import build"),
        ("swapd/x.py", "if True:\n    import torch.nn as nn"),
        ("ooc_alloc/x.py", "try:\n    from torch import Tensor\nexcept ImportError:\n    pass"),
        ("swapd/x.py", "import cuda.bindings"),
        ("ooc/pytorch/x.py", "from scipy import optimize"),
        ("ooc/pytorch/x.py", "import ctypes"),
        ("swapd/devices/doctor.py", "import ctypes"),
        ("ooc_alloc/library.py", "import ctypes"),
        ("ooc_alloc/core.py", "from cffi import FFI"),
        ("swapd/x.py", "class C:\n    import matplotlib"),
        ("swapd/x.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
    ],
)
def test_each_way_to_break_it_is_seen(file: str, text: str) -> None:
    assert violations(imports_of(file, text))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("swapd/x.py", "from ooc_alloc import Core\nimport numpy as np"),
        ("ooc/x.py", "import torch\nfrom swapd.config import Config\nimport ooc_alloc"),
        ("swapd/x.py", "def f():\n    import cuda.bindings"),
        ("swapd/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("ooc/cupy.py", "import cupy"),
    ],
)
def test_what_is_allowed_passes(file: str, text: str) -> None:
    assert violations(imports_of(file, text)) == []


@pytest.mark.parametrize(
    "module",
    ["ooc_alloc", "swapd.planner", "swapd.cli", "swapd.devices.doctor", "swapd.devices.probe", "swapd.policies"],
)
def test_loading_a_module_loads_no_framework(module: str) -> None:
    heavy = sorted(FRAMEWORKS | LAZY)
    text = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_unit_tests_need_no_framework() -> None:
    paths = sorted((ROOT / "tests" / "unit").glob("*.py"))
    found = [one for path in paths for one in imports_of(path.name, path.read_text(encoding="utf-8"))]
    assert len(found) > 100
    assert [f"{one.file}:{one.line}" for one in found if one.module.split(".")[0] in FRAMEWORKS] == []
