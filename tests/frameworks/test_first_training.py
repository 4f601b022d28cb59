"""The whole first run on the emulated device: success, and a driver that refuses every copy out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import TIMEOUT_SECONDS, environment

STEPS = ["probe", "adapter", "training, plain", "training, with room", "training, out-of-core"]


def first_run(file: Path, **variables: str) -> tuple[int, str, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "swapd.cli", "doctor", "--first-run", "--out", str(file)]
    settings = environment({"OOC_ALLOC": "emulated", **variables})
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout, [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.medium
def test_all_of_it_passes(tmp_path: Path) -> None:
    status, printed, (head, *steps, verdict) = first_run(tmp_path / "f.jsonl")
    assert (status, verdict["verdict"], verdict["failed"]) == (0, "passed", []), printed
    assert head["first_run"]["variables"] == {"OOC_ALLOC": "emulated", "OOC_PLANNING": "blocking"}
    names = [step["name"] for step in steps]
    assert [name for name in names if not name.startswith("contract")] == ["device", "doctor", *STEPS]
    assert printed.count(" passed ") == len(steps) and "FAILED" not in printed
    plain, roomy, swapped = (step["result"] for step in steps[-3:])
    assert plain["digests"] == roomy["digests"] == swapped["digests"]
    assert roomy["summary"]["swap_out_bytes"] == 0
    assert swapped["summary"]["swap_in_bytes"] > 0
    assert swapped["summary"]["budget_bytes"] < 0.45 * roomy["summary"]["live_peak_bytes"]


@pytest.mark.slow
def test_a_driver_that_refuses_copies_is_reported(tmp_path: Path) -> None:
    faults = "cuMemcpyDtoHAsync:after=20,error=CUDA_ERROR_ILLEGAL_ADDRESS"
    status, printed, (_, *steps, verdict) = first_run(tmp_path / "f.jsonl", OOC_EMULATED_FAULTS=faults)
    assert (status, verdict["verdict"]) == (1, "failed"), printed
    problems = {step["name"]: step["problem"] for step in steps}
    assert problems["training, plain"] == problems["training, with room"] == ""
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in problems["training, out-of-core"]
    row = verdict["failed"][-1]
    assert row["name"] == "training, out-of-core"
    assert row["advice"].startswith("neither OOC_SAFE=1 nor OOC_CHUNK_SIZE=256KiB nor OOC_BUDGET=")
    assert all(problems[f"training, out-of-core, {change}"] for change in ("OOC_SAFE=1", "OOC_CHUNK_SIZE=256KiB"))
