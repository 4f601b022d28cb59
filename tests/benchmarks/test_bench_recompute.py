"""The benchmark of recomputation: its arithmetic on made-up results, and one network at a toy size with every arm."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks import results
from benchmarks.recompute.__main__ import main
from benchmarks.recompute.cases import (
    ARMS,
    CHECKPOINT,
    COMPARED,
    IN_CORE,
    NAME,
    OURS,
    OVERSUBSCRIPTIONS,
    SLOWDOWNS,
    SWAP_ONLY,
    TIMED,
    bounds,
    budgets_of,
    case_of,
)
from benchmarks.recompute.child import counted, is_steady, usual
from benchmarks.recompute.tables import bits, in_budget, step_seconds, table
from swapd.planning.lower_bound import lower_bound
from swapd.planning.problem import Problem
from swapd.trace.trace import READ, WRITE, Machine, Trace

MACHINE = {"processor": "abacus", "cores": 2, "memory_bytes": 8 << 30, "kernel": "6", "python": "3.11", "torch": "2.13"}
CHUNK = 1 << 20


def entry(
    state: str, seconds: float = 1.0, followed: bool = True, moved: int = 1, again: int = 0, counts: bool = True
) -> dict[str, Any]:
    entry: dict[str, Any] = {"seconds": seconds, "state": state, "followed_plan": followed, "swapped_bytes": moved}
    again_figures = {"recompute_function_count": again, "recompute_seconds": again / 10}
    return entry | again_figures | {"swap_out_bytes": CHUNK, "counts": counts}


def test_steps_are_steady_once_a_plan_is_followed_without_a_change() -> None:
    trial, planned = entry("trial"), entry("planned")
    assert not is_steady([planned, planned])
    assert not is_steady([planned, trial, planned])
    assert is_steady([trial, planned, planned])
    assert not is_steady([planned, planned, trial])
    assert not is_steady([entry("demand", followed=False)] * 9)
    assert is_steady([entry("it fits", followed=False, moved=0)] * 3)


def test_steps_of_turns_count_in_the_last_state_alone() -> None:
    trial, first, planned = entry("trial"), entry("planned", counts=False), entry("planned")
    assert counted([first, first, first, planned, planned, first, planned]) == [3, 4, 6]
    assert counted([trial, trial, planned, planned]) == [2, 3]
    assert counted([planned, planned, trial]) == []


def a_trace(seconds: float = 1.0, fingerprint: int = 7) -> Trace:
    """Four variables of 4 MiB that are made, and read in the opposite order."""
    count, n = 4, 8
    use = [*range(count), *reversed(range(count))]
    return Trace(
        function_names=("aten::relu",) * count + ("aten::mul",) * count,
        function_start=np.arange(n) * seconds,
        function_seconds=np.full(n, seconds),
        variable_bytes=np.full(count, 4 * CHUNK),
        born=np.arange(count, dtype=np.int32),
        died=np.array([n - v for v in range(count)], np.int32),
        previous=np.full(count, -1, np.int32),
        use_offsets=np.arange(n + 1),
        use_variables=np.array(use, np.int32),
        use_flags=np.array([WRITE] * count + [READ] * count, np.uint8),
        fingerprint=fingerprint,
        chunk_bytes=CHUNK,
    )


def test_a_usual_step_has_the_median_of_the_same_sequence_s_times() -> None:
    found = usual([a_trace(9.0, fingerprint=8), a_trace(1.0), a_trace(5.0), a_trace(2.0)])
    assert found.function_seconds.tolist() == [2.0] * 8
    assert Problem.from_trace(found, 0).compute_seconds == 16.0


def test_the_link_holds_swapping_alone_to_the_slowdown_and_infeasible_budgets_are_left_out() -> None:
    trace = a_trace(1e-3)
    budgets = budgets_of(trace, 16 * CHUNK, OVERSUBSCRIPTIONS)
    assert list(budgets) == [2, 4]  # a function needs 4 MiB
    for x, slowdown in product(budgets, SLOWDOWNS):
        case = case_of(trace, x, slowdown, budgets[x], 9e-3)
        assert (case.oversubscription, case.slowdown) == (x, slowdown)
        link = Machine(case.bytes_per_second, case.bytes_per_second, 10e-6)
        bound = lower_bound(Problem.from_trace(trace, case.budget_bytes, machine=link))
        assert bound == pytest.approx(case.slowdown * 9e-3, rel=0.02)
        assert case.budget_bytes == 16 * CHUNK / case.oversubscription
        seconds = bounds(case, trace)
        assert seconds["compute_seconds"] == pytest.approx(8e-3)
        assert seconds["swap_only_bound_seconds"] == pytest.approx(bound)
        assert 8e-3 <= seconds["bound_seconds"] <= seconds["swap_only_bound_seconds"] * 1.001
        slow = bounds(case, a_trace(9e-3))  # functions that take as long as all of them did
        assert slow["bound_seconds"] >= slow["compute_seconds"] == pytest.approx(72e-3)


def record(arm: str, seconds: float, trained: str = "a", statistics: str = "b", peak: int = 50) -> dict[str, Any]:
    step = entry("planned", seconds, again=0 if arm == SWAP_ONLY else 5)
    return {
        "model": "gpt",
        "arm": arm,
        "oversubscription": 2.0,
        "slowdown": 4.0,
        "budget_bytes": 100,
        "steps": [entry("trial", 99.0), *[step] * 4],
        "counted": [3, 4],
        "digests": {} if arm == IN_CORE else {"5": {"trained": trained, "statistics": statistics}},
        "summary": {"device_peak_bytes": peak, "budget_bytes": 100, "live_peak_bytes": 200},
        "machine": MACHINE,
        "threads": 1,
    }


def whole(*records: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a model whose other runs are there, too."""
    case = {"oversubscription": 2.0, "budget_bytes": 100}
    seconds = {"compute_seconds": 0.9, "swap_only_bound_seconds": 4.0, "bound_seconds": 2.0}
    known = {"1": {}, "5": {"trained": "a", "statistics": "b"}}
    return [
        record("traced", 1.0) | {"cases": [case]},
        record("checkpoint in-core", 1.5),
        record("plain", 1.0) | {"digests": known},
        record(IN_CORE, 1.0),
        record(TIMED, 1.0) | seconds,
        *records,
    ]


def test_only_steps_that_count_are_timed() -> None:
    steps = [entry("", seconds) for seconds in (9, 9, 3, 1, 2)]
    assert step_seconds({"steps": steps, "counted": [2, 3, 4]}) == 2.0
    assert step_seconds({"steps": steps, "counted": [3, 4]}) == 1.5
    assert step_seconds({"steps": steps, "counted": []}) == 2.0  # never steady: a few of the last
    assert step_seconds({"steps": [entry("", 3) | {"planning_seconds": 0.5}], "counted": [0]}) == 2.5


def test_bits_and_budgets_are_not_taken_for_granted() -> None:
    plain = {"digests": {"5": {"trained": "a", "statistics": "b"}}}
    assert bits(record(OURS, 1.0), plain) == "yes"
    assert bits(record(OURS, 1.0, statistics="twice"), plain) == "all but running statistics"
    assert bits(record(OURS, 1.0, trained="other"), plain) == "NO"
    assert bits(record(OURS, 1.0) | {"digests": {"6": {"trained": "a", "statistics": "b"}}}, plain) == "NO"
    assert in_budget(record(OURS, 1.0, peak=100)) and not in_budget(record(OURS, 1.0, peak=101))


def test_table_holds_each_arm_against_bounds_and_targets() -> None:
    text = table(whole(record(SWAP_ONLY, 4.4), record(OURS, 2.2), record(CHECKPOINT, 2.0, statistics="twice")))
    assert "| gpt 2x, link 4 | ours | 2.200 | 2.20 | 0.50 | 4.00 | 2.00 | 0.55 | 1.10 | 0.50 |" in text
    assert "| gpt 2x, link 4 | checkpoint | 2.000 | 2.00 | 0.45 |" in text
    assert "| yes | all but running statistics |" in text
    assert "- at most 0.80 of our swap-only step: 1 of 1 cases; 0.50 to 0.50" in text
    assert "- below the bound of swapping alone: 1 of 1 cases; 0.55 to 0.55; in every case of gpt" in text
    assert "- at most 1.15 of the bound of swapping and recomputing: 1 of 1 cases" in text
    assert "- nothing computed again in the last step: 0 of 1 runs" in text
    assert "- no slower than checkpointing written by hand: 0 of 1 cases; 1.10 to 1.10" in text


def test_table_hides_neither_a_slow_step_nor_other_bits_nor_a_failure() -> None:
    failed = record(CHECKPOINT, 1.0) | {"failed": "OutOfMemory: too large"}
    text = table(whole(record(SWAP_ONLY, 4.4), record(OURS, 4.2, trained="other", peak=101), failed))
    assert "| NO | NO |" in text and "| gpt 2x, link 4 | checkpoint | OutOfMemory: too large |" in text
    assert "swap-only step: 0 of 1 cases" in text and "in every case of no model" in text
    assert "running statistics included: 0 of 1 runs" in text and "within the budget: 0 of 1 runs" in text
    assert table([record(OURS, 1.0)]) == ""  # the run was broken off


def test_the_table_says_which_models_were_measured_on_which_machine() -> None:
    one = whole(record(SWAP_ONLY, 4.4), record(OURS, 2.2))
    assert table(one).startswith("abacus, 2 cores, 8 GiB")
    other = [made | {"model": "llama", "machine": MACHINE | {"processor": "slide rule"}} for made in one]
    first = table([*one, *other]).partition("\n")[0]
    assert "gpt: abacus, 2 cores" in first and "; llama: slide rule, 2 cores" in first


@pytest.mark.slow
def test_every_arm_of_a_toy_network_has_the_program_s_bits_within_its_budget(tmp_path: Path) -> None:
    assert main(["--quick", "--only", "densenet121", "--output", str(tmp_path)]) == 0
    records = {record["arm"]: record for record in results.load(tmp_path, NAME)}
    assert set(records) == {*ARMS, "traced", "in-core alone", "checkpoint in-core", "plain"}
    assert not [record["failed"] for record in records.values() if "failed" in record]
    plain = records["plain"]
    assert {arm: bits(records[arm], plain) for arm in COMPARED} == {
        SWAP_ONLY: "yes",
        OURS: "yes",
        CHECKPOINT: "all but running statistics",
    }
    for arm in COMPARED:
        made = records[arm]
        assert in_budget(made) and len(made["counted"]) == 2, arm
        assert made["losses"] == plain["losses"][: len(made["losses"])]
        assert made["environment"]["OOC_RECOMPUTE"] == ("exact" if arm == OURS else "off")
    assert records[SWAP_ONLY]["steps"][-1]["swap_out_bytes"] > 0
    assert records["checkpoint in-core"]["summary"]["live_peak_bytes"] < records["traced"]["summary"]["live_peak_bytes"]
    assert "| densenet121 2x, link 2 | ours |" in (tmp_path / "recompute.md").read_text()
