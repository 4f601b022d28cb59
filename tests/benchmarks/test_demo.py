"""The demo's verdict: what it runs, what it compares, and what makes it end non-zero.

A stand-in script plays the example and the allocator: it prints steps, copies a prepared state and writes a
prepared summary, so that each promise of the demo can be broken alone. The comparison is the real one.
"""

from __future__ import annotations

import importlib.util
import io
import json
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"

STAND_IN = """
import functools, json, os, pathlib, shutil, sys, time

print = functools.partial(print, flush=True)
folder = pathlib.Path(__file__).parent
case = json.loads((folder / "case.json").read_text())
swapped = "OOC_BUDGET" in os.environ
if swapped and case.get("crash"):
    print("the cause is here")
    sys.exit(7)
steps = int(sys.argv[sys.argv.index("--steps") + 1])
for step in range(steps):
    while case.get("waits") and step == 1 and not (folder / "seen").exists():
        time.sleep(0.01)
    print(f"step {step + 1:4d}  loss 1.5  {(3.0 if swapped else 2.0) + 10 * (step == 0):.3f} s")
if "--save" in sys.argv:
    shutil.copy(folder / ("swapped.pt" if swapped else "plain.pt"), sys.argv[sys.argv.index("--save") + 1])
if swapped and case.get("leaves"):
    (pathlib.Path(os.environ["OOC_DISK"]) / "left.bin").touch()
log = {name: value for name, value in os.environ.items() if name.startswith("OOC_")}
with open(folder / "log.jsonl", "a") as file:
    file.write(json.dumps({"arguments": sys.argv[1:], "variables": log}) + "\\n")
if "OOC_SUMMARY" in os.environ and not (swapped and case.get("no_summary")):
    summary = dict(case["summary"])
    if swapped:
        summary["budget_bytes"] = int(os.environ["OOC_BUDGET"])
        summary.update(case.get("swapped", {}))
    pathlib.Path(os.environ["OOC_SUMMARY"]).write_text(json.dumps(summary))
"""

SUMMARY = {
    "device": "emulated",
    "budget_bytes": 10**9,
    "live_peak_bytes": 4_000_000,
    "device_peak_bytes": 900_000,
    "stall_seconds": 0.25,
    "swap_out_bytes": 5_000_000,
    "swap_in_bytes": 6_000_000,
    "disk_read_bytes": 6_000_000,
    "disk_written_bytes": 5_500_000,
    "swap_out_count": 50,
    "swap_in_count": 60,
    "demand_swap_in_count": 7,
    "divergence_count": 0,
    "min_budget_bytes": 800_000,
    "internal_fragmentation_ratio": 0.01,
    "external_fragmentation_ratio": 0.0,
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weights = {"a": torch.randn(5, 7, generator=generator), "b": torch.arange(3), "nan": torch.tensor(float("nan"))}
    return {"model": weights, "results": {"losses": [1.5, float("nan"), 0.0]}}


def flip_one_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).flatten()[11] ^= 1


COMPARE_STATES = load("demo").compare_states


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> ModuleType:
    """The demo with one example, the stand-in, which behaves well until ``case.json`` says otherwise."""
    module = load("demo")
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    torch.save(state(), tmp_path / "plain.pt")
    torch.save(state(), tmp_path / "swapped.pt")
    (tmp_path / "case.json").write_text(json.dumps({"summary": SUMMARY}))
    monkeypatch.setattr(module, "EXAMPLES", (module.Example("stand_in", script, ("--size", "9"), ("--size", "1")),))
    monkeypatch.setenv("OOC_POLICY", "left over from the caller")
    # The same comparison without a process for it; the tests of flipped bits have the process.
    monkeypatch.setattr(module, "compare_states", compare_here)
    return module


def compare_here(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    compared: dict[str, Any] = load("compare").compare(torch.load(first), torch.load(second))
    return compared


def run(demo: ModuleType, tmp_path: pathlib.Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "out" / "demo.json"
    status = demo.main([*arguments, "--output", str(output)])
    return status, json.loads(output.read_text())


def test_a_good_run_passes_with_its_figures(demo: ModuleType, tmp_path: pathlib.Path) -> None:
    status, report = run(demo, tmp_path)
    assert status == 0
    assert report["passed"] is True and report["problems"] == []
    (entry,) = report["examples"]
    assert entry["example"] == "stand_in" and entry["device"] == "emulated"
    assert entry["bit_identical"] is True
    assert entry["comparison"]["tensors"] == 3 and entry["comparison"]["values"] == 3
    assert entry["live_peak_bytes"] == 4_000_000 and entry["budget_bytes"] == 1_000_000
    assert entry["oversubscription"] == 4.0
    assert entry["step_seconds"]["in_core"] == 2.0 and entry["step_seconds"]["out_of_core"] == 3.0
    assert entry["all_step_seconds"]["in_core"][0] == 12.0
    assert set(entry["peak_rss_bytes"]) == {"in_core", "out_of_core"}
    for name, value in SUMMARY.items():
        if name not in ("budget_bytes", "live_peak_bytes"):
            assert entry[name] == value, name


def test_peak_memory_is_that_of_the_script(tmp_path: pathlib.Path) -> None:
    # In a process of its own: the kernel's figure for a child is never less than what its parent has, and that is all
    # of PyTorch here. The demo itself stays small.
    script = tmp_path / "large.py"
    script.write_text("kept = bytearray(b'1') * (200 << 20)\nprint('step 1 loss 1.5 2.000 s')\n")
    asked = (
        "import demo, sys; run = demo.run_script('large', [sys.executable, sys.argv[1]], {}, print);"
        "print(run.peak_rss_bytes, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", asked, str(script)], cwd=EXAMPLES, capture_output=True, text=True, check=True
    )
    peak, *heavy = ended.stdout.split()[-3:]
    assert 200 << 20 < int(peak) < 230 << 20
    assert heavy == ["False", "False"]


def test_what_is_run(demo: ModuleType, tmp_path: pathlib.Path) -> None:
    """Plain PyTorch gets no variable at all, not even the caller's; all three get the same size."""
    run(demo, tmp_path, "--quick", "--steps", "6", "--oversubscription", "2", "--chunk-size", "64KiB")
    plain, measured, swapped = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert plain["variables"] == {}
    assert measured["variables"].keys() == {"OOC_ALLOC", "OOC_CHUNK_SIZE", "OOC_SMALL_LIMIT", "OOC_SUMMARY"}
    assert swapped["variables"].keys() == measured["variables"].keys() | {"OOC_BUDGET", "OOC_DISK"}
    assert swapped["variables"]["OOC_ALLOC"] == "cpu"
    assert not pathlib.Path(swapped["variables"]["OOC_DISK"]).exists(), "the demo's folder is gone with it"
    assert swapped["variables"]["OOC_CHUNK_SIZE"] == "64KiB"
    assert swapped["variables"]["OOC_BUDGET"] == "2000000"
    assert all(one["arguments"][:2] == ["--size", "1"] for one in (plain, measured, swapped))
    assert plain["arguments"][2:4] == swapped["arguments"][2:4] == ["--steps", "6"]
    assert measured["arguments"][2:] == ["--steps", "3"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"swapped": {"device_peak_bytes": 1_000_001}}, "device peak 1000001 bytes"),
        ({"swapped": {"swap_in_bytes": 0}}, "nothing was swapped"),
        ({"swapped": {"disk_read_bytes": 5_999_999}}, "what was swapped is not on the disk"),
        ({"swapped": {"disk_written_bytes": 0}}, "what was swapped is not on the disk"),
        ({"leaves": True}, "left.bin was left on the disk"),
        ({"swapped": {"budget_bytes": 5}}, "the budget in force was 5 bytes"),
        ({"swapped": {"device": "some GPU"}}, "some GPU was used"),
        ({"no_summary": True}, "wrote no summary"),
        ({"crash": True}, "status 7\nthe cause is here"),
    ],
)
def test_each_broken_promise_ends_non_zero(
    demo: ModuleType, tmp_path: pathlib.Path, case: dict[str, Any], expected: str
) -> None:
    (tmp_path / "case.json").write_text(json.dumps({"summary": SUMMARY} | case))
    status, report = run(demo, tmp_path)
    assert status == 1 and report["passed"] is False
    assert len(report["problems"]) == 1 and expected in report["problems"][0]


def test_steps_are_shown_as_they_come_where_there_is_no_terminal(
    demo: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's second step waits until somebody saw its first."""

    class File(io.StringIO):
        def flush(self) -> None:
            if "in-core run, step 1 of 4, 12.0 s" in self.getvalue():
                (tmp_path / "seen").touch()

    file = File()
    monkeypatch.setattr(demo, "Console", lambda **_: Console(file=file, width=120))
    monkeypatch.setattr(demo, "RUN_TIMEOUT_SECONDS", 30)
    (tmp_path / "case.json").write_text(json.dumps({"summary": SUMMARY, "waits": True}))
    status, report = run(demo, tmp_path, "--quick")
    assert status == 0, report["problems"]
    lines = [line for line in file.getvalue().splitlines() if " step " in line]
    assert len(lines) == 4 + 3 + 4
    assert lines[-1].startswith("stand_in: out-of-core run, step 4 of 4, 3.0 s")


def test_a_run_that_does_not_end_is_ended(
    demo: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RUN_TIMEOUT_SECONDS", 0.5)
    (tmp_path / "case.json").write_text(json.dumps({"summary": SUMMARY, "waits": True}))
    status, report = run(demo, tmp_path)
    assert status == 1 and "the in-core run did not end in 0.5 s" in report["problems"][0]


def test_a_missing_figure_is_named(demo: ModuleType, tmp_path: pathlib.Path) -> None:
    summary = {name: value for name, value in SUMMARY.items() if name != "divergence_count"}
    (tmp_path / "case.json").write_text(json.dumps({"summary": summary}))
    status, report = run(demo, tmp_path)
    assert status == 1 and "divergence_count" in report["problems"][0]


def test_one_flipped_bit_of_a_parameter_ends_non_zero(
    demo: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "compare_states", COMPARE_STATES)
    other = state()
    flip_one_bit(other["model"]["a"])
    torch.save(other, tmp_path / "swapped.pt")
    status, report = run(demo, tmp_path)
    assert status == 1
    assert report["examples"][0]["bit_identical"] is False
    assert report["examples"][0]["comparison"]["differences"] == {"/model/a": "1 of 35 elements"}


def test_one_last_bit_of_a_loss_ends_non_zero(
    demo: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "compare_states", COMPARE_STATES)
    other = state()
    other["results"]["losses"][0] = 1.5000000000000002
    torch.save(other, tmp_path / "swapped.pt")
    status, report = run(demo, tmp_path)
    assert status == 1
    assert list(report["examples"][0]["comparison"]["differences"]) == ["/results/losses/0"]


def test_json_mode_prints_only_json(
    demo: ModuleType, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(demo, tmp_path, "--json")
    assert status == 0
    assert json.loads(capsys.readouterr().out) == report


def change_nothing(_: dict[str, Any]) -> None:
    pass


def drop_a_tensor(saved: dict[str, Any]) -> None:
    del saved["model"]["b"]


def change_the_type(saved: dict[str, Any]) -> None:
    saved["model"]["b"] = saved["model"]["b"].to(torch.int32)


def change_the_sign_of_zero(saved: dict[str, Any]) -> None:
    saved["results"]["losses"][2] = -0.0


def change_a_shape(saved: dict[str, Any]) -> None:
    saved["model"]["a"] = saved["model"]["a"].reshape(7, 5)


def change_strides_only(saved: dict[str, Any]) -> None:
    saved["model"]["a"] = saved["model"]["a"].t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        (change_nothing, []),
        (change_strides_only, []),
        (drop_a_tensor, ["/model/b"]),
        (change_the_type, ["/model/b"]),
        (change_a_shape, ["/model/a"]),
        (change_the_sign_of_zero, ["/results/losses/2"]),
    ],
)
def test_compare_names_what_differs(change: Any, paths: list[str]) -> None:
    other = state()
    change(other)
    report = load("compare").compare(state(), other)
    assert list(report["differences"]) == paths
    assert report["identical"] is (not paths)


def test_nothing_compared_is_not_identical() -> None:
    assert load("compare").compare({"a": 1}, {"b": 1})["identical"] is False


def test_resnet50_is_resnet50() -> None:
    """The published parameter count with 1,000 classes, and the shape of its output."""
    with torch.device("meta"):
        model = load("resnet50").ResNet50(classes=1000)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_the_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = load("gpt").GPT(layers=2, heads=2, width=16, context=8)
    tokens = torch.arange(8).reshape(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (1, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_the_examples_do_not_know_the_project() -> None:
    for name in ("resnet50.py", "gpt.py", "alexnet.py"):
        source = (EXAMPLES / name).read_text().split('"""', 2)[2]
        assert not any(word in source for word in ("OOC_", "ooc_alloc", "swapd", "integrations", "environ")), name
