"""NumPy on the device: the bits of plain NumPy, a plan in use, and every wrong use a clear error."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ROOT, code, read_summary, run, write_script
from test_errors import SUMMARY_KEYS

import ooc.numpy as ooc
from swapd.config import ConfigError

KIB, MIB = 1 << 10, 1 << 20
SETTINGS = {"alloc": "emulated", "budget": "2MiB", "chunk_size": "64KiB", "small_limit": "64KiB"}
SHAPE = (256, 256)  # 512 KiB: four fill the budget


@pytest.fixture
def device() -> Iterator[ooc.Device]:
    with ooc.Device(**SETTINGS) as made:
        yield made
        figures = made.summary()
        assert figures["device_peak_bytes"] <= figures["budget_bytes"] == 2 * MIB
        assert figures["external_fragmentation_ratio"] == 0


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def press(device: ooc.Device) -> None:
    """Leaves nothing on the device that may leave it; what is there afterwards are other bytes."""
    for seed in range(100, 104):
        device.array(values(seed))
    device._core.evict_all()
    device._core.release_cached()


def live_bytes(device: ooc.Device) -> int:
    return int(device._core.stats()["live_bytes"])


# ---- bits and plans -------------------------------------------------------------------------------------------------


def sweep(target: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    target += np.tanh(left - 0.5 * right)
    time.sleep(0.004)  # for the swap threads, on a machine that is busy otherwise


def run_sweeps(arrays: list[Any], run: Callable[..., None], steps: int, step: Callable[[], None]) -> None:
    for _ in range(steps):
        for index in range(len(arrays)):
            run(arrays[index], arrays[index - 3], arrays[index - 7])
        step()


@pytest.mark.parametrize("policy", ["auto", "window", "demand"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.medium
def test_same_bits_as_plain_numpy(policy: str, strict: bool) -> None:
    """Five times oversubscribed. A plan brings most in ahead of use; without one everything is waited for."""
    steps = 3 if strict else 10
    hosts = [values(seed, (128, 256)) for seed in range(40)]  # eight fill the budget
    plain = [host.copy() for host in hosts]
    run_sweeps(plain, sweep, steps, lambda: None)
    with ooc.Device(**SETTINGS, policy=policy, strict=strict) as device:
        arrays = [device.array(host) for host in hosts]
        device.step()
        run = device.function(reads=["left", "right"], writes="target")(sweep)
        run_sweeps(arrays, run, 2, device.step)
        before = device.summary()
        run_sweeps(arrays, run, steps - 2, device.step)
        after = device.summary()
        for array, expected in zip(arrays, plain, strict=True):
            assert array.to_numpy().tobytes() == expected.tobytes()
    assert after["oversubscription"] == 5.0
    assert after["device_peak_bytes"] <= after["budget_bytes"] == 2 * MIB
    assert after["divergence_count"] == 0
    assert after["steps"] == 1 + steps
    moved, waited = (after[key] - before[key] for key in ("swap_in_bytes", "demand_swap_in_bytes"))
    assert moved >= (steps - 2) * 8 * MIB
    if policy == "demand":
        assert after["plan_count"] == after["planned_iteration_count"] == 0
        assert waited == moved
    elif not strict:
        assert after["plan_count"] >= 1 and after["planned_iteration_count"] >= steps - 3
        assert waited < 0.5 * moved, "most was brought in ahead of use"


def test_what_is_only_read_leaves_without_a_copy(device: ooc.Device) -> None:
    arrays = [device.array(values(seed)) for seed in range(8)]
    total = device.function(reads=("array",))(lambda array: array.sum())
    expected = [values(seed).sum() for seed in range(8)]
    for _ in range(2):
        assert [total(array) for array in arrays] == expected
    before = device.summary()
    assert [total(array) for array in arrays] == expected
    after = device.summary()
    assert after["swap_in_bytes"] > before["swap_in_bytes"]
    assert after["swap_out_bytes"] == before["swap_out_bytes"]


EXAMPLE = ROOT / "examples" / "cholesky_numpy.py"


@pytest.mark.medium
def test_example() -> None:
    figures = json.loads(run(["-s", EXAMPLE, "--tiles", "8", "--tile", "128", "--json"], {}).check().output)
    summary = figures["summary"]
    assert figures["different_tiles"] == 0 and figures["compared_tiles"] == 6 * 36
    assert figures["device"] == "emulated" and figures["oversubscription"] == 4.0
    assert summary["device_peak_bytes"] <= summary["budget_bytes"] == 36 * 128 * KIB // 4
    assert summary["divergence_count"] == 0
    assert summary["planned_iteration_count"] >= 5
    assert figures["demand_share"] < 0.8


def test_example_on_a_disk(tmp_path: Path) -> None:
    command = ["-s", EXAMPLE, "--tiles", "8", "--tile", "128", "--disk", tmp_path, "--json"]
    figures = json.loads(run(command, {}).check().output)
    summary = figures["summary"]
    assert figures["different_tiles"] == 0 and figures["compared_tiles"] == 6 * 36
    assert summary["host_peak_bytes"] == 0
    assert summary["disk_peak_bytes"] >= figures["matrix_bytes"] - summary["budget_bytes"]
    assert summary["disk_read_bytes"] >= summary["swap_in_bytes"] > 0
    assert summary["disk_written_bytes"] >= summary["swap_out_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_example_fails_when_a_bit_differs(tmp_path: Path) -> None:
    source = f"""
        import sys
        sys.path.insert(0, {str(EXAMPLE.parent)!r})
        import cholesky_numpy as example

        def factor(diagonal):
            plain(diagonal)
            diagonal[0, 1] = -0.0

        plain = example.factor
        example.PLAIN = {{**example.PLAIN, "factor": factor}}
        sys.argv[1:] = ["--tiles", "5", "--tile", "128", "--steps", "2"]
        sys.exit(example.main())
    """
    ended = run(["-s", write_script(tmp_path, source)], {})
    assert ended.status == 1 and "not bit-identical" in ended.output, ended


PCA = ROOT / "examples" / "pca_numpy.py"
SMALL_PCA = ["--blocks", "16", "--rows", "256", "--columns", "128", "--steps", "3"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_principal_components(on_disk: bool, tmp_path: Path) -> None:
    disk = ["--disk", tmp_path] if on_disk else []
    output = run(["-s", PCA, *SMALL_PCA, *disk], {}).check().output
    assert "4,096 x 128 numbers, 4 MiB, with a budget of 1 MiB" in " ".join(output.split())
    assert list(tmp_path.iterdir()) == []


def test_principal_components_that_differ_are_told(tmp_path: Path) -> None:
    source = f"""
        import sys
        sys.path.insert(0, {str(PCA.parent)!r})
        import pca_numpy as example

        plain = example.project
        declared = example.declared

        def spoiled(scores, block, components):
            plain(scores, block, components)
            scores[0, 0] += 1

        def instead(device):
            project = device.function(reads=("block", "components"), writes=("scores",))(spoiled)
            return {{**declared(device), "project": project}}

        example.declared = instead
        sys.exit(example.main({SMALL_PCA!r}))
    """
    ended = run(["-s", write_script(tmp_path, source)], {})
    assert ended.status == 1 and "not bit-identical: 16 of 16 blocks differ" in ended.output, ended


# ---- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        values(1),
        values(1).T,
        np.asfortranarray(values(2)),
        values(3, (33, 7, 501)).astype(np.float32),
        values(4, (300, 300)) > 0.5,
        values(5, (200, 300)) * 1j,
        np.arange(100_000, dtype=">i2"),
        np.zeros((5, 0, 3)),
        np.array(4.5),
        np.array(["on the", "device"] * 9999),
        np.array([(1, 2.5)] * 9999, dtype=[("index", "i4"), ("value", "f8")]),
        np.arange("2020-01-01", "2060-01-01", dtype="datetime64[D]"),
    ],
    ids=lambda host: f"{host.dtype.str}{host.shape}",
)
def test_arrays_go_and_come_back(device: ooc.Device, host: np.ndarray) -> None:
    array = device.array(host)
    press(device)
    assert (array.shape, array.dtype, array.nbytes) == (host.shape, host.dtype, host.nbytes)
    back = array.to_numpy()
    assert (back.shape, back.dtype) == (host.shape, host.dtype) and back.flags.c_contiguous and back.flags.owndata
    assert back.tobytes() == host.tobytes()
    zeros = device.zeros(host.shape, host.dtype).to_numpy()
    assert zeros.tobytes() == np.zeros_like(host, order="C").tobytes()


def test_copy_from(device: ooc.Device) -> None:
    array = device.empty(SHAPE)
    array.copy_from(np.arange(256))
    assert (array.to_numpy() == np.arange(256)).all()
    with pytest.raises(ValueError, match="broadcast"):
        array.copy_from(np.arange(255))
    with pytest.raises(TypeError, match="same_kind"):
        array.copy_from(np.array(1j))
    assert (array.to_numpy() == np.arange(256)).all()


def test_memory_is_freed(device: ooc.Device) -> None:
    array = device.array(values(1))
    kept = [device.array(values(seed)) for seed in range(3)]
    assert live_bytes(device) == 4 * 512 * KIB
    del array
    assert live_bytes(device) == 3 * 512 * KIB
    kept[0].free()
    kept[0].free()
    assert live_bytes(device) == 2 * 512 * KIB
    with pytest.raises(ooc.OocError, match="after it was freed"):
        kept[0].to_numpy()
    assert "freed" in repr(kept[0]) and "freed" not in repr(kept[1])
    assert kept[1].to_numpy().tobytes() == values(1).tobytes()

    @device.function(reads=("array",))
    def frees(array: np.ndarray, its_owner: list[ooc.Array]) -> bytes:
        its_owner.pop().free()
        return array.tobytes()

    holder = [device.array(values(7))]
    with pytest.raises(TypeError, match="'its_owner', which it does not declare"):
        frees(holder[0], holder)

    @device.function(reads=("array",))
    def frees_by_a_closure(array: np.ndarray) -> bytes:
        holder.pop().free()
        return array.tobytes()

    assert frees_by_a_closure(holder[0]) == values(7).tobytes(), "it is there until the function ends"
    assert live_bytes(device) == 2 * 512 * KIB


# ---- views ----------------------------------------------------------------------------------------------------------

KEEPERS: dict[str, Callable[[np.ndarray], Any]] = {
    "the view": lambda view: view,
    "a slice": lambda view: view[1:, ::2],
    "its transpose": lambda view: view.T,
    "another dtype": lambda view: view.view(np.uint8),
    "a buffer": memoryview,
    "in a cycle": lambda view: [view, threading.local()],
}


@pytest.mark.parametrize("keeper", KEEPERS)
@pytest.mark.parametrize("written", [False, True])
def test_view_that_escapes(device: ooc.Device, keeper: str, written: bool) -> None:
    """An error; and whoever catches it still computes on the right bytes, which stay on the device."""
    kept: list[Any] = []
    array = device.array(values(1))

    def leak(array: np.ndarray) -> None:
        kept.append(KEEPERS[keeper](array))

    names = {"writes" if written else "reads": ("array",)}
    with pytest.raises(ooc.EscapedView, match=r"view of 'array' can be reached after function leak.*\.copy\(\)"):
        device.function(**names)(leak)(array)
    press(device)
    expected = np.array(KEEPERS[keeper](values(1))[0] if keeper == "in a cycle" else KEEPERS[keeper](values(1)))
    view = kept[0][0] if keeper == "in a cycle" else np.asarray(kept[0])
    assert (view == expected).all()
    assert view.flags.writeable == written
    if written:
        view[...] = 0  # also what has been cleaned by now is not lost
        press(device)
    memory = weakref.ref(array._memory)
    assert (array.to_numpy() == 0).any() == written
    del array
    assert memory() is not None, "it lives as long as the view"
    kept.clear()
    del view
    assert memory() is None and live_bytes(device) == 0
    assert device._core.stats()["pinned_bytes"] == 0


def test_views_that_do_not_escape(device: ooc.Device) -> None:
    array = device.array(values(1))

    @device.function(reads=("array",))
    def fine(array: np.ndarray) -> Any:
        cycle = [array]
        cycle.append(cycle)  # type: ignore[arg-type]
        thread = threading.Thread(target=array.sum)
        thread.start()
        thread.join()
        return array[0, 0], array[:2].copy()

    first, copy = fine(array)
    assert first == values(1)[0, 0] and (copy == values(1)[:2]).all()


def test_declared_reads_are_read_only(device: ooc.Device) -> None:
    array, other = device.array(values(1)), device.array(values(2))

    @device.function(reads=("array",), writes=("other",))
    def write(array: np.ndarray, other: np.ndarray) -> None:
        for view in (array, array[3:], array.view(np.uint8).reshape(-1)):
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.setflags(write=True)
        with pytest.raises(ValueError, match="read-only"):
            np.add(array, 1, out=array)
        other[...] = 5

    write(array, other)
    press(device)
    assert array.to_numpy().tobytes() == values(1).tobytes()
    assert (other.to_numpy() == 5).all()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exception_in_a_function(device: ooc.Device, error: type[BaseException]) -> None:
    """It arrives as it is. What its traceback shows are the right bytes, for as long as it is kept."""
    array = device.array(values(1))

    @device.function(reads=(), writes=("array",))
    def fails(array: np.ndarray) -> None:
        array[0] = 7
        raise error("in the middle")

    with pytest.raises(error, match="in the middle") as caught:
        fails(array)
    press(device)
    (view,) = [entry.locals["array"] for entry in caught.traceback if entry.name == "fails"]
    assert (view[0] == 7).all() and view[1:].tobytes() == values(1)[1:].tobytes()
    view[1] = 8
    del view, caught
    gc.collect()
    assert device._core.stats()["pinned_bytes"] == 0, "nothing is held once the traceback is gone"
    press(device)
    expected = values(1)
    expected[:2] = [[7], [8]]
    assert array.to_numpy().tobytes() == expected.tobytes()


# ---- wrong uses -----------------------------------------------------------------------------------------------------


def test_declarations_that_cannot_be(device: ooc.Device) -> None:
    with pytest.raises(ValueError, match=r"copy declares 'c', which is none of its parameters \(a, b\)"):

        @device.function(reads=("a", "c"))
        def copy(a: Any, b: Any) -> None: ...

    with pytest.raises(ValueError, match="options"):
        device.function(reads="options")(lambda **options: None)
    for body in (code_generator, code_coroutine):
        with pytest.raises(TypeError, match="runs after it has returned"):
            device.function(reads="array")(body)


def code_generator(array: np.ndarray) -> Iterator[float]:
    yield array.sum()


async def code_coroutine(array: np.ndarray) -> None: ...


def test_arguments_that_cannot_be(device: ooc.Device) -> None:
    run_sweep = device.function(reads=("left", "right"), writes=("target",))(sweep)
    a, b = device.array(values(1)), device.array(values(2))
    with pytest.raises(TypeError, match=r"sweep takes arrays of its device as 'right', not ndarray.*Device\.array"):
        run_sweep(a, b, values(3))
    with pytest.raises(TypeError, match="not NoneType"):
        run_sweep(None, b, b)
    with pytest.raises(TypeError, match="missing a required argument: 'right'"):
        run_sweep(a, b)
    with ooc.Device(**SETTINGS) as other, pytest.raises(ValueError, match="array of another device as 'left'"):
        run_sweep(a, other.array(values(1)), b)
    with pytest.raises(TypeError, match="'left', which it does not declare"):
        device.function(reads=("right",), writes=("target",))(sweep)(a, b, b)
    for use in (np.asarray, np.sum, lambda array: values(1) + array):
        with pytest.raises(TypeError, match=r"is no ndarray.*to_numpy\(\)"):
            use(a)
    with pytest.raises(TypeError, match="object"):
        device.array([None])
    with pytest.raises(ValueError, match="negative"):
        device.empty((3, -1))
    assert device.summary()["functions"] == 4, "nothing but two arrays was made and filled"


def test_calls_within_a_function(device: ooc.Device) -> None:
    array = device.array(values(1))
    total = device.function(reads=("array",))(lambda array: array.sum())
    calls: list[Callable[[], Any]] = [
        lambda: total(array), lambda: device.empty(3), array.to_numpy, device.step, device.close,
    ]  # fmt: skip

    @device.function(writes=("array",))
    def outer(array: np.ndarray) -> None:
        for call in calls:
            with pytest.raises(ooc.OocError, match="within a function"):
                call()
        array += 1

    outer(array)
    assert (array.to_numpy() == values(1) + 1).all()


def test_function_larger_than_the_budget(device: ooc.Device) -> None:
    arrays = [device.array(values(seed)) for seed in range(6)]

    @device.function(reads=("parts",))
    def total(parts: list[np.ndarray]) -> float:
        return float(sum(part.sum() for part in parts))

    with pytest.raises(ooc.OutOfMemory) as caught:
        total(arrays)
    for words in ("function total needs 3145728 bytes", "the budget is 2097152 bytes", "OOC_BUDGET=3145728 or more"):
        assert words in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert total(arrays[:4]) == sum(values(seed).sum() for seed in range(4))
    with pytest.raises(MemoryError, match=r"numpy\.empty needs 8388608 bytes"):
        device.empty((1024, 1024))
    assert live_bytes(device) == 6 * 512 * KIB
    assert device.summary()["min_budget_bytes"] == 8 * MIB
    with ooc.Device(**{**SETTINGS, "budget": 3145728}) as larger:
        more = [larger.array(values(seed)) for seed in range(6)]
        assert larger.function(reads=("parts",))(lambda parts: len(parts))(more) == 6, "the budget that it named works"


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ooc.OocError, match=r"host can address.*emulated"):
        ooc.Device(alloc="cuda")
    monkeypatch.setenv("OOC_ALLOC", "cuda")
    with pytest.raises(ooc.OocError, match="OOC_ALLOC=emulated"):
        ooc.Device()
    monkeypatch.setenv("OOC_ALLOC", "0")
    monkeypatch.setenv("OOC_BUDGET", "3MiB")
    with ooc.Device() as device:
        assert device.summary()["budget_bytes"] == 3 * MIB and device.summary()["device"] == "emulated"
    with pytest.raises(ooc.OocError, match="makes no sense"):
        ooc.Device(alloc="off")
    with pytest.raises(ConfigError, match="budget='8Gb!'"):
        ooc.Device(budget="8Gb!")
    with pytest.raises(TypeError, match="did you mean budget"):
        ooc.Device(bugdet="2MiB")


# ---- the end, threads, other processes ------------------------------------------------------------------------------


def test_close(tmp_path: Path) -> None:
    device = ooc.Device(**SETTINGS, summary=tmp_path / "summary.json")
    array = device.array(values(1))
    use = device.function(reads=("array",))(lambda array: array.sum())
    assert use(array) == values(1).sum()
    assert set(SUMMARY_KEYS) <= set(device.summary())
    for _ in range(2):
        device.close()
    assert device.closed
    figures = read_summary(tmp_path / "summary.json")
    assert figures is not None and figures["final"] and figures["functions"] == 3
    calls: list[Callable[[], Any]] = [
        array.to_numpy, device.step, device.summary, lambda: device.empty(3), lambda: use(array),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ooc.OocError, match="the device is closed"):
            call()


def test_close_beside_a_function() -> None:
    device = ooc.Device(**SETTINGS)
    begun, may_end = threading.Event(), threading.Event()

    @device.function(reads=("array",))
    def slow(array: np.ndarray) -> float:
        begun.set()
        may_end.wait(60)
        return float(array.sum())

    array = device.array(values(1))
    with ThreadPoolExecutor(1) as pool:
        total = pool.submit(slow, array)
        begun.wait(60)
        try:
            with pytest.raises(ooc.OocError, match="while 1 functions run in other threads"):
                device.close()
        finally:
            may_end.set()
        assert total.result() == values(1).sum()
    device.close()


def test_views_outlive_their_device() -> None:
    kept: list[np.ndarray] = []
    with ooc.Device(**SETTINGS) as device:
        keep = device.function(reads=("array",))(lambda array: kept.append(array))
        for seed in range(2):
            with pytest.raises(ooc.EscapedView):
                keep(device.array(values(seed)))
    assert device.closed and kept[0].tobytes() == values(0).tobytes()
    del kept[0]
    gc.collect()
    assert device._core.handle != 0 and kept[0].tobytes() == values(1).tobytes()
    kept.clear()
    gc.collect()
    assert device._core.handle == 0, "the last view took the device with it"


def test_device_that_nobody_closes() -> None:
    device = ooc.Device(**SETTINGS)
    core, array = device._core, device.array(values(1))
    del device
    gc.collect()
    assert array.to_numpy().tobytes() == values(1).tobytes(), "an array keeps its device"
    del array
    gc.collect()
    assert core.handle == 0


def test_threads(device: ooc.Device) -> None:
    """Two functions at a time fill the budget; the others wait for their turn."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            mine = [values(10 * seed + index) for index in range(3)]
            arrays = [device.array(array) for array in mine]
            run_sweep = device.function(reads=("left", "right"), writes=("target",))(sweep)
            for index in range(12):
                order = [index % 3, (index + 1) % 3, (index + 2) % 3]
                run_sweep(*(arrays[at] for at in order))
                sweep(*(mine[at] for at in order))
            assert all(a.to_numpy().tobytes() == b.tobytes() for a, b in zip(arrays, mine, strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


PROGRAM = """
    import os, signal, sys
    import numpy as np
    import ooc.numpy as ooc

    device = ooc.Device(budget="2MiB", chunk_size="64KiB", small_limit="64KiB")
    arrays = [device.array(np.full((256, 256), float(index))) for index in range(12)]

    @device.function(reads=("source",), writes=("target",))
    def add(target, source):
        target += source

    def step():
        for index in range(12):
            add(arrays[index], arrays[index - 5])
        device.step()

    for _ in range(4):
        step()
    assert "torch" not in sys.modules, "the NumPy route needs no deep-learning framework"
"""


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ("pass", 0),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("device.function(reads='a')(lambda a: os._exit(5))(arrays[0])", 5),
        ("other = ooc.Device(budget='1MiB', chunk_size='64KiB', summary='/dev/null'); other.close(); os._exit(6)", 6),
    ],
    ids=["return", "os._exit", "sigterm", "within a function", "after another device"],
)
def test_without_torch_and_however_it_ends(tmp_path: Path, last: str, status: int) -> None:
    script = write_script(tmp_path, code(PROGRAM, last))
    ended = run(["-s", script], {}, summary=tmp_path / "summary.json")
    assert ended.status == status, ended.errors
    assert ended.errors == ""
    assert ended.figures["final"] and ended.figures["steps"] == 4 and ended.figures["planned_iteration_count"] >= 1
    assert ended.figures["device_peak_bytes"] <= ended.figures["budget_bytes"] == 2 * MIB


def test_forked_child(tmp_path: Path) -> None:
    """It has copies of its own, and its end is not the parent's."""
    source = """
        before = [array.to_numpy() for array in arrays]
        child = os.fork()
        step()
        after = [array.to_numpy() for array in arrays]
        assert not (after[3] == before[3]).all()
        if child == 0:
            device.close()
            try:
                step()
            except ooc.OocError as error:
                assert "closed" in str(error) and device._core.handle, "the device is the parent's"
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for array, was in zip(arrays, before):
            array.copy_from(was)
        step()
        assert all((array.to_numpy() == was).all() for array, was in zip(arrays, after))
    """
    ended = run(["-s", write_script(tmp_path, code(PROGRAM, source))], {}, summary=tmp_path / "summary.json").check()
    assert ended.figures["steps"] == 6 and ended.figures["final"]
