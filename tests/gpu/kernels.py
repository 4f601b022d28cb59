"""What needs kernels, on the GPU with the allocator: python kernels.py NAME. Each check is a process of its own.

The checks that need none are those of the stand-in (tests/cuda_build/checks.py), which run on the GPU too.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ooc

MIB = 1 << 20


def start(budget: int, **settings: Any) -> None:
    ooc.enable(alloc="cuda", budget=budget, **settings)
    torch.manual_seed(0)


def pressed() -> None:
    """The run was out-of-core, and within its budget."""
    figures = ooc.summary()
    assert figures["swap_in_bytes"] > 0 and figures["device_peak_bytes"] <= figures["budget_bytes"], figures
    assert figures["driver_failure_count"] == 0, figures


def matrices(count: int = 12, side: int = 2048) -> list[Tensor]:
    return [torch.randn(side, side, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def workspaces() -> None:
    """cuBLAS keeps a workspace between calls: it must not leave."""
    plain = matrices()
    start(128 * MIB)
    managed = [matrix.cuda() for matrix in plain]
    products = [matrix @ matrix for matrix in managed]
    again = [matrix @ matrix for matrix in managed]
    for first, second, matrix in zip(products, again, plain, strict=True):
        assert torch.equal(first, second)
        assert torch.allclose(first.cpu(), matrix @ matrix, rtol=1e-2, atol=1e-1)
    pressed()


def benchmark_mode() -> None:
    start(512 * MIB)
    torch.backends.cudnn.benchmark = True
    layers = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(12))).cuda()
    images = torch.randn(16, 64, 112, 112, device="cuda", requires_grad=True)
    for _ in range(2):
        layers(images).square().mean().backward()
    assert images.grad is not None and bool(images.grad.isfinite().all())
    pressed()


def mixed_precision() -> None:
    start(384 * MIB)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(10)))
    model = model.cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    images = torch.randn(32, 64, 112, 112, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert bool(loss.isfinite())
    pressed()


def graph_of_kernels() -> None:
    start(256 * MIB)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    source = torch.randn(512, 1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            model(source)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = model(source)
    ballast = [torch.randn(4 * MIB, device="cuda") for _ in range(24)]  # 384 MiB: what may leave does
    for seed in range(3):
        source.copy_(torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(result, model(source))
        for tensor in ballast:
            tensor.add_(1)
    pressed()


def compiled() -> None:
    """Blocks compiled one by one; then with CUDA graphs."""
    start(384 * MIB)
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda() for _ in range(4)]
    x = torch.randn(4096, 1024, device="cuda")
    with torch.no_grad():
        expected = x
        for block in blocks:
            expected = block(expected)
        for mode in ("default", "reduce-overhead"):
            for _ in range(3):
                y = x
                for block in blocks:
                    y = torch.compile(block, mode=mode)(y).clone()
            assert torch.allclose(y, expected, rtol=1e-2, atol=1e-2), mode


def several_streams() -> None:
    start(256 * MIB)
    plain = matrices(16, 1536)
    expected = [F.relu(matrix).sum(dim=0) * 3 for matrix in plain]
    wrong: list[int] = []

    def work(offset: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            managed = [matrix.cuda() for matrix in plain[offset::4]] * 1
            for _ in range(6):
                copies = [matrix.clone() * 3 for matrix in managed]
            found = [F.relu(matrix).sum(dim=0).cpu() for matrix in copies]
            if not all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(found, expected[offset::4], strict=True)):
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pressed()


def late_readers() -> None:
    """A slow kernel on one stream still reads what another stream's allocation would overwrite."""
    start(128 * MIB)
    side = torch.cuda.Stream()
    for seed in range(20):
        plain = torch.full((4 * MIB,), float(seed))
        managed = plain.cuda()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            copied = managed.clone()
        managed.record_stream(side)
        del managed
        others = [torch.full((4 * MIB,), -1.0, device="cuda") for _ in range(10)]
        side.synchronize()
        assert torch.equal(copied.cpu(), plain)
        del others
    pressed()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")
