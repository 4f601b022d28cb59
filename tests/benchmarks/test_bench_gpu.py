"""The GPU benchmark without a GPU: its cases, its time budget, its report, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import results
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tables
from benchmarks.gpu.cases import ARMS, CHUNKS_MIB, IN_CORE, MODELS, OVERSUBSCRIPTIONS, UVM, Case, all_cases
from benchmarks.gpu.schedule import LIMIT_SECONDS, Outcome, run_all

ROOT = Path(__file__).resolve().parents[2]
GIB, MIB = 1 << 30, 1 << 20


# ---- the cases and their order --------------------------------------------------------------------------------------


def test_every_case_is_there_once_behind_what_it_needs() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    for index, case in enumerate(cases):
        assert case.needs() is None or case.needs() in cases[:index], case.name
    for model in MODELS:
        for x in OVERSUBSCRIPTIONS:
            found = {case.arm for case in cases if case.model == model and case.oversubscription == x}
            assert found == set(ARMS) - {IN_CORE}
        assert Case("step", UVM, model, 1.0) in cases
    swept = {case.chunk_mib for case in cases if case.arm == "ours" and case.model == MODELS[0]}
    assert swept == set(CHUNKS_MIB)
    assert {case.kind for case in cases} == {"probe", "allocation", "step"}


def test_the_most_important_come_first_and_fit_the_time() -> None:
    names = [case.name for case in all_cases()]
    assert names[0] == "probe"
    assert names.index("resnet50-2x-ours") < names.index("resnet50-2x-offload") < names.index("vgg16-2x-ours")
    assert names.index("resnet50-2x-ours-64MiB") < names.index("vgg16-8x-fsdp")
    thought = 0.0
    for case in all_cases():
        thought += case.seconds
        if case.name == "gpt2048-2x-demand":
            break
    assert thought < LIMIT_SECONDS


# ---- the time budget ------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def executor(clock: Clock, times: float, ended: dict[str, str] | None = None) -> Callable[..., dict[str, Any]]:
    """Cases that take `times` of what they are thought to."""

    def execute(case: Case, timeout: float, before: Outcome) -> dict[str, Any]:
        assert timeout > 0 and (case.needs() is None or case.needs().name in before.records)
        clock.now += min(timeout, case.seconds * times)
        return {"outcome": (ended or {}).get(case.name, "ok"), "live_peak_bytes": GIB}

    return execute


@pytest.mark.parametrize("times", [0.1, 1.0, 3.0])
def test_the_time_is_kept_and_what_does_not_fit_is_named(times: float) -> None:
    clock = Clock()
    outcome = run_all(all_cases(), executor(clock, times), limit_seconds=200, clock=clock)
    assert outcome.seconds <= 200 and outcome.seconds == clock.now - 100
    assert len(outcome.records) + len(outcome.left_out) == len(all_cases())
    assert all("no time left" in line for line in outcome.left_out if "measure it by" not in line)
    assert "probe" in outcome.records
    assert (not outcome.left_out) == (times == 0.1 and sum(case.seconds for case in all_cases()) * 0.5 < 200)


def test_a_case_that_takes_longer_than_thought_makes_the_others_look_longer() -> None:
    clock = Clock()
    cases = [Case("allocation", IN_CORE), Case("allocation", "ours"), Case("probe", "ours")]
    # 9, 9 and 15 s; each takes three times as long: the third is thought to take 45, and 46 are left
    outcome = run_all(cases, executor(clock, 3.0), limit_seconds=100, clock=clock)
    assert list(outcome.records) == ["allocation-in-core", "allocation-ours", "probe"]
    clock = Clock()
    outcome = run_all(cases, executor(clock, 3.0), limit_seconds=98, clock=clock)
    assert list(outcome.records) == ["allocation-in-core", "allocation-ours"]
    assert outcome.left_out == ["probe: no time left"]


def test_a_shorter_case_behind_one_that_does_not_fit_still_runs() -> None:
    clock = Clock()
    long, short = Case("probe", "ours"), Case("allocation", "ours")
    outcome = run_all([long, short], executor(clock, 1.0), limit_seconds=12, clock=clock)
    assert list(outcome.records) == ["allocation-ours"] and outcome.left_out == ["probe: no time left"]


def test_without_its_in_core_run_a_case_is_left_out() -> None:
    clock = Clock()
    reference = Case("step", IN_CORE, MODELS[0])
    ours = Case("step", "ours", MODELS[0], 2.0)
    failed = executor(clock, 1.0, {reference.name: "out of memory"})
    outcome = run_all([reference, ours], failed, limit_seconds=100, clock=clock)
    assert list(outcome.records) == [reference.name]
    assert outcome.left_out == ["resnet50-2x-ours: there is no result of resnet50-1x-in-core to measure it by"]


# ---- the report -----------------------------------------------------------------------------------------------------

MACHINE = {
    "processor": "abacus",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "kernel": "6.1",
    "python": "3.11.7",
    "torch": "2.13.0",
    "load_average": [0.1, 0.1, 0.1],
}
PROFILE = {
    "format": "ooc-machine",
    "version": 1,
    "device": "planted",
    "measured": "2026-01-01T00:00:00+00:00",
    "driver_version": 13000,
    "total_bytes": 100 * GIB,
    "granularity_bytes": 2 * MIB,
    "copy_engines": 2,
    "link": "",
    "out_latency_seconds": 0.0,
    "in_latency_seconds": 0.0,
    "pin_seconds_per_mib": 1e-4,
    "unpin_seconds_per_mib": 1e-5,
    "memory": [
        {
            "chunk_bytes": 2 * MIB,
            "chunks": 4,
            "create_seconds": 1e-4,
            "map_seconds": 2e-6,
            "release_seconds": 1e-6,
            "set_access_seconds": 3e-5,
            "unmap_seconds": 2e-5,
        }
    ],
    "copies": [{"bytes": GIB, "out_seconds": 0.5, "in_seconds": 0.25, "both_out_seconds": 1.0, "both_in_seconds": 0.5}],
}


def record(arm: str, x: float, seconds: list[float], **more: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "arm": arm,
        "model": {"name": "resnet50", "kind": "resnet50", "batch": 256},
        "oversubscription": x,
        "budget_bytes": None if arm == IN_CORE else int(8 * GIB / x),
        "chunk_bytes": 2 * MIB,
        "outcome": "ok",
        "seconds": seconds,
        "forward_seconds": [1.0] * len(seconds) if arm == IN_CORE else [],
        "live_peak_bytes": 8 * GIB,
        "device_peak_bytes": 4 * GIB,
        "per_step": {"out_bytes": 2 * GIB, "in_bytes": 3 * GIB, "stall_seconds": 0.5},
        "digest": "bits",
        "machine": MACHINE,
        **more,
    }


def planted() -> list[dict[str, Any]]:
    probe = {"kind": "probe", "arm": "ours", "outcome": "ok", "profile": PROFILE, "machine": MACHINE}
    return [
        record(IN_CORE, 1.0, [3.0, 3.0, 9.0]),
        record("ours", 2.0, [8.0, 8.5, 7.0]),
        record("offload", 2.0, [10.0], digest="others", per_step={"out_bytes": GIB, "in_bytes": GIB}),
        record("fsdp", 2.0, [], outcome="out of memory"),
        record("ours", 2.0, [9.0], chunk_bytes=64 * MIB),
        probe,
        {"kind": "allocation", "arm": "ours", "outcome": "ok", "nanoseconds": {"1 MiB": [5.0, 7.0]}},
    ]


def test_the_bound_is_that_of_the_in_core_phases_and_the_probed_link() -> None:
    records = planted()
    link = tables.link_of(records)
    assert link is not None and link.out_bytes_per_second == GIB and link.in_bytes_per_second == 2 * GIB
    # 4 GiB beyond the budget: 4 s out beside 1 s of forward, 2 s in beside 2 s of the rest
    assert tables.bound_of(records[0], 4 * GIB, link).seconds == 6.0
    assert tables.bound_of(records[0], 8 * GIB, link).seconds == 3.0
    shown = tables.figures(records[1], records[0], link)
    assert shown["step_seconds"] == 8.0 and shown["of_bound"] == 0.75
    assert shown["slowdown"] == pytest.approx(8 / 3) and shown["identical"] is True
    assert tables.figures(records[1], None, None)["of_bound"] is None


def test_the_report_hides_nothing() -> None:
    lines = tables.report(planted(), ["vgg16-2x-ours: no time left"], "Planted").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["2x ours"] == ["4.00", "4.00", "8.000", "7.000 to 8.500", "75%", "2.67", "2.00", "3.00", "0.500", "yes"]
    assert rows["2x offload"][-4:] == ["1.00", "1.00", "", "no"]
    assert rows["2x fsdp"][2] == "out of memory" and rows["2x fsdp"][3:] == [""] * 7
    assert "2x ours, chunks of 64 MiB" in rows
    assert rows["1x in-core"][4] == "" and rows["1x in-core"][5] == "1.00"
    assert rows["4 x 2 MiB"] == ["100.0", "2.0", "1.0", "30.0", "20.0"]
    assert rows["ours"] == ["6"]
    assert "- vgg16-2x-ours: no time left" in lines
    assert tables.report([], [], "Planted").endswith("Nothing was measured.\n")


def test_without_an_in_core_run_or_a_probe_there_is_still_a_row() -> None:
    text = tables.report([record("ours", 2.0, [8.0])], [], "Planted")
    assert "| 2x ours | 4.00 | 4.00 | 8.000 | 8.000 to 8.000 |  |  | 2.00 |" in text


def test_tables_are_made_of_what_is_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, one in enumerate(planted()):
        results.save(tmp_path, tables.NAME, str(index), one)
    results.save(tmp_path, "gpu_run", "run", {"left_out": ["a: no time left"], "seconds": 1.0})
    assert command.main(["--tables", "--output", str(tmp_path)]) == 0
    assert "2x ours" in capsys.readouterr().out
    assert "- a: no time left" in (tmp_path / "tables.md").read_text()


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "needs an NVIDIA GPU" in done.stdout and "Nothing was measured" in done.stdout
    assert not (ROOT / "benchmarks" / "results" / "cpu").exists()


def test_the_list_of_cases_and_a_choice_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(all_cases())
    chosen = [case.name for case in command.choose(all_cases(), ["vgg16-2x-offload"])]
    assert chosen == ["probe", "vgg16-1x-in-core", "vgg16-2x-offload"]
    assert command.folder_name("NVIDIA H200") == "nvidia-h200"


def test_requests_survive_json() -> None:
    for model in MODELS:
        assert json.loads(json.dumps(model.to_json())) == model.to_json()
