"""The executor against the plan: a replayed trace is recorded as itself, and under a plan what is on the device at each
function is what the plan says, chunk by chunk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planning_traces import Builder, gpt, random_trace

from swapd.problem import Problem
from swapd.replay import Replay, ReplayError
from swapd.trace import Machine, Trace

CHILD = Path(__file__).with_name("replay_child.py")
CHUNK = 64 << 10


def replay(trace: Trace, budget: int, path: Path, chunk: int = CHUNK, policy: str = "auto") -> dict[str, Any]:
    trace.save(path)
    command = [sys.executable, str(CHILD), str(path), str(budget), str(chunk), policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def small_gpt() -> Trace:
    trace = gpt(layers=2, width=256, batch=2, length=64, vocabulary=512)
    return Trace(**{**vars(trace), "function_seconds": np.minimum(trace.function_seconds, 2e-4), "chunk_bytes": CHUNK})


def chunks_of(trace: Trace, chunk: int, size: int) -> Trace:
    """A trace of small numbers of bytes with every variable `chunk / size` times as large, and short functions."""
    return Trace(
        **{
            **vars(trace),
            "variable_bytes": trace.variable_bytes * chunk // size,
            "function_seconds": trace.function_seconds * 0,
            "function_start": trace.function_start * 0,
            "chunk_bytes": chunk,
        }
    )


@pytest.mark.parametrize("policy", ["idle", "window"])
@pytest.mark.parametrize("times", [2, 4])
def test_residency_is_the_plans_at_every_function(tmp_path: Path, policy: str, times: int) -> None:
    trace = small_gpt()
    peak = Problem.from_trace(trace, 1 << 40).live_peak_chunks
    least = Problem.from_trace(trace, 0).min_budget_bytes
    found = replay(trace, max(peak * CHUNK // times, least), tmp_path / "gpt.trace", policy=policy)
    assert found["followed"] and found["violations"] == []
    assert found["compared"] > 1000 and found["absent"] > 1000
    assert found["different"] == []
    assert found["stats"]["budget_overrun_count"] == 0


# Those that do not fit, and whose allocations between iterations (pinned beside the function before them) do.
@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13])
def test_random_programs_run_as_planned(tmp_path: Path, seed: int) -> None:
    trace = chunks_of(random_trace(seed), CHUNK, 100)
    least = Problem.from_trace(trace, 0).min_budget_bytes
    found = replay(trace, least + seed % 4 * CHUNK, tmp_path / "random.trace")
    assert found["planned"] and found["compared"] > 0
    assert found["different"] == []


def test_a_replay_is_recorded_as_the_trace_that_is_replayed(tmp_path: Path) -> None:
    replay(small_gpt(), 1 << 30, tmp_path / "first")
    once = Trace.load(tmp_path / "first.again")
    replay(once, 1 << 30, tmp_path / "second")
    twice = Trace.load(tmp_path / "second.again")
    assert once.fingerprint == twice.fingerprint and once.function_names == twice.function_names
    for name in ("variable_bytes", "born", "died", "previous", "use_offsets", "use_variables", "use_flags"):
        assert np.array_equal(getattr(once, name), getattr(twice, name)), name
    original = small_gpt()
    assert once.function_names == original.function_names
    assert sorted(once.variable_bytes.tolist()) == sorted(original.variable_bytes[original.variable_bytes > 0].tolist())
    assert int(once.live_bytes.max()) == int(original.live_bytes.max())


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ReplayError, match="no function"):
        Replay(None, Builder().trace(machine=Machine(1.0, 1.0)))  # type: ignore[arg-type]
