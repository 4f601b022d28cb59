"""`swapd doctor --first-run` on the computing stand-in: all of it passes, and what is planted is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_build import stand_in
from tests.cuda_build.test_programs import SETTINGS

TIMEOUT_SECONDS = 600
# A training has the kernels of program.py, in every child process that is one.
KERNELS = """
import sys
if "ooc.pytorch.first_training" in sys.orig_argv:
    import torch
    import swapd.session
    torch.ops.load_library({library!r})
    torch.backends.cudnn.enabled = False
    swapd.session._CUDA_GRANULARITY = 64 << 10
    if "off" in sys.orig_argv:  # PyTorch's own allocator does not run on the stand-in
        import ooc
        ooc.enable(alloc="cuda")
"""
# The stand-in is more lenient than the contract: it gives every thread a context.
PROGRAM = """
import sys
from pathlib import Path
from swapd.devices import first_run
first_run._CONTRACT = 'nowhere/{}'
sys.exit(first_run.first_run(Path(sys.argv[1])))
"""

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built for the CPU alone")


def first_run(folder: Path, seed: int | None = None, **variables: str) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit status, what was printed, and the lines of the file."""
    (folder / "sitecustomize.py").write_text(KERNELS.format(library=str(stand_in.computing())))
    environment = stand_in.environment(seed, **{**SETTINGS, **variables})
    environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
    file = folder / "first-run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout, [json.loads(line) for line in file.read_text().splitlines()]


def test_everything_passes(tmp_path: Path) -> None:
    status, printed, (head, *attempts, verdict) = first_run(tmp_path, seed=1)
    assert (status, verdict["verdict"]) == (0, "passed"), printed
    names = [attempt["name"] for attempt in attempts]
    assert names[:2] == ["device", "doctor"]
    assert names[-5:] == ["probe", "adapter", "training, plain", "training, with room", "training, out-of-core"]
    assert head["first_run"]["variables"]["OOC_CHUNK_SIZE"] == "64KiB"
    figures = attempts[-1]["result"]["summary"]
    assert figures["device_peak_bytes"] <= figures["budget_bytes"] == int(attempts[-1]["variables"]["OOC_BUDGET"])
    assert figures["swap_in_bytes"] > 0
    assert attempts[-1]["result"]["digests"] == attempts[-3]["result"]["digests"]
    assert "FAILED" not in printed


def edges_that_can_be_omitted() -> Path:
    """The folder of libraries in which OOC_WITHOUT_EDGE leaves an edge out."""
    built = stand_in.ROOT / "build" / "edges"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DOOC_BUILD_TESTS=OFF", "-DCMAKE_CXX_FLAGS=-DOOC_EDGES_CAN_BE_OMITTED"]
    for command in (["cmake", "-S", str(stand_in.ROOT), "-B", str(built), *options], ["cmake", "--build", str(built)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return built


def test_an_order_that_is_wrong_is_found_and_safe_mode_helps(tmp_path: Path) -> None:
    # Functions do not wait for their variables.
    planted = {"OOC_WITHOUT_EDGE": "4", "_OOC_LIBRARIES": str(edges_that_can_be_omitted())}
    status, printed, (_, *attempts, verdict) = first_run(tmp_path, seed=1, **planted)
    assert (status, verdict["verdict"]) == (1, "failed"), printed
    found = {attempt["name"]: attempt["problem"] for attempt in attempts}
    assert found["training, plain"] == found["training, with room"] == ""
    assert found["training, out-of-core"] != ""
    assert found["training, out-of-core, OOC_SAFE=1"] == ""
    (row,) = verdict["failed"]
    assert row["name"] == "training, out-of-core"
    assert "OOC_SAFE=1 helped" in row["advice"] and "order between streams is wrong" in row["advice"]
    assert row["advice"] in printed
