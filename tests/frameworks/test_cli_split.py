"""`swapd split`: what it shows is what the program does with the same settings, and clear words where it cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, run, run_source, write_script

from swapd.cli import main
from swapd.config import Config

SCRIPT = """
import torch
from torch import nn

def make(batch, mode="inference", size=16):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * (size // 2) ** 2, 64),
    )
    x = torch.randn(batch, 3, size, size)
    def infer():
        with torch.no_grad():
            model.eval()(x)
    return infer if mode == "inference" else lambda: model(x).sum().backward()

def nothing(batch):
    return 7

def fails(batch):
    return lambda: torch.empty(2, 3) @ torch.empty(2, 3)
"""


def swapd(*arguments: object, store: Path | None = None, status: int = 0) -> tuple[str, str]:
    """What `swapd split` prints, and its errors."""
    variables = {} if store is None else {"OOC_SPLIT_STORE": str(store)}
    ended = run([HERE / "command.py", "split", *map(str, arguments)], variables)
    assert ended.status == status, f"{ended.output}\n{ended.errors}"
    return ended.output, ended.errors


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("split"), SCRIPT, "small.py")


def facts(*arguments: object, store: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(swapd("--json", *arguments, store=store)[0])
    return found


@pytest.mark.medium
def test_it_shows_what_a_program_does(script: Path, tmp_path: Path) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(script.parent)!r})
        import ooc.pytorch, small
        step = small.make(2, size=32)
        for _ in range(4):
            step()
            ooc.pytorch.step()
            ooc.pytorch._active().split_rows()  # waits for verdicts
    """
    path = tmp_path / "store.sqlite"
    settings = {"OOC_BUDGET": "800KiB", "OOC_SPLIT_STORE": str(path), "OOC_CHUNK_SIZE": "64KiB"}
    done = run_source(tmp_path, program, **settings).check()
    arguments = ["--budget", "800KiB", "--chunk-size", "64KiB", "--batch", 2, f"{script}:make", "size=32"]
    found = facts(*arguments, store=path)
    (ran,) = [row for row in done.figures["split_layers"] if row["operator"] == "aten::addmm"]
    assert ran["calls"] >= 3 and found["layers"] == [ran | {"calls": 1}]
    assert found["budget_bytes"] == 800 << 10 >= found["device_peak_bytes"] > 0
    assert found["functions"] > ran["parts"] and found["policy"] == "auto" and found["seconds"] > 0
    shown, _ = swapd(*arguments, store=path)
    assert "aten::addmm" in shown and ran["how"] in shown and "the same" in shown
    assert "Most at once" in shown and "small.py:make, batch 2, within 800 KiB" in shown


@pytest.mark.slow
def test_the_settings_count(script: Path, tmp_path: Path) -> None:
    arguments = ["--budget", "16MiB", "--batch", 16, f"{script}:make", "mode=training", "size=64"]
    path = tmp_path / "store.sqlite"
    assert facts(*arguments, store=path)["layers"] == []
    divided = facts("--split", "fast", "--workspace", "64KiB", *arguments, store=path)
    assert divided["split"] == "fast"
    assert any(row["operator"] == "aten::convolution" and row["parts"] > 1 for row in divided["layers"])


@pytest.mark.slow
def test_a_model_with_a_name_by_both_rules(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    ours, theirs = (facts("--budget", "10MB", "--policy", p, "alexnet", store=path) for p in ("auto", "mmcnn"))
    for found in (ours, theirs):
        assert [row["operator"] for row in found["layers"]] == ["aten::addmm"] * 3
        assert all(row["exact"] for row in found["layers"]) and found["device_peak_bytes"] <= 10_000_000
    mine, mmcnns = ([row["parts"] for row in found["layers"]] for found in (ours, theirs))
    assert all(fewer < more for fewer, more in zip(mmcnns, mine))  # a part of theirs may take the whole budget
    assert mmcnns[0] >= 16  # 144 MiB of weights


@pytest.mark.medium
def test_a_budget_that_is_too_small(script: Path, tmp_path: Path) -> None:
    _, errors = swapd("--budget", "64KiB", f"{script}:make", "size=64", store=tmp_path / "none.jsonl", status=1)
    assert "small.py:make" in errors and "OOC_BUDGET" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("there_is_none", "no model 'there_is_none'; there are resnet50", marks=pytest.mark.slow),
        ("missing.py:make", "cannot load missing.py"),
        pytest.param("{}:other", "has no function 'other'", marks=pytest.mark.slow),
        pytest.param("{}:nothing", "must return a function", marks=pytest.mark.slow),
    ],
)
def test_models_that_are_none(script: Path, model: str, words: str) -> None:
    _, errors = swapd("--budget", "1MiB", model.format(script), status=1)
    assert words in errors and "Traceback" not in errors


@pytest.mark.slow
def test_a_model_that_fails_says_where(script: Path) -> None:
    _, errors = swapd("--budget", "1MiB", f"{script}:fails", status=1)
    assert "RuntimeError" in errors and "could not be found out" in errors


@pytest.mark.slow
def test_arguments_that_the_model_does_not_take(script: Path) -> None:
    _, errors = swapd("--budget", "1MiB", f"{script}:make", "depth=3", status=1)
    assert "cannot be built" in errors and "depth" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{}:make"], "--budget"),
        (["--budget", "soon", "{}:make"], "soon"),
        (["--budget", "1MiB", "{}:make", "size"], "no NAME=VALUE"),
        (["--budget", "1MiB", "--policy", "some", "{}:make"], "some"),
    ],
)
def test_wrong_command_lines(script: Path, arguments: list[str], words: str) -> None:
    _, errors = swapd(*[argument.format(script) for argument in arguments], status=2)
    assert words in errors


@pytest.mark.parametrize(
    "order",
    [
        ["--budget", "20MiB", "AlexNet", "mode=training"],
        ["AlexNet", "--budget", "20MiB", "mode=training"],
        ["AlexNet", "mode=training", "--budget=20MiB"],
    ],
)
def test_options_of_split_come_in_any_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], order: list[str]
) -> None:
    def run_program(arguments: list[str], config: Config, stdout_is_ours: bool) -> int:
        wanted = json.loads(arguments[2])
        assert (wanted["program"], wanted["arguments"]) == ("AlexNet", {"mode": "training"})
        assert config.budget is not None and config.budget.bytes == 20 << 20 and stdout_is_ours
        return 1

    monkeypatch.setattr("swapd.cli.split.run_program", run_program)
    assert main(["split", *order]) == 1
    assert "how AlexNet runs could not be found out" in capsys.readouterr().err
