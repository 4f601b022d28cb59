"""Whole models under `torch.compile`: what Inductor generates runs as functions, so they are trained out-of-core."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import EMULATED, PROGRAMS, Ended, run, run_source
from test_programs import check_identical, check_within_budget

from ooc.pytorch import build, compiled
from swapd.trace.trace import Trace

# MiB: at most the live peak over 2.5.
BUDGETS = {"hf_bert": 50, "hf_gpt2": 50, "hf_llama": 30, "hf_t5": 37, "lstm": 50, "unet": 30, "densenet": 40}
STEADY = set(BUDGETS) - {"lstm"}

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
    if name in STEADY:
        assert small["planned_iteration_count"] > 0


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
    assert "cpp_fused_add_mul_0 needs 16777216 bytes" in ended.output
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


def test_every_tensor_that_a_kernel_is_given_is_an_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, in whatever way it is given them."""
    begun: list[Any] = []
    scope = SimpleNamespace(default=lambda name, written, read: begun.append((written, read)))
    monkeypatch.setattr(compiled.torch.ops, "ooc", SimpleNamespace(scope_begin=scope, scope_end=scope))
    tensors = [torch.ones(1) for _ in range(100)]
    descriptor = SimpleNamespace(base=torch.ones(1))
    compiled.KernelFunction("k", lambda *args, **kwargs: None, [True])(*tensors[:-1], 7, descriptor, out=tensors[-1])
    [(written, read)] = begun
    assert [id(tensor) for tensor in read] == [id(tensors[0])]
    assert [id(tensor) for tensor in written] == [id(t) for t in (*tensors[1:-1], descriptor.base, tensors[-1])]


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
