"""The programs of the disk tier's benchmark at toy sizes: every way gives the same bits. Nothing here is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.disk.cases import EXAMPLES
from benchmarks.runs import ROOT, digest_of

GPT = ["--layers", "2", "--width", "32", "--batch-size", "2", "--context", "16", "--text-bytes", "50000"]
GPT += ["--sample-bytes", "1"]
LLAMA = "--layers 2 --width 64 --heads 4 --groups 2 --hidden 128 --vocabulary 50 --length 8 --batch-size 2".split()
COUNTED = {"seconds", "read_bytes", "written_bytes", "swapped_out_bytes", "major_faults", "peak_rss_bytes"}


def a_disk() -> str:
    """Some disk whose counters can be read."""
    found = sorted(path.name for path in Path("/sys/dev/block").glob("*"))
    if not found:
        pytest.skip("no disk has counters here (/sys/dev/block is empty)")
    return found[0]


def run(folder: Path, module: str, way: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """What a program of the benchmark wrote."""
    output = folder / f"{way}.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    command = [sys.executable, "-m", f"benchmarks.disk.{module}", str(output), a_disk(), "1", way, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    return made


@pytest.mark.slow
def test_training_that_computes_blocks_again_gives_the_same_bits(tmp_path: Path) -> None:
    digests = {}
    for way in ("plain", "checkpointed"):
        state = tmp_path / f"{way}.pt"
        made = run(tmp_path, "child", way, str(EXAMPLES / "gpt.py"), *GPT, "--steps", "3", "--save", str(state))
        assert len(made["steps"]) == 3 and made["threads"] == 1
        assert set(made["steps"][0]) >= COUNTED and made["peak_rss_bytes"] >= made["steps"][0]["rss_bytes"] > 0
        digests[way] = digest_of(state)
    assert digests["plain"] == digests["checkpointed"]


def test_checkpointing_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs once more in the backward pass."""
    import torch

    from benchmarks.disk.child import checkpoint, load_program

    program = load_program(EXAMPLES / "gpt.py")
    calls = []
    forward = program.Block.forward
    monkeypatch.setattr(program.Block, "forward", lambda self, x: (calls.append(self), forward(self, x))[1])
    checkpoint(program.Block)
    model = program.GPT(3, 2, 16, 8)
    loss = model(torch.zeros(1, 8, dtype=torch.int64)).sum()
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == 6


@pytest.mark.slow
def test_inference_gives_the_same_bits_in_every_way(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    weights = tmp_path / "weights.safetensors"
    run(tmp_path, "llama_child", "plain", "make", str(weights), *LLAMA)
    ways = ["plain", "mapped"]
    try:
        import accelerate  # noqa: F401

        ways.append("offloaded")
    except ImportError:
        pass
    digests = set()
    for way in ways:
        words = ["--steps", "3", "--save", str(tmp_path / "state.pt"), "--scratch", str(tmp_path / "scratch")]
        made = run(tmp_path, "llama_child", way, "run", str(weights), *LLAMA, *words)
        assert len(made["steps"]) == 3
        digests.add(digest_of(tmp_path / "state.pt"))
    assert len(digests) == 1


@pytest.mark.parametrize("program", ["cholesky", "pca"])
def test_array_programs_give_the_same_bits_within_a_budget(tmp_path: Path, program: str) -> None:
    words = [program, "--blocks", "4", "--size", "64", "--rows", "128", "--steps", "4"]
    plain = run(tmp_path, "numpy_child", "plain", *words)
    variables = {"OOC_ALLOC": "emulated", "OOC_BUDGET": "256KiB", "OOC_CHUNK_SIZE": "32KiB", "OOC_SMALL_LIMIT": "16KiB"}
    ours = run(tmp_path, "numpy_child", "ours", *words, **variables, OOC_SUMMARY=str(tmp_path / "summary.json"))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["swap_in_bytes"] > 0 and summary["device_peak_bytes"] <= summary["budget_bytes"]
    assert ours["digest"] == plain["digest"] and ours["live_bytes"] == plain["live_bytes"]


@pytest.mark.parametrize("program", ["cholesky", "pca"])
def test_dask_finds_the_same_up_to_rounding(tmp_path: Path, program: str) -> None:
    pytest.importorskip("dask.array")
    import numpy as np

    from benchmarks.disk.numpy_child import make, parse_arguments

    words = [program, "--blocks", "4", "--size", "16", "--rows", "32", "--scratch", str(tmp_path / "dask")]
    plain, dask = (make(parse_arguments(words), way, 1) for way in ("plain", "dask"))
    for made in (plain, dask):
        made.step(0)

    def results(made: Any) -> Any:
        return np.concatenate([np.tril(matrix) if program == "cholesky" else matrix for matrix in made.results()])

    one, other = results(plain), results(dask)
    signs = np.sign((one * other).sum(axis=0)) if program == "pca" else 1.0  # of an eigenvector: either
    assert one.shape == other.shape and np.abs(one).max() > 0.1
    np.testing.assert_allclose(one, other * signs, rtol=1e-9, atol=1e-9)
