"""`swapd split`: a small model's plan with and without measurements, and clear words where there is none."""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, run, run_source, write_script

from swapd.cli import main
from swapd.cli.output import Failure

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

def depends(batch):
    x = torch.randn(batch)
    return lambda: torch.nonzero(x)

def nothing(batch):
    return 7
"""
NAMES = ["convolution", "relu_", "max_pool2d_with_indices", "convolution", "addmm"]
WEIGHTS = [4 * (8 * 27 + 8), 0, 0, 4 * (16 * 72 + 16), 4 * (1024 * 64 + 64)]


def swapd(*arguments: object, store: Path | None = None, status: int = 0) -> tuple[str, str]:
    """What `swapd split` prints, and its errors."""
    variables = {} if store is None else {"OOC_SPLIT_STORE": str(store)}
    ended = run([HERE / "command.py", "split", *map(str, arguments)], variables)
    assert ended.status == status, f"{ended.output}\n{ended.errors}"
    return ended.output, ended.errors


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script(tmp_path_factory.mktemp("split"), SCRIPT, "small.py")


@pytest.fixture(scope="module")
def store(script: Path) -> Path:
    """Filled by the first test that asks for it."""
    path = script.with_name("store.jsonl")
    swapd("--budget", "1MiB", "--batch", 4, "--measure", f"{script}:make", store=path)
    return path


def facts(*arguments: object, store: Path | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(swapd("--json", *arguments, store=store)[0])
    return found


@pytest.mark.slow
def test_layers_hold_what_the_model_holds(script: Path, tmp_path: Path) -> None:
    found = facts("--budget", "1MiB", "--batch", 4, f"{script}:make", store=tmp_path / "none.jsonl")
    assert [layer["name"].partition(" ")[2] for layer in found["layers"]] == NAMES
    assert [layer["weight_bytes"] for layer in found["layers"]] == WEIGHTS
    assert [layer["input_bytes"] for layer in found["layers"]] == [12288, 32768, 32768, 8192, 16384]
    assert [layer["output_bytes"] for layer in found["layers"]] == [32768, 0, 8192 + 16384, 16384, 1024]
    assert {layer["self_number"] for layer in found["layers"]} == {1}
    assert not found["training"] and found["peak_bytes"] <= 1 << 20


@pytest.mark.slow
def test_without_measurements_it_shows_memory_and_says_so(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    found = facts("--budget", "1MiB", f"{script}:make", store=path)
    assert found["kernels_not_measured"] == 2 and found["front"] == [] and found["measurements"] == 0
    assert {layer["seconds"] for layer in found["layers"]} == {None}
    shown, _ = swapd("--budget", "1MiB", f"{script}:make", store=path)
    assert "2 of 2 kernels of convolutions are not measured" in shown and "--measure" in shown


@pytest.mark.slow
def test_with_measurements_there_are_times_and_a_front(script: Path, store: Path) -> None:
    found = facts("--budget", "1MiB", "--batch", 4, f"{script}:make", store=store)
    assert found["kernels_not_measured"] == found["measurements"] == 0
    timed = [layer for layer in found["layers"] if layer["kernels"]]
    assert all(layer["seconds"] > 0 and layer["workspace_bytes"] >= 0 for layer in timed) and len(timed) == 2
    assert sum(size for size, _ in timed[0]["kernels"][0]["parts"]) == 4
    times = [point["seconds"] for point in found["front"]]
    assert times and times == sorted(times, reverse=True)
    shown, _ = swapd("--budget", "1MiB", "--batch", 4, f"{script}:make", store=store)
    assert "Times were measured on" in shown and "by the workspace that they share" in shown


@pytest.mark.slow
def test_what_the_store_has_is_not_measured_again(script: Path, store: Path) -> None:
    found = facts("--budget", "1MiB", "--batch", 4, "--measure", f"{script}:make", store=store)
    assert found["measurements"] == 0


@pytest.mark.slow
def test_a_small_budget_divides_layers_which_are_not_called_exact(script: Path, store: Path) -> None:
    found = facts("--budget", "100KiB", "--batch", 4, f"{script}:make", store=store)
    last = found["layers"][-1]
    assert last["self_number"] > 1 and last["exactness"] == "not verified" and last["peak_bytes"] <= 100 << 10
    assert found["layers"][1]["exactness"] == "one piece"


VERDICT = """
import sys
from swapd.splitting.store import Key, Store, Verdict
from ooc.pytorch.splitting.conditions import library, processor
from ooc.pytorch.splitting.operators import find
key = Key(processor(), library(find(sys.argv[2]).module), sys.argv[2], sys.argv[3])
Store(sys.argv[1]).put_verdict(key, Verdict("output features", 4, sys.argv[4] == "1", 0.25 * (sys.argv[4] == "0"), 0.0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("identical", "words"), [(1, "exact (output features, 4 parts)"), (0, "differs by 0.2")])
def test_verdicts_are_found(script: Path, tmp_path: Path, identical: int, words: str) -> None:
    path = tmp_path / "store.jsonl"
    arguments = ["--budget", "100KiB", "--batch", 4, f"{script}:make"]
    layer = facts(*arguments, store=path)["layers"][-1]
    run([write_script(tmp_path, VERDICT), path, layer["operator"], layer["shapes"], str(identical)], {}).check()
    assert facts(*arguments, store=path)["layers"][-1]["exactness"].startswith(words)


def test_what_a_run_verified_is_found(script: Path, tmp_path: Path) -> None:
    """The run's shapes, device and libraries are those that the command looks for."""
    program = f"""
        import sys
        sys.path.insert(0, {str(script.parent)!r})
        import small
        small.make(2, size=32)()
    """
    path = tmp_path / "store.jsonl"
    done = run_source(tmp_path, program, OOC_BUDGET="800KiB", OOC_SPLIT="exact", OOC_SPLIT_STORE=str(path)).check()
    verified = [layer for layer in done.figures["split_layers"] if layer["operator"] == "aten::addmm"]
    found = facts("--budget", "800KiB", "--batch", 2, f"{script}:make", "size=32", store=path)["layers"][-1]
    assert [layer["shapes"] for layer in verified] == [found["shapes"]]
    assert found["exactness"] == f"exact ({verified[0]['how']}, {verified[0]['parts']} parts)"


def test_training_plans_the_three_kernels_of_a_convolution(script: Path, tmp_path: Path) -> None:
    found = facts("--budget", "1MiB", f"{script}:make", "mode=training", store=tmp_path / "none.jsonl")
    assert found["training"] and found["peak_bytes"] is None
    kernels = [kernel["name"].split()[-1] for layer in found["layers"] for kernel in layer["kernels"]]
    assert kernels == ["Forward", "Forward", "BackwardData", "BackwardFilter", "BackwardFilter"]


@pytest.mark.slow
def test_a_model_with_a_name(tmp_path: Path) -> None:
    found = facts("--budget", "10MiB", "alexnet", store=tmp_path / "none.jsonl")
    assert sum(bool(layer["kernels"]) for layer in found["layers"]) == 5
    assert sum(layer["weight_bytes"] for layer in found["layers"]) == pytest.approx(4 * 61.1e6, rel=1e-3)
    assert all(layer["peak_bytes"] <= 10 << 20 for layer in found["layers"])


@pytest.mark.slow
def test_a_picture(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    swapd("--budget", "100KiB", "--picture", tmp_path / "a.png", f"{script}:make", store=tmp_path / "none.jsonl")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    arguments = ["--budget", "100KiB", "--picture", tmp_path / "missing" / "a.png", f"{script}:make"]
    assert "cannot draw" in swapd(*arguments, store=tmp_path / "none.jsonl", status=1)[1]


@pytest.mark.slow
def test_a_budget_that_is_too_small(script: Path, tmp_path: Path) -> None:
    _, errors = swapd("--budget", "1KiB", f"{script}:make", store=tmp_path / "none.jsonl", status=1)
    assert "is the smallest that works" in errors and "Traceback" not in errors
    smallest = errors.partition("--budget ")[2].split()[0]
    facts("--budget", smallest, f"{script}:make", store=tmp_path / "none.jsonl")


@pytest.mark.slow
def test_a_workspace_that_is_too_small(script: Path, store: Path) -> None:
    arguments = ["--batch", 4, "--division", "WD", f"{script}:make"]
    _, errors = swapd("--budget", "1MiB", "--workspace", "1", *arguments, store=store, status=1)
    smallest = errors.partition("--workspace ")[2].split()[0]
    facts("--budget", "1MiB", "--workspace", smallest, *arguments, store=store)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("there_is_none", "no model 'there_is_none'; there are resnet50", marks=pytest.mark.slow),
        ("missing.py:make", "cannot load missing.py"),
        pytest.param("{}:other", "has no function 'other'", marks=pytest.mark.slow),
        ("{}:depends", "depends on the data"),
        pytest.param("{}:nothing", "must return a function", marks=pytest.mark.slow),
    ],
)
def test_models_that_are_none(script: Path, tmp_path: Path, model: str, words: str) -> None:
    _, errors = swapd("--budget", "1MiB", model.format(script), store=tmp_path / "none.jsonl", status=1)
    assert words in errors and "Traceback" not in errors


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


@pytest.mark.slow
def test_arguments_that_the_model_does_not_take(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    _, errors = swapd("--budget", "1MiB", f"{script}:make", "depth=3", store=path, status=1)
    assert "cannot be built" in errors and "depth" in errors and "Traceback" not in errors


@pytest.mark.slow
def test_a_store_that_cannot_be_used(script: Path, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "store.jsonl"
    shown, errors = swapd("--budget", "1MiB", f"{script}:make", store=path)
    assert "cannot be used" in shown and "Traceback" not in errors


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
    def layers_of(wanted: dict[str, Any]) -> dict[str, Any]:
        assert (wanted["program"], wanted["arguments"]) == ("AlexNet", {"mode": "training"})
        raise Failure("far enough")

    monkeypatch.setattr("swapd.cli.split.layers_of", layers_of)
    assert main(["split", *order]) == 1
    assert capsys.readouterr().err == "swapd: far enough\n"
