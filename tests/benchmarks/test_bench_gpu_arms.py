"""The arms of the GPU benchmark on CPU tensors, and its processes without a device."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from benchmarks.gpu.arms import make_arm
from benchmarks.gpu.ballast import PIECE, pieces
from benchmarks.gpu.cases import IN_CORE, UVM, Case, Model
from benchmarks.gpu.child import Channel, outcome_of
from benchmarks.gpu.models import make_job
from benchmarks.gpu.offload import AHEAD, STASH, OffloadActivations
from benchmarks.gpu.run import REFUSED_UVM, Child, ChildEnded, Runner
from benchmarks.gpu.schedule import Outcome
from benchmarks.gpu.train import digest, fingerprint, train

GIB, MIB = 1 << 30, 1 << 20
CPU = torch.device("cpu")
TINY = {"name": "tiny", "kind": "gpt", "batch": 2, "width": 32, "layers": 2, "heads": 2, "context": 16}
TINY_MODEL = Model("tiny", "gpt", 2, 0.01, (("width", 32), ("layers", 2), ("heads", 2), ("context", 16)))


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


@pytest.mark.slow
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


@pytest.mark.slow
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
