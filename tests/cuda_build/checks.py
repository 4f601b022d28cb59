"""What PyTorch's functions for CUDA memory do with the allocator, on the stand-in: each check is a process of its own.

    python checks.py NAME

The stand-in (stand_in.cpp) copies and fills memory and runs no kernel, so bytes get to tensors by copies alone. `make
test-gpu` runs the same on a GPU, with larger tensors, as chunks are larger there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import ooc

UNIT = int(os.environ.get("OOC_CHECK_UNIT", 1 << 20))  # bytes of a tensor; of several chunks
ON_GPU = os.environ.get("OOC_CHECK_DEVICE") == "gpu"
BUDGET = 8 * UNIT


def start(**settings: Any) -> None:
    given = {"alloc": "cuda", "budget": BUDGET, "chunk_size": "64KiB", "small_limit": "64KiB", **settings}
    ooc.enable(**given)
    assert (ooc.summary()["device"] == "emulated") != ON_GPU, "this is not the device that was meant"
    torch.cuda.init()


def numbers(count: int = UNIT // 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def stats() -> dict[str, Any]:
    from ooc.pytorch import _active

    return dict(_active().core.stats())


def refused(call: Any, *words: str, kind: type[Exception] = RuntimeError) -> None:
    message = None
    try:
        call()
    except kind as error:
        message = str(error)
    assert message is not None, f"nothing was raised; expected {kind.__name__}"
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def make(count: int = 20, size: int = UNIT) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`count` tensors of `size` bytes on the CPU and the same on the device."""
    plain = [numbers(size // 4, seed) for seed in range(count)]
    return plain, [tensor.cuda() for tensor in plain]


def same(plain: list[torch.Tensor], managed: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b.cpu()) for a, b in zip(plain, managed, strict=True))


# ---- memory ---------------------------------------------------------------------------------------------------------


def oversubscription() -> None:
    start()
    plain, managed = make()
    assert same(plain, managed)
    copies = [tensor.clone() for tensor in managed]
    assert same(plain, copies) and same(plain, managed)
    figures = ooc.summary()
    assert figures["live_peak_bytes"] == 40 * UNIT
    assert figures["device_peak_bytes"] <= BUDGET == figures["budget_bytes"]
    assert figures["swap_in_bytes"] > 0


def strict() -> None:
    start(strict=True)
    plain, managed = make(6)
    assert same(plain, managed)
    assert same(plain, [tensor.clone() for tensor in managed])
    assert stats()["swap_in_bytes"] > 6 * UNIT


def plans() -> None:
    start()
    plain, managed = make(16)
    for _ in range(6):
        for tensor in managed:
            tensor.copy_(tensor.clone())
        ooc.step()
    assert same(plain, managed)
    assert ooc.summary()["planned_iteration_count"] > 0


def statistics() -> None:
    start()
    assert torch.cuda.memory_allocated() == 0
    first = torch.empty(UNIT, dtype=torch.uint8, device="cuda")
    second = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == UNIT + 1024
    found = torch.cuda.memory_stats()
    assert found["allocation.all.current"] == 2 and found["requested_bytes.all.current"] == UNIT + 1000
    assert found["allocated_bytes.small_pool.current"] == 1024 and found["allocated_bytes.large_pool.current"] == UNIT
    assert found["reserved_bytes.all.current"] == stats()["device_bytes"] == torch.cuda.memory_reserved()
    del first
    assert torch.cuda.memory_allocated() == 1024 and torch.cuda.max_memory_allocated() == UNIT + 1024
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved() > 0
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 1024
    assert torch.cuda.memory_stats()["allocation.all.freed"] == 1
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.freed"] == 0
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert 0 < torch.cuda.memory_reserved() < reserved  # the slab of `second` stays
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == 1024
    assert torch.cuda.get_allocator_backend() == "ooc_alloc"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.cuda.memory_cached() == torch.cuda.memory_reserved()
        torch.cuda.reset_max_memory_allocated()
        torch.cuda.reset_max_memory_cached()
        assert torch.cuda.max_memory_cached() == torch.cuda.memory_reserved()
    del second
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.host_memory_stats() is not None


def memory_info() -> None:
    start()
    assert torch.cuda.mem_get_info() == (BUDGET, BUDGET) == torch.cuda.memory.mem_get_info("cuda")
    tensor = torch.empty(2 * UNIT, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (BUDGET - 2 * UNIT, BUDGET)
    if hasattr(torch.accelerator, "get_memory_info"):
        assert tuple(torch.accelerator.get_memory_info()) == (BUDGET - 2 * UNIT, BUDGET)
    del tensor
    assert torch.cuda.mem_get_info() == (BUDGET, BUDGET)  # it is cached: it can be had without moving anything


def fraction() -> None:
    start()
    plain, managed = make(6)
    total = stats()["device_total_bytes"]
    before = torch.cuda.get_per_process_memory_fraction()
    assert abs(before - BUDGET / total) < 1e-9
    torch.cuda.set_per_process_memory_fraction(3 * UNIT / total)
    assert 0 <= 3 * UNIT - torch.cuda.mem_get_info()[1] < 2  # rounded
    assert torch.cuda.memory_reserved() <= 3 * UNIT
    assert same(plain, managed) and torch.cuda.memory_reserved() <= 3 * UNIT
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.mem_get_info()[1] == BUDGET  # OOC_BUDGET stays the upper limit
    ooc.keep_resident(*managed)
    refused(
        lambda: torch.cuda.set_per_process_memory_fraction(3 * UNIT / total), "lowered", kind=torch.OutOfMemoryError
    )
    refused(lambda: torch.cuda.set_per_process_memory_fraction(0.0), "fraction")
    assert torch.cuda.mem_get_info()[1] == BUDGET and same(plain, managed)


def larger_than_the_budget() -> None:
    """Operators run in parts, and what was tried before is no lack of memory to PyTorch's observers."""
    start()
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *facts: seen.append(facts))
    plain = numbers(BUDGET // 2)
    large = torch.empty(BUDGET // 2, device="cuda").copy_(plain)
    assert large.untyped_storage().nbytes() == 2 * BUDGET and torch.equal(large.cpu(), plain)
    assert not seen and torch.cuda.memory_stats()["num_ooms"] == 0
    refused(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"), kind=torch.cuda.OutOfMemoryError)
    refused(lambda: large.data_ptr(), "OOC_BUDGET=", kind=torch.cuda.OutOfMemoryError)
    assert [facts[1] for facts in seen] == [1 << 50] and torch.cuda.memory_stats()["num_ooms"] == 1


def out_of_memory() -> None:
    start(split="off")
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *facts: seen.append(facts))
    plain, managed = make(4)
    refused(
        lambda: torch.empty(2 * BUDGET, dtype=torch.uint8, device="cuda"),
        "out of memory", "OOC_BUDGET=", "aten::empty", kind=torch.cuda.OutOfMemoryError,
    )  # fmt: skip
    assert seen and seen[0][1] == 2 * BUDGET
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    assert same(plain, managed)
    refused(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"), kind=torch.cuda.OutOfMemoryError)


def snapshots() -> None:
    start()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = torch.empty(UNIT, dtype=torch.uint8, device="cuda")
    gone = torch.empty(2 * UNIT, dtype=torch.uint8, device="cuda")
    del gone
    found = torch.cuda.memory._snapshot()
    segment = next(each for each in found["segments"] if each["address"] == kept.untyped_storage().data_ptr())
    assert segment["total_size"] == segment["allocated_size"] == UNIT and segment["segment_type"] == "large"
    block = segment["blocks"][0]
    assert block["state"] == "active_allocated"
    assert any(Path(frame["filename"]).name == "checks.py" for frame in block["frames"])
    actions = [(entry["action"], entry["size"]) for entry in found["device_traces"][0]]
    for expected in (("alloc", UNIT), ("alloc", 2 * UNIT), ("free_requested", 2 * UNIT), ("free_completed", 2 * UNIT)):
        assert expected in actions, actions
    from torch.cuda import _memory_viz

    assert "ooc" not in _memory_viz.segsum(found)  # whatever it says, it can read it
    assert _memory_viz.trace(found)
    assert len(_memory_viz.trace_plot(found)) > 1000
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(f"{folder}/snapshot.pickle")
        assert Path(folder, "snapshot.pickle").stat().st_size > 0
    torch.cuda.memory._record_memory_history(enabled=None)
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []
    assert torch.cuda.memory_snapshot()


def raw_memory() -> None:
    start()
    address = torch.cuda.caching_allocator_alloc(UNIT)
    assert stats()["pinned_bytes"] >= UNIT and torch.cuda.memory_allocated() == UNIT
    runtime().cudaMemset(ctypes.c_void_p(address), 7, ctypes.c_size_t(UNIT))
    plain, managed = make()  # everything else comes and goes
    assert same(plain, managed)
    back = torch.empty(UNIT, dtype=torch.uint8)
    to_host(back, address, UNIT)
    assert bool((back == 7).all())
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 20 * UNIT
    refused(lambda: torch.cuda.caching_allocator_delete(address), "not allocated here")
    view = managed[0].__cuda_array_interface__
    pinned = view["data"][0]
    _, more = make()
    to_host(back, pinned, UNIT)
    assert torch.equal(back.view(torch.float32), plain[0])
    del more


def address_of(tensor: torch.Tensor) -> int:
    """Where its memory is, without pinning it as `data_ptr` does."""
    return int(torch.UntypedStorage.data_ptr.__wrapped__(tensor.untyped_storage()))  # type: ignore[attr-defined]


def runtime() -> ctypes.CDLL:
    """The CUDA runtime."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}" if ON_GPU else os.environ["LD_PRELOAD"])


def to_host(target: torch.Tensor, address: int, size: int, stream: int | None = None) -> None:
    """Behind PyTorch's back; on the null stream unless one is given, and then not waited for."""
    call = runtime().cudaMemcpyAsync
    source = ctypes.c_void_p(address)
    assert call(ctypes.c_void_p(target.data_ptr()), source, ctypes.c_size_t(size), 2, ctypes.c_void_p(stream)) == 0


def closed_gate(stream: torch.cuda.Stream) -> tuple[Any, threading.Event]:
    """Holds the stream back until the event is set. What it returns has to live until then."""
    opened = threading.Event()
    gate = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: opened.wait())
    assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), gate, None) == 0
    return gate, opened


# ---- streams and threads --------------------------------------------------------------------------------------------


def record_stream() -> None:
    """A raw copy on another stream, late, of memory that is freed at once: without the call it sees other bytes."""
    start()
    side = torch.cuda.Stream()
    plain = numbers()
    zeros = torch.zeros(UNIT // 4)
    for recorded in (True, False):
        managed = plain.cuda()
        address = address_of(managed)
        host = torch.empty(UNIT // 4).pin_memory()
        torch.cuda.synchronize()
        if recorded:
            managed.record_stream(side)  # work that is enqueued until the tensor is freed counts,
            another = plain.cuda()
            another.record_stream(side)
            del another
            again = torch.empty(UNIT // 4, device="cuda")  # though the stream has an event behind what was there by now
        gate, opened = closed_gate(side)
        to_host(host, address, UNIT, side.cuda_stream)
        del managed
        threading.Timer(0.2, opened.set).start()
        other = torch.empty(UNIT // 4, device="cuda").copy_(zeros)
        torch.cuda.current_stream().synchronize()
        assert opened.is_set() == recorded  # it has waited, or not
        assert address_of(other) == address
        side.synchronize()
        assert torch.equal(host, plain) == recorded
        del other, gate
    del again


def record_stream_of_what_leaves() -> None:
    """The same of memory that is not freed, but swapped out: its chunks are not overwritten before they were read."""
    start()
    side = torch.cuda.Stream()
    plain = numbers(seed=99)
    managed = plain.cuda()
    host = torch.empty(UNIT // 4).pin_memory()
    torch.cuda.synchronize()
    gate, opened = closed_gate(side)
    to_host(host, address_of(managed), UNIT, side.cuda_stream)
    managed.record_stream(side)
    threading.Timer(0.3, opened.set).start()
    others = make()
    side.synchronize()
    assert torch.equal(host, plain) and torch.equal(managed.cpu(), plain)
    assert same(*others)
    del gate


def several_streams() -> None:
    """Threads with streams of their own, whose tensors do not fit together."""
    start()
    wrong: list[int] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            plain = [numbers(UNIT // 4, 100 * seed + index) for index in range(6)]
            managed = [tensor.cuda() for tensor in plain]
            for _ in range(8):
                managed = [tensor.clone() for tensor in managed]
            if not same(plain, managed):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ooc.summary()["device_peak_bytes"] <= BUDGET and stats()["swap_in_bytes"] > 0


def created_stream() -> ctypes.c_void_p:
    """A stream that PyTorch knows nothing of, as a library makes it."""
    stream = ctypes.c_void_p()
    assert runtime().cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    return stream


def destroyed_streams() -> None:
    """What was allocated and used on a stream that is destroyed stays right, and the stream is not used again."""
    start()
    every: list[torch.Tensor] = []
    for seed in range(4):
        handle, another = created_stream(), created_stream()  # the handles of those before, perhaps
        external = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(external):
            managed = [numbers(seed=10 * seed + n).cuda() for n in range(3)]
            every += [tensor.clone() for tensor in managed]
        with torch.cuda.stream(torch.cuda.ExternalStream(another.value)):
            every[-1].add_(0)
        torch.cuda.synchronize()
        assert runtime().cudaStreamDestroy(handle) == runtime().cudaStreamDestroy(another) == 0
        del managed  # of a stream that is gone
        assert make(6)[1][0].numel() > 0  # what is there has to leave
    assert same([numbers(seed=10 * seed + n) for seed in range(4) for n in range(3)], every)
    ooc.step()
    torch.cuda.empty_cache()


def backward_thread() -> None:
    start()
    ran_in: list[int] = []

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            ran_in.append(threading.get_ident())
            return gradient.clone()

    def pass_over() -> None:
        tensor = torch.zeros(UNIT // 4, device="cuda", requires_grad=True)
        result = Copy.apply(tensor)
        result.backward(numbers().cuda())
        assert tensor.grad is not None and torch.equal(tensor.grad.cpu(), numbers())
        assert ran_in.pop() == threading.get_ident()

    pass_over()
    thread = threading.Thread(target=pass_over)
    thread.start()
    thread.join()
    assert not ran_in


hidden: list[torch.Tensor] = []


def hidden_workspaces() -> None:
    """Memory that an operator keeps for itself (as cuBLAS does) is pinned; its result is not."""
    start()

    @torch.library.custom_op("check::keeps", mutates_args=())
    def keeps(tensor: torch.Tensor) -> torch.Tensor:
        hidden.append(tensor.clone())
        return tensor.clone()

    plain = numbers()
    result = keeps(plain.cuda())
    address = address_of(hidden[0])
    _, other = make()
    back = torch.empty_like(plain)
    to_host(back, address, UNIT)
    assert torch.equal(back, plain), "it has left the device"
    assert stats()["pinned_bytes"] <= 4 * UNIT, "the result was pinned too"
    assert torch.equal(result.cpu(), plain) and len(other) == 20


def triton_launchers() -> None:
    """Triton asks for addresses: within a compiled graph that pins nothing beyond it, elsewhere it does."""
    start()
    launcher: dict[str, Any] = {"__name__": "triton.backends.nvidia.driver"}
    exec("def launch(tensor): return tensor.data_ptr()", launcher)
    tensor = numbers().cuda()
    before = stats()["external_pin_count"]
    assert torch.ops.ooc.scope_begin("compiled_graph", [tensor], [])
    assert launcher["launch"](tensor) != 0
    torch.ops.ooc.scope_end([])
    assert stats()["external_pin_count"] == before
    assert launcher["launch"](tensor) != 0
    assert stats()["external_pin_count"] == before + 1


def cpu_tensors() -> None:
    start()
    model = torch.nn.Linear(64, 64)
    out = model(torch.randn(8, 64)).sum()
    out.backward()
    assert model.weight.grad is not None
    torch.optim.SGD(model.parameters(), 0.1).step()
    square = torch.randn(100, 100)
    before = stats()["functions"]
    assert (square @ square + square).relu().shape == (100, 100)
    assert torch.zeros(10).sum() == 0 and torch.empty(3).shape == (3,) and torch.arange(3).tolist() == [0, 1, 2]
    assert torch.rand(3, 3).numel() == 9 and torch.full((2,), 7).tolist() == [7, 7] and torch.eye(2).trace() == 2
    assert torch.scalar_tensor(2).item() == 2 and torch.empty_strided((2, 2), (2, 1)).stride() == (2, 1)
    assert stats()["functions"] == before, "operators over CPU tensors alone are none of our functions"
    assert stats()["allocations"] == 0
    made = [torch.zeros(10, device="cuda"), torch.empty(3, device="cuda"), torch.rand(3, device="cuda")]
    assert stats()["functions"] >= before + len(made) and stats()["allocations"] == len(made)
    sparse = torch.sparse_coo_tensor([[0, 2]], torch.tensor([1.0, 2.0]), (4,)).cuda()
    assert torch.equal(sparse.cpu().to_dense(), torch.tensor([1.0, 0, 2.0, 0]))
    assert torch.tensor([1.0, 2.0, 3.0]).cuda()[1].item() == 2.0


# ---- pools and graphs -----------------------------------------------------------------------------------------------


def memory_pools() -> None:
    start()
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        first = numbers().cuda()
        address = address_of(first)
        assert pool.use_count() == 2
    outside = numbers(seed=1).cuda()
    segments = pool.snapshot()
    assert [segment["address"] for segment in segments] == [address]
    assert segments[0]["segment_pool_id"] == pool.id
    del first
    with torch.cuda.use_mem_pool(pool):
        again = numbers(seed=2).cuda()
        assert address_of(again) == address
        small = torch.zeros(10, device="cuda")
    _, other = make()
    back = torch.empty(UNIT // 4)
    to_host(back, address, UNIT)
    assert torch.equal(back, numbers(seed=2)), "memory of a pool has left the device"
    pinned = stats()["pinned_bytes"]
    del again, small, other
    assert [each["blocks"][0]["state"] for each in pool.snapshot()] == ["inactive"] * 2
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(outside.cpu(), numbers(seed=1))
    assert stats()["live_bytes"] == UNIT and pinned >= UNIT


def memory_of_a_pool_is_ready() -> None:
    """What another stream still reads is not handed out, as nothing in a graph could wait for it."""
    start()
    side = torch.cuda.Stream()
    managed, host = numbers().cuda(), torch.empty(UNIT // 4).pin_memory()
    address = address_of(managed)
    torch.cuda.synchronize()
    gate, opened = closed_gate(side)
    to_host(host, address, UNIT, side.cuda_stream)
    managed.record_stream(side)
    del managed
    threading.Timer(0.2, opened.set).start()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        other = torch.empty(UNIT // 4, device="cuda")
    assert opened.is_set() and address_of(other) == address
    side.synchronize()
    assert torch.equal(host, numbers())
    del other, gate


def graphs() -> None:
    start()
    source, target = torch.zeros(UNIT // 4, device="cuda"), torch.zeros(UNIT // 4, device="cuda")
    before, others = make(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = source.clone()
        second = first.clone()
        del first
        third = second.clone()  # may have the memory of `first`
        target.copy_(third)
        dropped = others.pop()
        del dropped  # freed while the stream is captured
    plain, managed = make()  # everything that may leave does
    for seed in (1, 2):
        source.copy_(numbers(seed=seed))
        graph.replay()
        assert torch.equal(target.cpu(), numbers(seed=seed))
        assert torch.equal(second.cpu(), numbers(seed=seed))
        assert same(plain, managed)
    assert same(before[:3], others)
    shared = torch.cuda.CUDAGraph()
    with torch.cuda.graph(shared, pool=graph.pool()):
        result = target.clone()
    graph.replay()
    shared.replay()
    assert torch.equal(result.cpu(), numbers(seed=2))
    del graph
    gc.collect()
    shared.replay()
    assert torch.equal(result.cpu(), numbers(seed=2))
    live = stats()["live_bytes"]
    del shared, result, second, third
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert stats()["live_bytes"] <= live - 2 * UNIT
    assert same(plain, managed)


def capture_beside_swapping() -> None:
    """The daemon moves tensors while a stream is captured, and so does another thread: the capture goes on."""
    start()
    plain, managed = make(16)

    def iterate() -> None:
        for tensor in managed:
            tensor.copy_(tensor.clone())

    for _ in range(5):
        iterate()
        ooc.step()
    assert ooc.summary()["planned_iteration_count"] > 0
    source = numbers(seed=50).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source.clone()
        thread = threading.Thread(target=lambda: (iterate(), ooc.step(), torch.cuda.memory_stats()))
        thread.start()
        thread.join()
        assert torch.cuda.memory_allocated() > 0 and ooc.summary()["steps"] > 0
        more = result.clone()
    graph.replay()
    assert torch.equal(more.cpu(), numbers(seed=50)) and same(plain, managed)


def capture_beside_host_memory() -> None:
    """For a function on host memory a thread waits for everything, but for a stream that is captured."""
    start()
    large = torch.empty(BUDGET // 2, device="cuda").copy_(numbers(BUDGET // 2))
    source = numbers(seed=50).cuda()
    positions = torch.arange(BUDGET // 16).flip(0).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        source = source.clone()
    graph = torch.cuda.CUDAGraph()
    taken = []
    with torch.cuda.graph(graph, stream=side):
        result = source.clone()
        thread = threading.Thread(target=lambda: taken.append(large.take(positions)))
        thread.start()
        thread.join()
        more = result.clone()
    assert taken and ooc.summary()["host_backed_function_count"] > 0
    graph.replay()
    assert torch.equal(more.cpu(), numbers(seed=50))


def capture_after_late_work() -> None:
    """What was enqueued on a stream before its capture is over before what it wrote can leave."""
    start()
    side = torch.cuda.Stream()
    late, host = numbers(seed=1).cuda(), numbers(seed=2).pin_memory()
    source = numbers(seed=3).cuda()
    torch.cuda.synchronize()
    gate, opened = closed_gate(side)
    with torch.cuda.stream(side):
        late.copy_(host, non_blocking=True)
        graph = torch.cuda.CUDAGraph()
        threading.Timer(0.3, opened.set).start()
        graph.capture_begin(capture_error_mode="thread_local")  # the other thread may wait for its copies
        result = source.clone()
        thread = threading.Thread(target=make)  # `late` has to leave
        thread.start()
        thread.join()
        graph.capture_end()
    graph.replay()
    assert torch.equal(late.cpu(), host) and torch.equal(result.cpu(), numbers(seed=3))
    del gate


def memory_that_a_captured_stream_freed() -> None:
    """The next user of memory that is freed during a capture asks nothing of the captured stream."""
    start()
    side, elsewhere = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        freed, source = numbers(seed=1).cuda(), numbers(seed=2).cuda()
        graph = torch.cuda.CUDAGraph()
        address = address_of(freed)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="relaxed")  # this thread waits for a copy on another stream
        result = source.clone()
        del freed
        with torch.cuda.stream(elsewhere):
            again = numbers(seed=3).cuda()
        graph.capture_end()
    graph.replay()
    assert torch.equal(result.cpu(), numbers(seed=2)) and torch.equal(again.cpu(), numbers(seed=3))
    assert address_of(again) == address


def capture_without_a_pool() -> None:
    """A library captures a stream by itself. What is used and allocated meanwhile stays where it is."""
    start()
    side = torch.cuda.Stream()
    stream, graph, runnable = ctypes.c_void_p(side.cuda_stream), ctypes.c_void_p(), ctypes.c_void_p()
    source, target = numbers(seed=8).cuda(), numbers(seed=9).cuda()
    late, host = numbers(seed=5).cuda(), numbers(seed=6).pin_memory()
    torch.cuda.synchronize()
    gate, opened = closed_gate(side)
    with torch.cuda.stream(side):
        late.copy_(host, non_blocking=True)
        assert runtime().cudaStreamBeginCapture(stream, 0) == 0
        first = source.clone()
        second = first.clone()
        target.copy_(second)
        threading.Timer(0.3, opened.set).start()
        others = [torch.empty(UNIT // 4, device="cuda") for _ in range(4)]  # `late` has to leave
        assert runtime().cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    del others
    assert runtime().cudaGraphInstantiateWithFlags(ctypes.byref(runnable), graph, ctypes.c_ulonglong(0)) == 0
    for seed in (1, 2):
        plain, managed = make(10)
        source.copy_(numbers(seed=seed))
        torch.cuda.synchronize()
        assert runtime().cudaGraphLaunch(runnable, stream) == 0
        side.synchronize()
        assert torch.equal(target.cpu(), numbers(seed=seed)) and torch.equal(first.cpu(), numbers(seed=seed))
        assert same(plain, managed)
    assert torch.equal(late.cpu(), host)
    del gate


def pool_states() -> None:
    """What torch.compile's trees of CUDA graphs ask for."""
    start()
    pool = torch.cuda.graph_pool_handle()
    device = torch.cuda.current_device()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    first = numbers(seed=1).cuda()
    state = torch._C._cuda_getCheckpointState(device, pool)
    second = numbers(seed=2).cuda()
    torch._C._cuda_endAllocateToPool(device, pool)
    addresses = [tensor.untyped_storage()._cdata for tensor in (first, second)]
    storages = [tensor.untyped_storage().data_ptr() for tensor in (first, second)]
    assert len(set(addresses)) == len(set(storages)) == 2
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set(storages))
    assert not torch._C._cuda_checkPoolLiveAllocations(device, pool, set(storages[:1]))
    allocated = torch.cuda.memory_allocated()
    # Back to where only `first` lived. Both storages lose what frees their memory; another one gets that of `first`.
    owner = torch._C._construct_storage_from_data_pointer(storages[0], torch.device("cuda", device), UNIT)
    torch._C._cuda_setCheckpointPoolState(device, state, addresses, [owner._cdata])
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set(storages[:1]))
    assert torch.cuda.memory_allocated() == allocated - UNIT
    assert torch.equal(first.cpu(), numbers(seed=1))
    del second  # its deleter does nothing any more
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    third = numbers(seed=3).cuda()
    torch._C._cuda_endAllocateToPool(device, pool)
    assert third.untyped_storage().data_ptr() == storages[1]
    assert torch.equal(first.cpu(), numbers(seed=1)) and torch.equal(third.cpu(), numbers(seed=3))
    torch._C._cuda_releasePool(device, pool)
    torch._C._cuda_releasePool(device, pool)
    del first, third, owner
    assert torch.cuda.memory_allocated() == 0


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusals() -> None:
    start()
    tensor = numbers().cuda()
    refused(lambda: tensor.untyped_storage()._share_cuda_(), "cannot be shared", "tensor.cpu()")
    refused(ooc.disable, "cannot be turned off")
    assert ooc.enabled()
    if torch.cuda.device_count() > 1:
        refused(lambda: torch.empty(10, device="cuda:1"), "cuda:1", "CUDA_VISIBLE_DEVICES")
        with torch.cuda.device(1):
            refused(lambda: torch.empty(10, device="cuda"), "manages cuda:0")
    assert torch.equal(tensor.cpu(), numbers())
    child = os.fork()
    if child == 0:
        try:
            for use in (tensor.clone, tensor.cpu, lambda: tensor.add_(1), lambda: torch.empty_like(tensor)):
                refused(use, "forked process", "'spawn'", "fork before")
            refused(lambda: torch.empty(3, device="cuda"), "'spawn'")  # PyTorch's own
            assert torch.zeros(3).add(1).sum() == 3
            del tensor
            os._exit(0)
        except BaseException as error:
            print("child:", error, file=sys.stderr)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(tensor.cpu(), numbers())


def too_late() -> None:
    torch.cuda.init()
    refused(lambda: ooc.enable(alloc="cuda"), "before the first CUDA tensor")
    assert not ooc.enabled()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")
