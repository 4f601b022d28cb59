"""What `import torch` does with settings: it stops the program where they cannot be used, and only there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ooc import pytorch
from ooc_alloc import OocError
from ooc_alloc.autoload import activate
from swapd.config import ConfigError
from swapd.session import SESSION_OF


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_ALLOC", "emulated")
    monkeypatch.delenv(SESSION_OF, raising=False)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OOC_ALLOC", "gpu"),
        ("OOC_BUDGET", "0"),
        ("OOC_BUDGET", "-1"),
        ("OOC_BUDGET", "12potatoes"),
        ("OOC_BUDGET", "500%"),
        ("OOC_HOST_BUDGET", "none"),
        ("OOC_POLICY", "best"),
        ("OOC_SPLIT", "sometimes"),
        ("OOC_STRICT", "maybe"),
        ("OOC_METRICS_PORT", "99999"),
        ("OOC_EMULATED_MEMORY", "lots"),
    ],
)
def test_a_value_that_cannot_be_used_stops_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:  # PyTorch would wrap an Exception and advise to switch us off
        activate()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ooc_alloc: {variable}=") and repr(value) in line and "use for example" in line
    assert "the program was stopped" in line
    assert not pytorch.enabled()


def test_nothing_is_looked_at_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_ALLOC", "0")
    monkeypatch.setenv("OOC_BUDGET", "12potatoes")
    activate()


@pytest.mark.parametrize("error", [OocError("no driver"), OSError("no disk"), ConfigError("less memory is free now")])
def test_what_the_machine_cannot_do_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(pytorch, "enable", fail)
    if isinstance(error, ConfigError):  # a worker of a process that could use the same settings
        monkeypatch.setenv(SESSION_OF, "1:/")
    activate()
    assert capsys.readouterr().err == f"ooc_alloc: not active, the program runs in plain memory: {error}\n"


# ---- off -----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
AT_THE_END_OF_IMPORT_TORCH = """
import importlib, sys
before = set(sys.modules)
module, function = sys.argv[1].split(":")
getattr(importlib.import_module(module), function)()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_it_imports_the_standard_library_alone_where_it_is_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    (entry,) = re.findall(r'^ooc_alloc = "(.+:.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    monkeypatch.setenv("OOC_ALLOC", value)
    command = [sys.executable, "-c", AT_THE_END_OF_IMPORT_TORCH, entry]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "['ooc_alloc']\n")
