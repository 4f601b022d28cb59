"""Whole models under `torch.compile`: what Inductor generates runs as functions, so they are trained out-of-core."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import EMULATED, PROGRAMS, Ended, code, run, run_source
from test_programs import check_identical, check_within_budget

from ooc.pytorch import build, compiled
from swapd.trace.trace import Trace

# MiB: at most the live peak over 2.5.
BUDGETS = {
    "hf_bert": 50, "hf_gpt2": 50, "hf_llama": 30, "hf_t5": 37, "lstm": 60, "unet": 30, "densenet": 40,
    "unet_batches": 50, "residual": 120,
}  # fmt: skip

MODEL = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    COMPILE
    for step in range(6):
        x = torch.randn(BATCH, 512)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
    print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for what Inductor compiles: the second process of a test finds what the first one compiled."""
    return str(tmp_path_factory.mktemp("inductor"))


def source(compiling: str = "model = torch.compile(model)", batch: str = "256") -> str:
    return MODEL.replace("COMPILE", compiling).replace("BATCH", batch)


def train(folder: Path, cache: str, budget: str, text: str, **variables: str) -> Ended:
    folder.mkdir(exist_ok=True)
    variables |= {"OOC_BUDGET": budget, "TORCHINDUCTOR_CACHE_DIR": cache}
    return run_source(folder, text, **variables).check()


@pytest.mark.medium
def test_a_compiled_model_is_a_sequence_of_functions(tmp_path: Path, cache: str) -> None:
    """A third of its live peak is enough for the same bits, and it is planned; from a warm cache of Inductor's, too."""
    plain = train(tmp_path / "plain", cache, "1GiB", source(), OOC_ALLOC="0")
    small = train(tmp_path / "small", cache, "5MiB", source(), OOC_TRACE=str(tmp_path / "trace.npz"))
    assert small.output == plain.output
    check_within_budget(small.figures, 5 << 20)
    assert small.figures["live_peak_bytes"] > 2.5 * small.figures["budget_bytes"]
    assert small.figures["planned_iteration_count"] > 0
    assert small.figures["divergence_count"] == 0
    assert any(name.startswith("cpp_fused") for name in names_in(tmp_path))
    assert not any(name.startswith("compiled_graph") for name in names_in(tmp_path))


@pytest.mark.slow
def test_batches_of_other_sizes(tmp_path: Path, cache: str) -> None:
    """Graphs with dynamic shapes: their kernels get sizes beside tensors."""
    text = source("model = torch.compile(model, dynamic=True)", "256 + 16 * (step % 2)")
    plain = train(tmp_path / "plain", cache, "1GiB", text, OOC_ALLOC="0")
    small = train(tmp_path / "small", cache, "6MiB", text)
    assert small.output == plain.output
    check_within_budget(small.figures, 6 << 20)
    assert small.figures["min_budget_bytes"] < small.figures["live_peak_bytes"] / 2


# Each step of it, in eager mode or compiled, needs less than a third of what the layouts of all its weights need.
CONVOLUTIONS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(96, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    COMPILE
    x = torch.randn(2, 96, 8, 8)
    for step in range(4):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
    print([p.double().sum().item().hex() for p in [*model.parameters(), *model.buffers()]])
"""


@pytest.mark.slow
def test_weights_are_laid_out_one_after_the_other(tmp_path: Path) -> None:
    """Inductor lays out all weights in one kernel; with us it needs no more at once, from a warm cache, too."""
    caches = [str(tmp_path / name) for name in ("cache", "other")]
    text = CONVOLUTIONS.replace("COMPILE", "model = torch.compile(model)")
    plain = train(tmp_path / "plain", caches[0], "1GiB", text, OOC_ALLOC="0")
    eager = train(tmp_path / "eager", caches[0], "1GiB", CONVOLUTIONS.replace("COMPILE", "")).figures
    for cache in caches:  # what plain PyTorch compiled is there, and is not there
        small = train(tmp_path / "small", cache, "4MiB", text)
        assert small.output == plain.output
        assert small.figures["min_budget_bytes"] <= 1.5 * eager["min_budget_bytes"]
        check_within_budget(small.figures, 4 << 20)
    warm = train(tmp_path / "small", caches[1], "4MiB", text)
    assert (warm.output, warm.figures["min_budget_bytes"]) == (plain.output, small.figures["min_budget_bytes"])
    assert train(tmp_path / "plain", caches[1], "1GiB", text, OOC_ALLOC="0").output == plain.output


def names_in(folder: Path) -> set[str]:
    return set(Trace.load(folder / "trace.npz").function_names)


@pytest.mark.slow
def test_a_graph_with_a_wrapper_in_cpp_is_one_function(tmp_path: Path, cache: str) -> None:
    """Nobody sees its kernels: it needs what all of it needs, and says so."""
    how = "import torch._inductor.config; torch._inductor.config.cpp_wrapper = True; model = torch.compile(model)"
    text = source(how)
    plain = train(tmp_path / "plain", cache, "1GiB", text, OOC_ALLOC="0")
    whole = train(tmp_path / "whole", cache, "1GiB", text, OOC_TRACE=str(tmp_path / "trace.npz"))
    assert whole.output == plain.output
    assert "a compiled graph is one function" in whole.errors
    assert sum(name.startswith("compiled_graph") for name in names_in(tmp_path)) == 2  # forward and backward
    assert not any(name.startswith("cpp_fused") for name in names_in(tmp_path))


@pytest.mark.slow
def test_what_was_compiled_before_us_is_compiled_anew(tmp_path: Path, cache: str) -> None:
    once = "model = torch.compile(model); model(torch.randn(BATCH, 512)).sum().backward(); optimizer.zero_grad()"
    plain = train(tmp_path / "plain", cache, "1GiB", source(once), OOC_ALLOC="0")
    text = source(f"{once}; import ooc; ooc.enable(alloc='cpu')")
    late = train(tmp_path / "late", cache, "1GiB", text, OOC_ALLOC="0", OOC_TRACE=str(tmp_path / "trace.npz"))
    assert late.output == plain.output
    assert any(name.startswith("cpp_fused") for name in names_in(tmp_path))


@pytest.mark.slow
def test_a_model_that_dynamo_leaves_alone_is_left_alone(tmp_path: Path, cache: str) -> None:
    """Called from a frame of PyTorch's own it is not compiled; nor is it because our frame is in between."""
    text = source("model.compile()") + "    assert not torch._dynamo.utils.counters['frames']\n"
    plain = train(tmp_path / "plain", cache, "1GiB", text, OOC_ALLOC="0")
    assert train(tmp_path / "small", cache, "8MiB", text).output == plain.output


@pytest.mark.slow
def test_strict(tmp_path: Path, cache: str) -> None:
    """All that a kernel does not name leaves before it: it reads and writes nothing else, and only what it may."""
    plain = train(tmp_path / "plain", cache, "1GiB", source(), OOC_ALLOC="0")
    strict = train(tmp_path / "strict", cache, "1GiB", source(), OOC_STRICT="1")
    assert strict.output == plain.output
    assert strict.figures["swap_in_bytes"] > 2 * strict.figures["live_peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_program(name: str, tmp_path: Path, cache: str) -> None:
    """The same bits as the same compiled model in plain memory, and little more memory than operator by operator."""

    def ended(folder: str, program: str, *arguments: str, **variables: str) -> Ended:
        (tmp_path / folder).mkdir()
        results = tmp_path / folder / "results.pt"
        words: list[str | Path] = ["-s", PROGRAMS / f"{program}.py", *arguments, "--save", results]
        return run(words, variables, summary=tmp_path / folder / "summary.json").check()

    settings = EMULATED | {"TORCHINDUCTOR_CACHE_DIR": cache, "OOC_BUDGET": str(BUDGETS[name] << 20)}
    ended("plain", "compiled", name, TORCHINDUCTOR_CACHE_DIR=cache)
    small = ended("small", "compiled", name, **settings).figures
    eager = ended("eager", name, **EMULATED | {"OOC_BUDGET": "4GiB"}).figures
    check_identical(tmp_path / "plain" / "results.pt", tmp_path / "small" / "results.pt")
    check_within_budget(small, BUDGETS[name] << 20)
    assert small["live_peak_bytes"] >= 2.5 * small["budget_bytes"]
    assert small["min_budget_bytes"] <= 1.5 * eager["min_budget_bytes"]
    assert small["planned_iteration_count"] > 0


LINES = """
    import torch
    import torch.nn.functional as F

    def block(x, weight):
        y = F.gelu(x @ weight)
        return y * 2 + 1

    weights = [torch.randn(512, 512, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(lambda x: block(block(x, weights[0]), weights[1]))
    for _ in range(3):
        compiled(torch.randn(512, 512)).sum().backward()
        torch.optim.SGD(weights, lr=0.1).step()
"""


@pytest.mark.slow
def test_kernels_are_named_by_the_lines_of_the_program(tmp_path: Path) -> None:
    """From a cache, too, unless the program is another one by now; and what Inductor writes is no place of the user."""
    variables = {"OOC_TRACE": str(tmp_path / "trace.npz"), "OOC_TIMELINE": str(tmp_path / "timeline.json")}
    script = tmp_path / "script.py"
    for _ in range(2):
        train(tmp_path, str(tmp_path / "cache"), "1GiB", LINES, **variables)
        fused = [name for name in Trace.load(tmp_path / "trace.npz").function_names if name.startswith("cpp_fused")]
        assert len(fused) >= 3  # the forward pass calls one kernel twice
        numbers = [script.read_text().splitlines().index(line) + 1 for line in GELU_AND_SUM]
        for name in fused:
            assert re.search(f" at {script}:({numbers[0]}|{numbers[1]}) in block", name), name
        assert f"{fused[0].split(' ')[0]} at " in (tmp_path / "timeline.json").read_text()
        places = Trace.load(tmp_path / "trace.npz").places
        assert places and not any("cache" in place for place in places)
    train(tmp_path, str(tmp_path / "cache"), "1GiB", f"\n{code(LINES)}", **variables)
    assert any(name.startswith("cpp_fused") for name in names_in(tmp_path))
    assert not any(" at " in name for name in names_in(tmp_path))


GELU_AND_SUM = ("    y = F.gelu(x @ weight)", "    return y * 2 + 1")


TOO_LARGE = """
    import torch

    def fused(a, b, c):
        return a * b + c

    operands = [torch.randn(1024, 1024) for _ in range(3)]
    small = [operand[:8].clone() for operand in operands]
    try:
        torch.compile(fused)(*operands)
    except torch.OutOfMemoryError as error:
        print(error)
    assert torch.equal(torch.compile(fused)(*small), fused(*small))
"""


@pytest.mark.slow
def test_a_kernel_that_is_too_large(tmp_path: Path, cache: str) -> None:
    """It is named, with the budget that it needs: 16 MiB. Afterwards everything goes on."""
    ended = train(tmp_path, cache, "10MiB", TOO_LARGE)
    assert re.search(r"cpp_fused_add_mul_0 at \S+:5 in fused needs 16777216 bytes", ended.output)
    assert "OOC_BUDGET=16908288" in ended.output  # with small variables
    assert ended.figures["device_peak_bytes"] <= 10 << 20


# ---- what a kernel says of its arguments ----------------------------------------------------------------------------


def triton_kernel(calls: list[Any], names: list[str], written: list[str]) -> Any:
    """As much of one as we look at; there is no Triton on a CPU."""
    return SimpleNamespace(
        fn=SimpleNamespace(arg_names=names),
        inductor_meta={"mutated_arg_names": written},
        run=lambda *args, stream: calls.append((args, stream)),
    )


def test_what_a_triton_kernel_only_reads() -> None:
    build.load()  # our operators; without a core they do nothing
    calls: list[Any] = []
    names = ["in_out_ptr0", "in_ptr0", "in_ptr1", "out_ptr0", "xnumel"]
    kernel = triton_kernel(calls, names, ["in_out_ptr0", "in_ptr1"])
    reads = compiled._reads("triton", "", kernel)
    assert reads == [False, True, False, False, False]
    tensors = [torch.ones(1) for _ in range(4)]
    opened = compiled.KernelFunction("triton_poi_fused_0", kernel, reads)
    opened.run(*tensors, 4, stream=7)
    assert calls == [((*tensors, 4), 7)]
    assert opened.inductor_meta is kernel.inductor_meta


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The functions that kernels begin: the identities of the tensors that each may write, and only reads."""
    functions: list[tuple[list[int], list[int]]] = []

    def begin(function: int, operands: Any, first: int, end: int) -> bool:
        tensors = list(map(id, operands))
        functions.append((tensors[:first] + tensors[end:], tensors[first:end]))
        return False

    operators = {"kernel_begin": begin, "kernel_end": lambda: None}
    ooc = {name: SimpleNamespace(default=SimpleNamespace(_op=call)) for name, call in operators.items()}
    monkeypatch.setattr(compiled.torch.ops, "ooc", SimpleNamespace(**ooc, function_id=lambda name: -1))
    return functions


def test_every_tensor_that_a_kernel_is_given_is_an_operand(begun: list[tuple[list[int], list[int]]]) -> None:
    """However many there are, in whatever way it is given them."""
    tensors = [torch.ones(1) for _ in range(100)]
    descriptor = SimpleNamespace(base=torch.ones(1))
    compiled.KernelFunction("k", lambda *args, **kwargs: None, [True])(*tensors[:-1], 7, descriptor, out=tensors[-1])
    [(written, read)] = begun
    assert read == [id(tensors[0])]
    assert written == [id(t) for t in (*tensors[1:-1], descriptor.base, tensors[-1])]


@pytest.mark.parametrize(
    "reads",
    [[False, True, True, False], [True, True, False], [False, False], [True, True], [True, False, True]],
    ids=["in the middle", "at the start", "none", "all", "no slice"],
)
def test_the_operands_of_a_cpp_kernel(reads: list[bool], begun: list[tuple[list[int], list[int]]]) -> None:
    """Its tensors come first, and sizes after them."""
    tensors = [torch.ones(1) for _ in reads]
    calls: list[Any] = []
    compiled.KernelFunction("k", lambda *args: calls.append(args), [*reads, True], len(reads))(*tensors, 16)
    [(written, read)] = begun
    assert read == [id(tensor) for tensor, only_read in zip(tensors, reads) if only_read]
    assert written == [id(tensor) for tensor, only_read in zip(tensors, reads) if not only_read]
    assert calls == [(*tensors, 16)]


def test_what_a_cpp_kernel_only_reads() -> None:
    assert compiled._reads("cpp_pybinding", "['const float*', 'float*', 'const int64_t']", None) == [True, False, True]


def test_kernels_are_found_in_what_inductor_writes() -> None:
    text = (
        "cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''\n...''')\n"
         "triton_red_1 = async_compile.triton('triton_red_1', '''\n...''', device_str='cuda')\n"
    )
    assert compiled._KERNEL.findall(text) == [
        ("cpp_fused_0", "cpp_pybinding", "['const float*', 'float*']"),
        ("triton_red_1", "triton", ""),
    ]
