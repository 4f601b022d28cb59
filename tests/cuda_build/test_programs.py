"""Whole programs with `device="cuda"` on the computing stand-in (`make test-cuda`).

Each trains with memory for everything, and then with 1 / 2.5 of what lived at once, while the work of its streams comes
late at random: every bit is the same, the budget is kept, and no address is touched that is not there.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_build import stand_in
from tests.cuda_build.programs import PROGRAMS

HERE = Path(__file__).resolve().parent
SETTINGS = {"OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB"}
OVERSUBSCRIPTION = 2.5
SEEDS = [int(word) for word in os.environ.get("CUDA_SEEDS", "1").split()]  # of random delays
TIMEOUT_SECONDS = 300

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built for the CPU alone")


def run(name: str, budget_bytes: int, seed: int | None = None, **variables: str) -> dict[str, Any]:
    environment = stand_in.environment(seed, OOC_BUDGET=str(budget_bytes), **SETTINGS, **variables)
    command = stand_in.command(HERE / "programs.py", name)
    with tempfile.TemporaryDirectory() as folder:  # each run verifies how it divides functions
        environment["OOC_SPLIT_STORE"] = os.path.join(folder, "verdicts")
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-6000:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@functools.cache
def with_room(name: str) -> dict[str, Any]:
    result = run(name, 2 << 30)
    assert result["summary"]["swap_out_bytes"] == 0
    return result


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_bit_is_the_same(name: str, seed: int) -> None:
    expected = with_room(name)
    times = 10 if name == "functions_in_parts" else OVERSUBSCRIPTION
    budget = int(expected["summary"]["live_peak_bytes"] / times)
    result = run(name, budget, seed)
    figures = result["summary"]
    assert figures["device_peak_bytes"] <= figures["budget_bytes"] <= budget
    assert figures["swap_in_bytes"] > 0
    assert figures["driver_failure_count"] == 0
    assert result["digest"] == expected["digest"]
    if name == "functions_in_parts":
        ways = {layer["operator"]: layer["how"] for layer in figures["split_layers"]}
        assert ways["aten::multinomial"] == "host-backed"
        assert "dimension" in ways["aten::flip"] and "columns" in ways["aten::addmm"]
        assert figures["split_function_count"] > 30


@pytest.mark.parametrize(("split", "same"), [("exact", True), ("allow", False)])
def test_a_convolution_keeps_its_algorithm_where_its_workspace_does_not_fit(split: str, same: bool) -> None:
    """Else it takes another one, with other bits. The workspace is host memory, unless rounding does not matter."""
    budget = int(with_room("convolutions")["summary"]["live_peak_bytes"] / 2)
    asked = {"OOC_TEST_WORKSPACE": str(budget)}
    expected, result = run("convolutions", 2 << 30, **asked), run("convolutions", budget, 1, OOC_SPLIT=split, **asked)
    assert (result["digest"] == expected["digest"]) == same
    assert (result["summary"]["host_backed_function_count"] > 0) == same
    assert result["summary"]["device_peak_bytes"] <= budget


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_bit_is_the_same_if_all_that_can_be_is_made_again(name: str) -> None:
    expected = with_room(name)
    times = 1.0 if name == "functions_in_parts" else 1 / OVERSUBSCRIPTION
    budget = int(expected["summary"]["live_peak_bytes"] * times)
    result = run(name, budget, 1, _OOC_RECOMPUTE_EVERYTHING="1")
    figures = result["summary"]
    assert figures["device_peak_bytes"] <= figures["budget_bytes"] <= budget
    assert figures["recompute_drop_count"] > 0
    assert result["digest"] == expected["digest"]


def test_a_schedule_of_what_is_made_again_is_carried_out() -> None:
    expected = with_room("many_steps")
    budget = int(expected["summary"]["live_peak_bytes"] / 1.6)  # what runs again needs room beside the largest function
    result = run("many_steps", budget, 1, OOC_EMULATED_BANDWIDTH="30MB/s")
    figures = result["summary"]
    assert result["digest"] == expected["digest"]
    assert figures["recompute_drop_count"] >= 20 and figures["recompute_refused_count"] == 0
    assert figures["device_peak_bytes"] <= figures["budget_bytes"]


@pytest.mark.parametrize("name", ["graphs", "loader", "mixed_precision", "side_streams", "two_threads"])
def test_every_bit_is_the_same_in_safe_mode(name: str) -> None:
    expected = with_room(name)
    result = run(name, int(expected["summary"]["live_peak_bytes"] / OVERSUBSCRIPTION), 1, OOC_SAFE="1")
    figures = result["summary"]
    assert figures["swap_in_bytes"] > 0
    assert result["digest"] == expected["digest"]
