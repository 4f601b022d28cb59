"""The first run: what children do to it, what is written down, and which advice is given. No training is run here."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swapd.cli import main
from swapd.devices import first_run
from swapd.devices.first_run import FirstRun

PYTHON = [sys.executable, "-c"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> FirstRun:
    return FirstRun(open(tmp_path / "f.jsonl", "w", encoding="utf-8"))


def test_one_that_crashes_hangs_or_lacks_a_library_keeps_no_other_from_running(run: FirstRun, tmp_path: Path) -> None:
    crash = run.step("crash", [*PYTHON, "import ctypes; print('before', flush=True); ctypes.string_at(0)"])
    hang = run.step("hang", [*PYTHON, "import time\ndef stands_here(): time.sleep(99)\nstands_here()"], {}, 2)
    lacks = run.step("lacks", [*PYTHON, "import torch_that_is_not_here"])
    shows = "import os; print('hm'); print(os.environ['OOC_BUDGET'])"
    works = run.step("works", [*PYTHON, shows], {"OOC_BUDGET": "5"})
    assert crash["problem"].startswith("SIGSEGV: ")
    assert hang["problem"] == "it did not end within 2 seconds"
    assert "No module named 'torch_that_is_not_here'" in lacks["problem"]
    assert (works["problem"], works["advice"], works["result"]) == ("", "", 5)
    written = {line["name"]: line for line in lines(tmp_path / "f.jsonl")}
    assert "before" in written["crash"]["output"]
    assert "stands_here" in written["hang"]["errors"]  # where it was
    assert written["hang"]["status"] == -signal.SIGABRT
    assert written["works"]["variables"] == {"OOC_BUDGET": "5"}


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("OocError: cannot load the driver: libcuda.so.1: cannot open shared object file", "install NVIDIA's driver"),
        ("OocError: cuInit failed: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected", "nvidia-smi"),
        ("OocError: the driver libcuda.so.1 lacks cuMemCreate", "newer NVIDIA driver"),
        ("OocError: the device has no virtual memory management (compute capability ...)", "compute capability 6.0"),
        ("ModuleNotFoundError: No module named 'torch'", "PyTorch for CUDA"),
        ("AssertionError: Torch not compiled with CUDA enabled", "PyTorch for CUDA"),
        ("ooc.pytorch.build.AdapterError: no C++ compiler found", "g++"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB", "other programs"),
        ("RuntimeError: the device is lost: the wait for an event did not end within 1800 s", "OOC_WAIT_LIMIT"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "OOC_SAFE=1"),
    ],
)
def test_the_next_thing_to_try(run: FirstRun, said: str, advice: str) -> None:
    assert advice in run.step("training, with room", [*PYTHON, f"import sys; sys.exit({said!r})"])["advice"]


RIGHT, WRONG = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}


def trained(monkeypatch: pytest.MonkeyPatch, run: FirstRun, fails: Any) -> dict[str, Any]:
    """The last row of the table after trainings of which those have wrong bits that `fails(name, variables)` says."""

    def step(name: str, command: list[str], variables: Any = (), again: bool = False) -> dict[str, Any]:
        swaps = "out-of-core" in name
        figures = {"live_peak_bytes": 1000, "device_peak_bytes": 1, "budget_bytes": 1, "swap_in_bytes": int(swaps)}
        result = {"digests": WRONG if fails(name, variables) else RIGHT, "summary": figures}
        row = {"name": name, "problem": run.wrong(name, result), "advice": "", "result": result}
        run.table += [] if again else [row]
        return row

    monkeypatch.setattr(run, "step", step)
    run.train()
    return run.table[-1]


def test_wrong_bits_and_what_helps(monkeypatch: pytest.MonkeyPatch, run: FirstRun) -> None:
    row = trained(monkeypatch, run, lambda name, variables: "core" in name and "OOC_SAFE" not in variables)
    assert row["name"] == "training, out-of-core"
    assert row["problem"] == "wrong bits in 1 of 2 tensors, first in b"
    assert row["advice"] == "OOC_SAFE=1 helped; the order between streams is wrong here: use it for now"


@pytest.mark.parametrize(("chunk", "larger"), [(None, "8MiB"), ("3MiB", "12MiB")])
def test_another_chunk_size_helps(
    monkeypatch: pytest.MonkeyPatch, run: FirstRun, chunk: str | None, larger: str
) -> None:
    if chunk is not None:
        monkeypatch.setenv("OOC_CHUNK_SIZE", chunk)
    row = trained(monkeypatch, run, lambda name, variables: "core" in name and "OOC_CHUNK_SIZE" not in variables)
    assert row["advice"] == f"OOC_CHUNK_SIZE={larger} helped"


def test_nothing_helps(monkeypatch: pytest.MonkeyPatch, run: FirstRun) -> None:
    row = trained(monkeypatch, run, lambda name, variables: "core" in name)
    assert row["advice"] == "neither OOC_SAFE=1 nor OOC_CHUNK_SIZE=8MiB nor OOC_BUDGET=800 helped"


def test_plain_pytorch_may_differ_from_itself(monkeypatch: pytest.MonkeyPatch, run: FirstRun) -> None:
    row = trained(monkeypatch, run, lambda name, variables: name != "training, plain")
    assert "say nothing about the allocator" in row["advice"]


def test_too_much_memory_or_no_movement_is_no_success(run: FirstRun) -> None:
    figures = {"device_peak_bytes": 2, "budget_bytes": 1, "swap_in_bytes": 1}
    assert "more memory" in run.wrong("training, out-of-core", {"digests": RIGHT, "summary": figures})
    figures = {"device_peak_bytes": 1, "budget_bytes": 1, "swap_in_bytes": 0}
    assert run.wrong("training, out-of-core", {"digests": RIGHT, "summary": figures}) == "nothing was moved"
    assert run.wrong("training, with room", {"digests": RIGHT, "summary": figures}) == ""


def test_without_a_gpu_it_says_so_and_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_BUDGET", "1GiB")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "f.jsonl"
    command = [sys.executable, "-m", "swapd.cli", "doctor", "--first-run", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "device                                     passed" in done.stdout:
        pytest.skip("this machine has a GPU")
    assert (done.returncode, done.stderr) == (1, "")
    assert "There is no GPU that can be used here (" in done.stdout
    head, device, doctor, verdict = lines(file)
    variables = {"OOC_BUDGET": "1GiB", "OOC_PLANNING": "blocking", "CUDA_VISIBLE_DEVICES": ""}
    assert head["first_run"]["variables"] == variables
    assert head["first_run"]["python"] == sys.version
    assert device["problem"] and doctor["result"][0]["name"] == "system"
    assert verdict["verdict"] == "failed"
    assert [row["name"] for row in verdict["failed"]] == ["device"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_whole_file(tmp_path: Path, number: int) -> None:
    file = tmp_path / "f.jsonl"
    program = (
        "import sys; from pathlib import Path; from swapd.devices import first_run; "
        "first_run._DEVICE = 'import time; time.sleep(99)'; sys.exit(first_run.first_run(Path(sys.argv[1])))"
    )
    process = subprocess.Popen([*PYTHON, program, str(file)], stdout=subprocess.PIPE, text=True)
    while not (file.exists() and file.read_text().endswith("\n")):
        time.sleep(0.02)
    time.sleep(0.5)
    os.kill(process.pid, number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    head, device, verdict = lines(file)
    assert "first_run" in head
    assert (device["problem"], verdict["verdict"]) == ("interrupted", "interrupted")
    assert "interrupted. All that was found is in" in printed


def test_a_mistake_of_ours_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(FirstRun, "run", lambda self: self.nothing_of_that_name)
    assert first_run.first_run(tmp_path / "f.jsonl") == 1
    assert "nothing_of_that_name" in lines(tmp_path / "f.jsonl")[-1]["verdict"]


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--first-run", "--out", str(tmp_path / "none" / "f.jsonl")]) == 1
    assert "name another file" in capsys.readouterr().err
