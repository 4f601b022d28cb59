"""The way to a CUDA device, as far as it goes without one and without a CUDA build of PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_source

from ooc.pytorch import build, cuda
from ooc_alloc import Core, OocError, OutOfMemory, library_path

MIB = 1 << 20


class FakeCore:
    def __init__(self, **stats: int) -> None:
        self._stats = stats

    def stats(self) -> dict[str, int]:
        return self._stats


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch that is built for CUDA 13 and sees four devices."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built for CUDA")
def test_cuda_is_asked_for_and_cannot_be(tmp_path: Path) -> None:
    source = """
        import torch
        x = torch.randn(1000)
        print(torch.equal(x + 1, 1 + x))
    """
    ended = run_source(tmp_path, source, OOC_ALLOC="cuda").check()
    assert ended.output == "True\n"
    assert "not active" in ended.errors and "built for the CPU alone" in ended.errors
    assert "OOC_ALLOC=emulated" in ended.errors
    assert ended.summary is None
    with pytest.raises(OocError, match="built for the CPU alone"):
        cuda.choose("cuda")
    assert cuda.choose("auto") is None


def test_the_device_of_the_rank(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.choose("cpu") is None
    for rank, expected in (("", 0), ("3", 3), ("4", 0), ("x", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        for alloc in ("auto", "cuda"):
            device = cuda.choose(alloc)
            assert device is not None and device.ordinal == expected and device.driver == "libcuda.so.1"


def test_no_device(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda.choose("auto") is None
    with pytest.raises(OocError, match="no CUDA device"):
        cuda.choose("cuda")


def test_too_late(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for alloc in ("auto", "cuda"):
        with pytest.raises(OocError, match="before the first CUDA tensor"):
            cuda.choose(alloc)


def test_memory_info() -> None:
    """What is free, cached, or in slabs that are empty can be had without moving anything."""
    stats = {"budget_bytes": 100, "device_bytes": 90, "free_bytes": 10, "cached_bytes": 20}
    core = FakeCore(**stats, slab_bytes=30, slab_used_bytes=25)
    assert cuda.memory_info(core) == (45, 100)  # type: ignore[arg-type]
    over = FakeCore(budget_bytes=50, device_bytes=90, free_bytes=0, cached_bytes=0, slab_bytes=0, slab_used_bytes=0)
    assert cuda.memory_info(over) == (0, 50)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is built for CUDA")
def test_the_part_for_cuda_is_compiled_for_cuda_alone(
    gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    plain = build.command(tmp_path / "adapter.so")
    assert not any("cuda" in Path(word).name.lower() for word in plain)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "_package_folders", lambda name: [tmp_path / name])
    monkeypatch.setattr(build, "TOOLKITS", ())
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "toolkit"))
    with pytest.raises(build.AdapterError, match=r"nvidia-cuda-crt.*CUDA_HOME"):
        build.command(tmp_path / "adapter.so")
    headers, library = tmp_path / "nvidia" / "cu13" / "include", tmp_path / "nvidia" / "cu13" / "lib"
    crt = tmp_path / "triton" / "backends" / "nvidia" / "include"
    for path in (headers / "cuda_runtime_api.h", library / "libcudart.so.13", crt / "crt" / "host_defines.h"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command = build.command(tmp_path / "adapter.so")
    assert "-DOOC_WITH_CUDA" in command and str(build.SOURCES / "cuda_allocator.cpp") in command
    assert command[command.index(str(headers)) - 1] == "-isystem" and str(crt) in command
    assert "-l:libcudart.so.13" in command and f"-L{library}" in command


def test_the_budget_of_a_core() -> None:
    driver = str(library_path("libooc_emulated_cuda.so"))
    core = Core(driver, budget_bytes=8 * MIB, host_budget_bytes=64 * MIB, chunk_bytes=MIB, small_limit_bytes=0)
    try:
        addresses = [core.malloc(2 * MIB) for _ in range(4)]
        core.synchronize()
        core.set_budget(4 * MIB)
        assert core.stats()["budget_bytes"] == 4 * MIB >= core.stats()["device_bytes"]
        core.set_budget(8 * MIB)
        tokens = [core.pin(address) for address in addresses]
        with pytest.raises(OutOfMemory, match="lowered"):
            core.set_budget(4 * MIB)
        with pytest.raises(OocError, match="OOC_BUDGET"):
            core.set_budget(9 * MIB)
        assert core.stats()["budget_bytes"] == 8 * MIB and len(tokens) == 4
        core.audit()
    finally:
        core.close()
