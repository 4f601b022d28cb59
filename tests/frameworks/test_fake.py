"""Recording with fake tensors: the same trace as a real run's, and clear words where there can be none."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import HERE, environment, run
from small_models import MODELS
from torch import nn

from ooc.pytorch.fake import FakeError, find, record, with_times
from ooc.pytorch.like_cuda import like_cuda
from ooc.pytorch.roofline import Roofline
from swapd.cli import main
from swapd.devices.roofline import get_device
from swapd.trace.trace import READ, WRITE, Trace

CHUNK, SMALL = 64 << 10, 16 << 10
V100 = get_device("v100-nvlink2")
Content = dict[str, Any]


def content(trace: Trace) -> Content:
    """What a trace says, without times and without workspaces: what one function allocates and frees again."""
    uses: list[list[tuple[int, int]]] = []
    users = np.bincount(trace.use_variables, minlength=trace.variables)
    workspace = (trace.born >= 0) & (trace.born == trace.died) & (users == 1)
    number = np.where(workspace, -1, np.cumsum(~workspace) - 1)
    for function in range(trace.functions):
        rows = range(trace.use_offsets[function], trace.use_offsets[function + 1])
        row = [(int(number[trace.use_variables[i]]), int(trace.use_flags[i])) for i in rows]
        uses.append([use for use in row if use[0] >= 0])
    kept = ~workspace
    previous = [int(number[p]) if p >= 0 else -1 for p in trace.previous[kept]]
    return {
        "functions": list(trace.function_names),
        "uses": uses,
        "bytes": trace.variable_bytes[kept].tolist(),
        "born": trace.born[kept].tolist(),
        "died": trace.died[kept].tolist(),
        "previous": previous,
        "slabs": trace.slab_chunks_peak,
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for what Inductor compiles: a fake run finds what the real one compiled.

    The user's own may hold modules of another checkout of these models, whose lines are not these.
    """
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As real runs have here: what Inductor makes of a graph depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def really_recorded(name: str, folder: Path, cache: str) -> Trace:
    settings = {"OOC_ALLOC": "emulated", "OOC_CHUNK_SIZE": str(CHUNK), "OOC_SMALL_LIMIT": str(SMALL)}
    settings["TORCHINDUCTOR_CACHE_DIR"] = cache
    run([str(HERE / "small_models.py"), name, "8", str(folder / "real.trace")], settings).check()
    return Trace.load(folder / "real.trace")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in MODELS])
def test_the_trace_is_that_of_a_real_run(name: str, tmp_path: Path, cache: str, one_thread: None) -> None:
    real = really_recorded(name, tmp_path, cache)
    fake = record(MODELS[name], 8, chunk_bytes=CHUNK, small_limit_bytes=SMALL, times=real)
    found, expected = content(fake), content(real)
    if name == "compiled":  # what compiling leaves behind is in the real run's slabs
        assert found.pop("slabs") <= expected.pop("slabs")
        assert sum(function.startswith("cpp_fused") for function in found["functions"]) >= 8
        assert any("small_models.py" in function for function in found["functions"])
    for key, value in expected.items():
        assert found[key] == value, key
    assert len(expected["bytes"]) >= 10
    assert np.array_equal(fake.function_seconds, real.function_seconds)
    assert fake.machine == real.machine


@pytest.mark.slow
def test_a_compiled_batch_that_no_memory_holds() -> None:
    """Its kernels take the time of their memory traffic, and nothing of it is left in the process afterwards."""
    trace = record(MODELS["compiled"], 1 << 20, V100)
    fused = np.array([name.startswith("cpp_fused") for name in trace.function_names])
    assert trace.live_bytes.max() > 1 << 37
    assert trace.function_seconds[fused].max() > (1 << 34) / V100.memory_bytes_per_second
    x = torch.randn(8, 3, 32, 32)
    assert torch.compile(lambda x: x * 2 + 1)(x).equal(x * 2 + 1)


def test_a_batch_that_no_memory_holds() -> None:
    small, large = (record(MODELS["images"], batch, V100) for batch in (1 << 10, 1 << 20))
    assert large.function_names == small.function_names
    assert large.live_bytes.max() > 1 << 38
    # Every activation is so many times as large, and takes so many times as long but for the launch.
    assert large.live_bytes.max() == pytest.approx(1024 * small.live_bytes.max(), rel=0.01)
    launches = V100.launch_seconds * small.functions
    ratio = (large.function_seconds.sum() - launches) / (small.function_seconds.sum() - launches)
    assert ratio == pytest.approx(1024, rel=0.01)


def test_the_steady_state_has_weights_and_optimizer_state() -> None:
    trace = record(MODELS["text"], 8, V100, small_limit_bytes=0, chunk_bytes=1024)
    embedding = 512 * 64 * 4
    stays = [v for v in range(trace.variables) if trace.previous[v] == v and trace.variable_bytes[v] == embedding]
    assert len(stays) == 3  # the weight and two states
    written = {int(v) for v, flags in zip(trace.use_variables, trace.use_flags) if flags & WRITE}
    assert set(stays) <= written
    assert trace.machine == V100.link


def test_gradients_of_one_iteration_are_freed_by_the_next() -> None:
    def make(batch: int) -> Any:
        model, x = nn.Linear(100, 100), torch.randn(batch, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return step

    trace = record(make, 4, small_limit_bytes=0)
    large = [v for v in range(trace.variables) if trace.variable_bytes[v] == 40_000]
    weight = [v for v in large if trace.died[v] == trace.functions]
    assert [int(trace.previous[v]) for v in weight] == weight, "weight and gradient outlive every iteration"
    assert len(weight) == 2


def test_dropout_keeps_what_cuda_keeps() -> None:
    def make(batch: int) -> Any:
        x = torch.randn(batch, 1000, requires_grad=True)
        return lambda: torch.nn.functional.dropout(x * 2, 0.5).sum().backward()

    def saved(trace: Trace) -> int:
        turn = trace.function_names.index("aten::ones_like")
        return int(trace.variable_bytes[(trace.born >= 0) & (trace.born < turn) & (trace.died > turn)].sum())

    cpu, cuda = record(make, 64, small_limit_bytes=1000), record(make, 64, V100, small_limit_bytes=1000)
    assert "aten::native_dropout" in cuda.function_names
    assert "aten::native_dropout" not in cpu.function_names
    assert (saved(cpu), saved(cuda)) == (4 * 64_000, 64_000)


def test_optimizers_choose_lists_as_on_cuda() -> None:
    def make(batch: int, foreach: Any = None) -> Any:
        model, x = nn.Linear(1000, 1000), torch.randn(batch, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    names = record(make, 4, V100).function_names
    assert "aten::_foreach_norm.Scalar" in names
    assert "aten::_foreach_add_.List" in names
    assert "aten::_foreach_add_.List" not in record(make, 4).function_names
    assert names == record(make, 4, V100, foreach=True).function_names
    sgd = importlib.import_module("torch.optim.sgd")
    assert sgd._default_to_fused_or_foreach([torch.ones(1)], False) == (False, False), "put back afterwards"


def test_lists_are_cut_as_in_a_real_run() -> None:
    def make(batch: int) -> Any:
        tensors = [torch.randn(batch, 1000) for _ in range(10)]
        return lambda: torch._foreach_mul_(tensors, 2.0)

    whole = record(make, 1)
    cut = record(make, 1, slice_bytes=12_000)
    assert whole.function_names == ("aten::_foreach_mul_.Scalar",)
    assert cut.function_names == ("aten::_foreach_mul_.Scalar",) * 4


def test_a_script_for_a_gpu_is_recorded_without_one() -> None:
    def make(batch: int) -> Any:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda().to("cuda", torch.bfloat16)
        x = torch.randn(batch, 64, device="cuda", dtype=torch.bfloat16)
        labels = torch.zeros(batch).to(torch.device("cuda:0")).to(torch.bfloat16)
        return lambda: (model(x).sum(1) - labels).sum().backward()

    trace = record(make, 4, V100, small_limit_bytes=0, chunk_bytes=512)
    assert 64 * 64 * 2 in trace.variable_bytes


def test_numbers_read_from_results_are_one() -> None:
    seen = []

    def make(batch: int) -> Any:
        return lambda: seen.append((torch.randn(batch).sum().item(), bool(torch.ones(batch).sum() > 0)))

    record(make, 3)
    assert seen[-1] == (1.0, True)


def test_the_like_of_cuda_ends_with_its_block() -> None:
    enabled = torch._C._get_mkldnn_enabled()
    with pytest.raises(KeyError), like_cuda():
        raise KeyError
    assert torch._C._get_mkldnn_enabled() == enabled
    x = torch.ones(4)
    assert x.to("cpu") is x


# ---- what cannot be recorded -----------------------------------------------------------------------------------------


def make_data_dependent(batch: int) -> Any:
    return lambda: torch.nonzero(torch.randn(batch))


def make_growing(batch: int) -> Any:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        torch.ones(batch * len(calls)).add(1)

    return step


def make_nothing(batch: int) -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_data_dependent, "aten.nonzero.default depends on the data"),
        (make_growing, "iterations differ: 6 were run"),
        (make_nothing, "runs no operator"),
        (lambda batch: 7, "must return a function that runs one iteration, not 7"),
    ],
)
def test_what_cannot_be_recorded_is_said(make: Any, words: str) -> None:
    with pytest.raises(FakeError, match=words):
        record(make, 4, small_limit_bytes=0)


def test_times_of_another_sequence_are_refused() -> None:
    images, text = record(MODELS["images"], 2), record(MODELS["text"], 2)
    with pytest.raises(FakeError, match="function 0 is aten::embedding there, and aten::convolution here"):
        with_times(images, text)


def test_source_lines_that_only_one_trace_knows_are_no_other_sequence() -> None:
    """Where a compiled module comes out of a cache that another checkout of the program filled, its lines are lost."""
    trace = record(MODELS["inference"], 2)
    here = replace(trace, function_names=("cpp_fused_0", *trace.function_names[1:]))
    seconds = np.arange(trace.functions) + 1.0
    names = ("cpp_fused_0 at model.py:31 in forward", *trace.function_names[1:])
    timed = with_times(here, replace(trace, function_names=names, function_seconds=seconds))
    assert timed.function_names == names and np.array_equal(timed.function_seconds, seconds)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet51", "no model 'resnet51'; there are resnet50,"),
        ("nowhere.py:make", "cannot load nowhere.py: there is no such file"),
        ("no.such.module:make", "cannot load no.such.module"),
        ("math:make", "math has no function 'make'"),
    ],
)
def test_programs_that_are_not_there(name: str, words: str) -> None:
    with pytest.raises(FakeError, match=words):
        find(name)


# ---- the roofline ----------------------------------------------------------------------------------------------------


def test_models_are_found_however_they_are_spelt() -> None:
    assert find("AlexNet") is find("alexnet")
    assert find("ResNet-50") is find("resnet50")


def test_the_roofline_by_hand() -> None:
    a, b = torch.empty(4096, 4096), torch.empty(4096, 4096)
    clock = Roofline(V100)
    operator = torch.ops.aten.mm.default
    product = clock.seconds("aten::mm", operator, (a, b), {}, a)
    assert product == pytest.approx(V100.launch_seconds + 2 * 4096**3 / (0.8 * 15.7e12))
    added = clock.seconds("aten::add.Tensor", torch.ops.aten.add.Tensor, (a, b), {}, torch.empty_like(a))
    assert added == pytest.approx(V100.launch_seconds + 3 * 4 * 4096**2 / (0.8 * 900e9))
    half = tuple(t.half() for t in (a, b))
    assert clock.seconds("aten::mm", operator, half, {}, half[0]) < product / 5
    table = torch.empty(100_000, 512)
    rows = torch.zeros(8, dtype=torch.int64)
    looked_up = (table, rows), {}, torch.empty(8, 512)
    gathered = clock.seconds("aten::embedding", torch.ops.aten.embedding.default, *looked_up)
    assert gathered < V100.launch_seconds * 1.1, "a table is not read as a whole"
    part = table[:8]
    sliced = clock.seconds("aten::add.Tensor", torch.ops.aten.add.Tensor, (part, part), {}, torch.empty(8, 512))
    assert sliced < V100.launch_seconds * 1.1, "a view is what it shows"
    wide = torch.empty(512, 1).expand(512, 100_000)
    expanded = clock.seconds("aten::add.Tensor", torch.ops.aten.sum.default, (wide,), {}, torch.empty(()))
    assert expanded < V100.launch_seconds * 1.1, "an expanded tensor is no more than its storage"
    assert clock.seconds("aten::empty_like", torch.ops.aten.empty_like.default, (a,), {}, b) == V100.launch_seconds


def test_updates_of_lists_count_their_writes() -> None:
    lists = [[torch.empty(1_000_000)] for _ in range(2)]
    seconds = Roofline(V100).seconds(
        "aten::_foreach_add_.List", torch.ops.aten._foreach_add_.List, (lists[0], lists[1]), {}, None
    )
    assert seconds == pytest.approx(V100.launch_seconds + 12e6 / (0.8 * 900e9))


# ---- the command -----------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from helper import WIDTH

def make(batch, layers=1, kind="plain"):
    assert kind == "plain"
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    x = torch.randn(batch, WIDTH)
    print("the program's own words")
    return lambda: model(x).sum().backward()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "helper.py").write_text("WIDTH = 1000\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, value in environment({}).items():
        monkeypatch.setenv(name, value)
    return str(tmp_path / "train.py")


@pytest.mark.slow
def test_the_command_records_a_script(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.trace"
    words = ["record", "--fake", "--batch", "300", "--device", "titanx-pcie3", "--json", "-o", str(output)]
    assert main([*words, f"{script}:make", "layers=3", "kind=plain"]) == 0
    told = capfd.readouterr()
    facts = json.loads(told.out)
    trace = Trace.load(output)
    assert facts["functions"] == trace.functions
    assert trace.function_names.count("aten::addmm") == 3
    assert "the program's own words" in told.err
    assert trace.machine == get_device("titanx-pcie3").link
    # The times of this trace, for a sequence of the same functions at another batch size.
    again = ["record", "--fake", "--batch", "500", "--times", str(output), "-o", str(tmp_path / "b.trace")]
    assert main([*again, f"{script}:make", "layers=3"]) == 0
    assert np.array_equal(Trace.load(tmp_path / "b.trace").function_seconds, trace.function_seconds)


@pytest.mark.medium
def test_the_command_says_what_is_wrong(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin = ["record", "--fake", "-o", str(tmp_path / "x.trace")]
    timed = [*begin, "--batch", "4", "--device", "a100-pcie4"]
    for words, status, message in (
        ([*begin, "--device", "a100-pcie4", "vgg16"], 2, "--fake needs --batch"),
        ([*begin, "--batch", "4", "vgg16"], 2, "--device (v100-nvlink2, "),
        ([*timed, "vgg16", "--batch", "8"], 2, "--batch comes too late"),
        ([*timed, "vgg16", "image"], 2, "'image' is no NAME=VALUE"),
        (["record", "-o", "x", "--batch", "4", script], 2, "belong to --fake"),
        ([*timed, f"{script}:make", "kind=fancy"], 1, "AssertionError"),
    ):
        assert main(words) == status, words
        assert message in capfd.readouterr().err, words
    assert not (tmp_path / "x.trace").exists()


def test_use_flags_are_reads_and_writes() -> None:
    trace = record(lambda batch: lambda: torch.ones(batch, 1000).add_(torch.ones(batch, 1000)), 10, small_limit_bytes=0)
    assert trace.function_names == ("aten::ones", "aten::ones", "aten::add_.Tensor")
    assert trace.use_flags.tolist() == [WRITE, WRITE, READ | WRITE, READ]
