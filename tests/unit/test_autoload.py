"""What `import torch` does with settings: it stops the program where they cannot be used, and only there."""

from __future__ import annotations

import pytest

from integrations import pytorch
from integrations.pytorch.autoload import activate
from ooc_alloc import OocError
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
