"""The GPU benchmark without a GPU: its cases, time budget, report, processes, and its arms on CPU tensors."""

from __future__ import annotations

import io
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
from benchmarks.gpu.arms import make_arm
from benchmarks.gpu.ballast import PIECE, pieces
from benchmarks.gpu.cases import (
    ARMS,
    CHUNKS_MIB,
    IN_CORE,
    MODELS,
    OVERSUBSCRIPTIONS,
    UVM,
    Case,
    Model,
    all_cases,
)
from benchmarks.gpu.child import Channel, outcome_of
from benchmarks.gpu.models import make_job
from benchmarks.gpu.offload import AHEAD, STASH, OffloadActivations
from benchmarks.gpu.run import REFUSED_UVM, Child, ChildEnded, Runner
from benchmarks.gpu.schedule import LIMIT_SECONDS, Outcome, run_all
from benchmarks.gpu.train import digest, fingerprint, train

ROOT = Path(__file__).resolve().parents[2]
GIB, MIB = 1 << 30, 1 << 20
CPU = torch.device("cpu")
TINY = {"name": "tiny", "kind": "gpt", "batch": 2, "width": 32, "layers": 2, "heads": 2, "context": 16}
TINY_MODEL = Model("tiny", "gpt", 2, 0.01, (("width", 32), ("layers", 2), ("heads", 2), ("context", 16)))


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


# ---- the arms, on CPU tensors ---------------------------------------------------------------------------------------


def run_tiny(arm_name: str, **request: Any) -> dict[str, Any]:
    job = make_job(TINY, CPU)
    arm = make_arm({"arm": arm_name, **request})
    arm.adopt(job, CPU)
    return train(job, arm, CPU, warm_up=1, steps=2, phases=arm_name == IN_CORE)


@pytest.fixture(scope="module")
def in_core() -> dict[str, Any]:
    return run_tiny(IN_CORE)


def test_two_runs_have_the_same_bits_and_other_weights_do_not(in_core: dict[str, Any]) -> None:
    assert run_tiny(IN_CORE)["digest"] == in_core["digest"]
    assert len(in_core["losses"]) == 3 and len(in_core["seconds"]) == len(in_core["forward_seconds"]) == 2
    job = make_job(TINY, CPU)
    before = digest(job.model, [1.0])
    with torch.no_grad():
        weight = job.model.blocks[0].widen.weight
        weight.view(torch.int32)[3, 5] ^= 1  # one bit
    assert digest(job.model, [1.0]) != before != digest(job.model, [2.0])


def test_save_on_cpu_is_bit_identical_and_counted(in_core: dict[str, Any]) -> None:
    found = run_tiny("save_on_cpu")
    assert found["digest"] == in_core["digest"]
    assert found["per_step"]["out_bytes"] == found["per_step"]["in_bytes"] > 0
    assert found["forward_seconds"] == []


def test_offload_is_bit_identical_and_counted(in_core: dict[str, Any]) -> None:
    found = run_tiny("offload", offload={"smallest_bytes": 1})
    assert found["digest"] == in_core["digest"]
    moved = found["per_step"]
    assert moved["out_bytes"] > moved["in_bytes"] > 0, "the last tensors that were saved need not come back"
    nothing = run_tiny("offload")
    assert nothing["digest"] == in_core["digest"] and nothing["per_step"] == {"out_bytes": 0, "in_bytes": 0}


def test_checkpoint_is_bit_identical_and_runs_blocks_twice(in_core: dict[str, Any]) -> None:
    job = make_job(TINY, CPU)
    arm = make_arm({"arm": "checkpoint"})
    calls = []
    for block in job.blocks:
        block.widen.register_forward_hook(lambda *_: calls.append(1))
    arm.adopt(job, CPU)
    found = train(job, arm, CPU, warm_up=1, steps=2)
    assert found["digest"] == in_core["digest"]
    assert len(calls) == 3 * 2 * len(job.blocks)


def hooks(smallest_bytes: int = 1, keep: tuple[torch.Tensor, ...] = ()) -> OffloadActivations:
    return OffloadActivations(CPU, keep, smallest_bytes)


def test_offloading_lets_device_memory_go_and_fetches_ahead() -> None:
    made = hooks()
    tensors = [torch.full((64,), float(index)) for index in range(STASH + 6)]
    numbers = [made._pack(tensor) for tensor in tensors]
    assert numbers == list(range(len(tensors)))
    held = [number for number in numbers if made._saved[number].back is not None]
    assert held == numbers[-STASH:], "what was saved last is still on its way"
    assert made.out_bytes == len(tensors) * 256
    for number in reversed(numbers):
        assert torch.equal(made._unpack(number), tensors[number])
        ahead = [other for other in numbers if made._saved[other].back is not None]
        assert ahead == list(range(max(0, number - AHEAD), number))
    assert made.in_bytes == (len(tensors) - STASH) * 256, "each once, the last ones not at all"
    assert torch.equal(made._unpack(2), tensors[2]), "a second time, for a graph that is kept"
    made.step_ended()
    assert not made._saved


def test_offloading_keeps_what_should_stay() -> None:
    weight = torch.ones(1000)
    made = hooks(smallest_bytes=100, keep=(weight,))
    assert made._pack(weight.view(10, 100).t()) is not None and made.out_bytes == 0
    small, sparse = torch.ones(10), torch.eye(50).to_sparse()
    assert made._pack(small) is small and made._pack(sparse) is sparse
    strided = torch.arange(100.0).view(10, 10).t()
    back = made._unpack(made._pack(strided))
    assert torch.equal(back, strided) and back.stride() == strided.stride()


def test_what_was_offloaded_survives_its_device_copy_being_overwritten() -> None:
    made = hooks()
    first = torch.ones(64)
    number = made._pack(first)
    for _ in range(STASH):
        made._pack(torch.zeros(64))
    first.zero_()
    assert torch.equal(made._unpack(number), torch.ones(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_fingerprints_see_values_and_places(dtype: torch.dtype) -> None:
    tensor = torch.arange(5000).remainder(7).to(dtype)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    swapped = tensor.clone()
    swapped[[10, 11]] = swapped[[11, 10]]
    changed = tensor.clone()
    changed[4999] = 0 if tensor[4999] else 1
    seen = {fingerprint(tensor), fingerprint(changed), fingerprint(tensor[:-1])}
    assert len(seen) == 3
    assert (fingerprint(swapped) == fingerprint(tensor)) == torch.equal(swapped, tensor)


def test_fingerprints_do_not_depend_on_the_layout() -> None:
    square = torch.randn(40, 50)
    assert fingerprint(square.t().contiguous().t()) == fingerprint(square)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (MemoryError("no"), "failed: MemoryError: no"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of memory"),
        (RuntimeError("CUDA error: out of memory"), "out of memory"),
        (ValueError("shape\nmore"), "failed: ValueError: shape"),
        (NotImplementedError("PyTorch 2.11 has no torch.cuda.memory._use_uvm"), "not available: PyTorch 2.11 has no"),
    ],
)
def test_ends_are_told_apart(error: Exception, outcome: str) -> None:
    assert outcome_of(error).startswith(outcome)


# ---- processes ------------------------------------------------------------------------------------------------------

ANSWERS = """
import json, sys
request = json.loads(sys.stdin.readline())
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
"""


def child(ending: str) -> list[str]:
    return [sys.executable, "-c", ANSWERS + ending]


def execute(ending: str, case: Case | None = None, timeout: float = 60.0, **keywords: Any) -> dict[str, Any]:
    runner = Runner(child=child(ending), ballast=None, **keywords)
    try:
        before = Outcome(records={"tiny-1x-in-core": {"live_peak_bytes": 8 * GIB, "outcome": "ok"}})
        return runner.execute(case or Case("step", "ours", TINY_MODEL, 4.0), timeout, before)
    finally:
        runner.close()


def test_a_record_has_the_request_the_machine_and_the_answer() -> None:
    record = execute('print(json.dumps({"outcome": "ok", "seconds": [1.0], "budget": request["budget_bytes"]}))')
    assert record["outcome"] == "ok" and record["seconds"] == [1.0]
    assert record["budget"] == record["budget_bytes"] == 2 * GIB, "a share of the in-core run's live peak"
    assert record["name"] == "tiny-4x-ours" and record["model"]["width"] == 32
    assert record["machine"]["cores"] > 0


def test_out_of_memory_is_a_result() -> None:
    record = execute('print(json.dumps({"outcome": "out of memory", "error": "x"}))')
    assert record["outcome"] == "out of memory"


def test_a_crash_is_a_record_with_its_words() -> None:
    record = execute('sys.stderr.write("Segmentation fault, planted"); sys.exit(3)')
    assert record["outcome"] == "crashed" and "planted" in record["error"] and "status 3" in record["error"]
    assert execute('print("not JSON")')["outcome"] == "crashed"


def test_a_case_that_does_not_end_is_ended() -> None:
    assert execute("import time; time.sleep(1000)", timeout=1.0)["outcome"] == "no end in 1 s"


def test_managed_memory_is_never_oversubscribed() -> None:
    fail = 'print(json.dumps({"outcome": "failed: it was started"}))'
    assert execute(fail, Case("step", UVM, TINY_MODEL, 2.0))["outcome"] == REFUSED_UVM
    assert execute(fail, Case("step", UVM, TINY_MODEL, 1.0))["outcome"] == REFUSED_UVM, "nothing is known to be free"


def test_the_ballast_holds_all_but_the_budget_and_the_slack() -> None:
    source = """
import json, sys
print(json.dumps({"free_bytes": 100}), flush=True)
for line in sys.stdin:
    print(json.dumps({"free_bytes": line.strip()}), flush=True)
"""
    runner = Runner(child=child('print(json.dumps({"outcome": "ok"}))'), ballast=[sys.executable, "-c", source])
    before = Outcome(records={"tiny-1x-in-core": {"live_peak_bytes": 8 * GIB, "outcome": "ok"}})
    record = runner.execute(Case("step", "ours", TINY_MODEL, 2.0), 60.0, before)
    assert runner.free_bytes == 100 and record["free_bytes_at_start"] == str(4 * GIB + 512 * MIB)
    assert runner.execute(Case("step", IN_CORE, TINY_MODEL), 60.0, before)["free_bytes_at_start"] == "release"
    runner.close()


def test_ballast_that_dies_ends_the_run() -> None:
    with pytest.raises(ChildEnded, match="planted"):
        Runner(child=child(""), ballast=[sys.executable, "-c", "raise SystemExit('planted')"])


@pytest.mark.parametrize("free", [0, 5 * MIB, 3 * GIB, 100 * GIB + 12345])
@pytest.mark.parametrize("leave", [0, 2 * GIB, 99 * GIB])
def test_ballast_pieces(free: int, leave: int) -> None:
    sizes = pieces(free, leave)
    rest = free - sum(sizes)
    assert all(0 < size <= PIECE for size in sizes)
    assert rest >= min(free, leave) and rest - min(free, leave) < 2 * MIB


def test_a_channel_is_one_object_a_line() -> None:
    target = io.StringIO()
    channel = Channel(io.StringIO('{"go": true}\n'), target)
    assert channel.receive() == {"go": True}
    channel.send({"a": "b\nc"})
    assert target.getvalue().count("\n") == 1
    with pytest.raises(EOFError):
        channel.receive()


@pytest.mark.parametrize("arm", [IN_CORE, "offload", "fsdp"])
def test_a_real_child_trains_on_the_host(arm: str, in_core: dict[str, Any]) -> None:
    """The whole way of a case but for the device. FSDP keeps no state on the host here, and its sums may differ."""
    asked = {"device": "cpu", "warm_up": 1, "steps": 2, "offload": {"smallest_bytes": 1}}
    runner = Runner(ballast=None, asked=asked)
    before = Outcome(records={"tiny-1x-in-core": {"live_peak_bytes": 8 * GIB, "outcome": "ok"}})
    try:
        record = runner.execute(Case("step", arm, TINY_MODEL, 1.0 if arm == IN_CORE else 2.0), 300.0, before)
    finally:
        runner.close()
    assert record["outcome"] == "ok", record
    assert len(record["seconds"]) == 2 and record["losses"] == pytest.approx(in_core["losses"])


def test_our_arm_swaps_and_has_the_bits_of_the_in_core_run() -> None:
    """On the emulated device, in a real child."""
    model = Model("small", "gpt", 8, 0.01, (("width", 64), ("layers", 3), ("heads", 2), ("context", 64)))
    settings = {"chunk_size": "64KiB", "small_limit": "4KiB", "budget": "6MiB"}
    asked = {"device": "cpu", "alloc": "emulated", "settings": settings, "warm_up": 3, "steps": 2}
    runner = Runner(ballast=None, asked=asked)
    before = Outcome(records={"small-1x-in-core": {"live_peak_bytes": 8 * GIB, "outcome": "ok"}})
    try:
        plain = runner.execute(Case("step", IN_CORE, model), 300.0, before)
        ours = runner.execute(Case("step", "ours", model, 2.0), 500.0, before)
    finally:
        runner.close()
    assert plain["outcome"] == ours["outcome"] == "ok", ours
    assert ours["digest"] == plain["digest"]
    assert ours["device_peak_bytes"] <= 6 * MIB < ours["live_peak_bytes"]
    assert ours["per_step"]["out_bytes"] > 0 and ours["per_step"]["in_bytes"] > 0
    assert ours["summary"]["budget_bytes"] == 6 * MIB and ours["summary"]["steps"] == 5


def test_a_child_whose_parent_is_gone_ends() -> None:
    made = Child([sys.executable, "-m", "benchmarks.gpu.child"])
    assert made._process.stdin is not None
    made._process.stdin.close()
    assert made._process.wait(timeout=120) == 0
    made.close()


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
    "copies": [
        {"bytes": GIB, "out_seconds": 0.5, "in_seconds": 0.25, "both_out_seconds": 1.0, "both_in_seconds": 0.5}
    ],
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
