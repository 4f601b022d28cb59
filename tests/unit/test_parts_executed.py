"""Variables of several times the budget, used in ranges, on the emulated device: planned, executed, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import parts_child
import pytest
from parts_child import BUDGET, CHUNK, LAYERS, PARTS, WATCHED, WEIGHT

CHILD = Path(parts_child.__file__)
POLICIES = ("idle", "window", "auto")


def run(kind: str, policy: str) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), kind, policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == 0
    assert found["peak"] <= BUDGET < WEIGHT / 3.5 and found["divergences"] == 0
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_come_in_ahead_and_are_dropped_clean(policy: str) -> None:
    found = run("weights", policy)
    assert found["followed"] and found["ins"] >= LAYERS * PARTS * 0.8
    # Of 24 parts one ends with its chunk; the others share theirs with the next one.
    assert found["parts"] - found["variables"] == LAYERS * (2 * PARTS - 3)
    # A part that the plan brings in ahead is there when its function begins; so late a one it may ask for.
    assert found["late_ins"] <= PARTS // 4
    assert found["demand_swap_in_count"] <= WATCHED * found["late_ins"]
    assert found["swap_out_bytes"] == 0
    assert found["clean_drop_bytes"] >= WATCHED * (LAYERS * WEIGHT - BUDGET)
    # Each chunk comes in once an iteration; those that two parts share twice at most.
    assert WATCHED * (LAYERS * WEIGHT - BUDGET) <= found["swap_in_bytes"] <= WATCHED * LAYERS * (WEIGHT + PARTS * CHUNK)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.medium
def test_results_in_parts_leave_and_come_back(policy: str) -> None:
    found = run("activations", policy)
    assert found["followed"] and found["ins"] >= LAYERS * PARTS * 0.6
    assert found["late_ins"] <= PARTS // 4
    assert found["demand_swap_in_count"] <= WATCHED * found["late_ins"]
    # What does not fit leaves once and comes back once: chunks that were never written are not moved.
    least, most = WATCHED * (LAYERS * WEIGHT - BUDGET), WATCHED * LAYERS * (WEIGHT + PARTS * CHUNK)
    assert least <= found["swap_out_bytes"] <= most
    assert least <= found["swap_in_bytes"] <= most


def test_an_iteration_with_functions_on_host_memory_is_planned() -> None:
    found = run("host", "auto")
    assert found["host_functions"] == 3 * 8 and found["unplannable"] == 0
    assert found["followed"] and found["ins"] >= LAYERS * PARTS * 0.8
    # Which parts are ahead depends on the times that were measured; without a plan all of them are asked for.
    assert found["demand_swap_in_count"] <= WATCHED * LAYERS * PARTS // 3


def test_in_demand_mode_functions_ask_for_their_parts() -> None:
    """What the tests above measure is there without a plan."""
    found = run("weights", "none")
    assert not found["followed"] and found["ins"] == 0
    assert found["demand_swap_in_count"] >= WATCHED * LAYERS * (PARTS - 1)
