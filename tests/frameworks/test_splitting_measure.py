"""Measured costs: workspaces to the byte, nothing measured twice, and what is left out is left out by rule."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import EMULATED, run, write_script

from benchmarks.splitting.convolutions import Layer, images
from ooc.pytorch.splitting.kernels import BACKWARD_DATA, BACKWARD_FILTER, CPU, FORWARD, Algorithm, Kernel
from ooc.pytorch.splitting.measure import Effort, Measurer, _in_turns, measured_sizes, timed
from swapd.splitting.store import Store

SMALL = images(2, 3, (6, 6), (3, 3), padding=(1, 1))
LARGE = images(16, 16, (32, 32), (3, 3), padding=(1, 1))


def kernel_of(layer: Layer, batch: int, kind: str = FORWARD) -> Kernel:
    return layer.kernel(kind, [torch.zeros(shape) for shape in layer.shapes(batch)])


# --- on the emulated device ------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
import torch
import ooc
from ooc.pytorch.splitting import measure
from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.kernels import kernels_of
from ooc.pytorch.splitting.measure import Effort, Measurer, live_during
from swapd.splitting.store import Store

core = ooc.pytorch._session.core

measure.HOPELESS = float("inf")  # no speed decides what is measured here

def exact():
    result = torch.empty(70_000, dtype=torch.uint8)
    a = torch.empty(300_000, dtype=torch.uint8)
    b = torch.empty(1000, dtype=torch.uint8)  # a small one
    del a
    c = torch.empty(200_000, dtype=torch.uint8)
    return result

def exactly():
    exact()
    return live_during(exact)

def after_another():
    live_during(lambda: torch.zeros(900_000, dtype=torch.uint8))
    return live_during(lambda: torch.zeros(100_000, dtype=torch.uint8))

def kernels(batch):
    x, w, y = (torch.randn(shape) for shape in ((batch, 16, 32, 32), (16, 16, 3, 3), (batch, 16, 32, 32)))
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    calls = Call("aten::convolution", (x, w, None, *options), {}), Call(
        "aten::convolution_backward", (y, x, w, None, *options, [False, True, False]), {})
    return [kernel for call in calls for kernel in kernels_of(call)]

found = []
for _run in range(2):
    measurer = Measurer(Store(sys.argv[1]), effort=Effort(2, 0.0, 2))
    tables = [measurer.table(kernel) for kernel in kernels(4)]
    found.append([[row.__dict__ for row in table.rows] for table in tables] + [measurer.measurements])
more = Measurer(Store(sys.argv[1]), effort=Effort(2, 0.0, 2))
more.table(kernels(5)[0])  # sizes 1 to 3 are known from the batch of 4
counts = core.stats()
print(json.dumps({"runs": found, "more": more.measurements, "exactly": exactly(),
                  "after_another": after_another(),
                  "moved": counts["swap_out_bytes"] + counts["swap_in_bytes"]}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("measured")
    path = folder / "measurements.sqlite"
    ended = run(
        [write_script(folder, PROGRAM), path], {**EMULATED, "OOC_BUDGET": "256MiB", "OOC_POLICY": "demand"}
    ).check()
    return {**json.loads(ended.output), "path": path}


def test_a_workspace_is_what_lived_at_once_beside_operands_and_result(measured: dict[str, object]) -> None:
    assert measured["exactly"] == 300_000 + 1000


def test_what_was_freed_just_before_is_no_workspace(measured: dict[str, object]) -> None:
    assert measured["after_another"] == 0


def test_a_second_run_measures_nothing(measured: dict[str, object]) -> None:
    first, second = measured["runs"]  # type: ignore[misc]
    # At four sizes three algorithms forward and two for the filters, and `own as several` for one sample.
    assert first[-1] == (4 * 3 + 1) + (4 * 2 + 1) and second[-1] == 0
    assert first[:-1] == second[:-1]


def test_another_batch_uses_the_sizes_that_are_known(measured: dict[str, object]) -> None:
    assert measured["more"] == 2 * 3  # 4, now as a part, and 5 as the whole


def test_nothing_moved_while_it_was_measured(measured: dict[str, object]) -> None:
    assert measured["moved"] == 0


def test_workspaces_are_those_of_the_algorithms(measured: dict[str, object]) -> None:
    forward, backward_filter, _ = measured["runs"][0]  # type: ignore[index]
    columns, image, filters = 4 * 16 * 9 * 32 * 32, 4 * 16 * 32 * 32, 4 * 16 * 16 * 9
    by = {(row["algorithm"], row["batch"]): row["workspace_bytes"] for row in forward}
    for size, copies in ((1, 1), (2, 2), (3, 2), (4, 2)):  # the columns of several samples are put in another order
        assert size * (copies * columns - image) <= by["im2col", size] <= size * (copies * columns + image)
    assert by["own", 3] >= 3 * image  # a part has a result of its own beside the place where it belongs
    assert by["own", 4] <= by["own", 3]
    sums = {(row["algorithm"], row["batch"]): row["workspace_bytes"] for row in backward_filter}
    assert sums["own", 2] >= filters  # what is added to the sum


# --- the rules, with costs that are made up --------------------------------------------------------------------------


OTHER = replace(CPU["own"], name="other")


class Costs(Measurer):
    """Answers instead of measuring, and writes down what it was asked."""

    def __init__(self, store: Store, costs: dict[str, tuple[float, int]], **options: int) -> None:
        super().__init__(store, **options)  # type: ignore[arg-type]
        self.algorithms = [algorithm for algorithm in (*CPU.values(), OTHER) if algorithm.name in costs]
        self.costs = costs
        self.asked: list[tuple[str, int]] = []

    def _measure(self, kernel: Kernel, algorithm: Algorithm, size: int) -> tuple[float, int, float]:
        self.asked.append((algorithm.name, size))
        seconds, workspace = self.costs[algorithm.name]
        return seconds * size, workspace * size, seconds * size / 10


COSTS = {"own": (1.0, 100), "im2col": (2.0, 1000), "other": (4.0, 5000)}


def test_the_hopeless_are_left_out_after_two_sizes() -> None:
    costs = Costs(Store(None), COSTS)
    costs.table(kernel_of(SMALL, 5))
    assert [size for name, size in costs.asked if name == "other"] == [1, 2]
    assert [size for name, size in costs.asked if name == "im2col"] == [1, 2, 3, 4, 5]
    again = Costs(costs.store, COSTS)
    again.table(kernel_of(SMALL, 5))
    assert again.asked == []


def test_a_slow_one_that_takes_less_is_not_hopeless() -> None:
    costs = Costs(Store(None), {**COSTS, "other": (100.0, 99)})
    costs.table(kernel_of(SMALL, 4))
    assert [size for name, size in costs.asked if name == "other"] == [1, 2, 3, 4]


def test_beyond_the_largest_workspace_nothing_is_measured() -> None:
    costs = Costs(Store(None), COSTS, largest_bytes=5500)
    costs.table(kernel_of(SMALL, 8))
    # That of im2col is 6000 and 7000 bytes for 6 and 7 samples; that of own is beyond at none of these sizes.
    assert [size for name, size in costs.asked if name == "im2col"] == [1, 2, 3, 4, 5, 6, 7]
    assert [size for name, size in costs.asked if name == "own"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_sum_of_the_whole_batch_is_measured_whatever_parts_take() -> None:
    """Every part is beside the sum that it is added to; the whole batch is not."""
    costs = Costs(Store(None), COSTS, largest_bytes=1500)
    costs.table(kernel_of(SMALL, 8, BACKWARD_FILTER))
    assert [size for name, size in costs.asked if name == "im2col"] == [1, 2, 3, 8]


def test_one_size_with_a_large_workspace_leaves_nothing_out() -> None:
    class Single(Costs):
        def _measure(self, kernel: Kernel, algorithm: Algorithm, size: int) -> tuple[float, int, float]:
            seconds, workspace, spread = super()._measure(kernel, algorithm, size)
            return seconds, 9000 if size == 1 else workspace, spread

    costs = Single(Store(None), {**COSTS, "other": (99.0, 1)}, largest_bytes=5500)
    costs.table(kernel_of(SMALL, 4))
    assert [size for name, size in costs.asked if name == "own"] == [1, 2, 3, 4]


def test_blocks_of_channels_are_measured_where_whole_channels_take_too_much() -> None:
    wide = images(32, 32, (6, 6), (3, 3), padding=(1, 1))
    own = {
        "own": (1.0, 1000),
        "own in 2": (1.0, 500),
        "own in 4": (1.0, 250),
        "im2col": (2.0, 9000),
        "other": (1.0, 9000),
    }
    halves, quarters = "own in 2", "own in 4"
    for largest, blocks in ((4000, []), (2500, [(halves, 4)]), (1500, [(halves, 2), (halves, 4), (quarters, 4)])):
        costs = Costs(Store(None), own, largest_bytes=largest)
        costs.table(kernel_of(wide, 4), "powerOfTwo")
        assert [asked for asked in costs.asked if asked[0] in (halves, quarters)] == blocks


def test_sums_over_channels_are_measured_where_filters_are_large_and_the_whole_takes_too_much() -> None:
    own = {"own": (1.0, 1000), "own summed in 2": (1.0, 500), "own summed in 4": (1.0, 250), "own in 2": (1.0, 400)}
    summed = "own summed in 2", "own summed in 4"
    made = {**own, "own in 4": (1.0, 200), "im2col": (2.0, 9000), "other": (1.0, 9000)}
    large, small = images(32, 32, (2, 2), (3, 3), padding=(1, 1)), images(32, 32, (20, 20), (3, 3), padding=(1, 1))
    for layer, kind, largest, asked in (
        (large, BACKWARD_DATA, 4000, []),
        (large, BACKWARD_DATA, 2500, [(summed[0], 4)]),
        (large, BACKWARD_DATA, 1500, [(summed[0], 2), (summed[0], 4), (summed[1], 4)]),
        (small, BACKWARD_DATA, 1500, []),
        (large, FORWARD, 2500, [(summed[0], 4)]),
        (small, FORWARD, 1500, []),
        (large, BACKWARD_FILTER, 1500, []),
    ):
        costs = Costs(Store(None), made, largest_bytes=largest)
        costs.table(kernel_of(layer, 4, kind), "powerOfTwo")
        assert [each for each in costs.asked if each[0] in summed] == asked


def test_strips_are_measured_where_nothing_else_fits_one_sample() -> None:
    wide = images(32, 32, (34, 34), (3, 3))
    halves, quarters = "own in 2 strips", "own in 4 strips"
    own = {"own": (1.0, 1000), "own in 2": (1.0, 900), halves: (1.0, 500), quarters: (1.0, 250), "other": (1.0, 9000)}
    for largest, strips in ((900, []), (899, [(halves, 1)]), (499, [(halves, 1), (quarters, 1)])):
        costs = Costs(Store(None), own, largest_bytes=largest)
        costs.table(kernel_of(wide, 4), "powerOfTwo")
        assert [asked for asked in costs.asked if asked[0] in (halves, quarters)] == strips


def test_undivided_and_divided_are_different_measurements() -> None:
    costs = Costs(Store(None), COSTS)
    assert {row.algorithm for row in costs.table(kernel_of(SMALL, 4)).rows} == {"own", "im2col", "other"}
    table = costs.table(kernel_of(SMALL, 8), "powerOfTwo")
    assert ("own", 4) in costs.asked[-4:]  # known as a whole only
    assert [row.batch for row in table.rows if row.algorithm == "own"] == [1, 2, 4, 8]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_an_algorithm_does_first_is_measured_with_it(size: int) -> None:
    def run(prepared: bool = False, **named: object) -> object:
        found.append(prepared)
        return CPU["own"].run(**named)

    found: list[bool] = []
    algorithm = Algorithm("prepared", run, before=lambda named: named | {"prepared": True})
    _in_turns(kernel_of(SMALL, 4), algorithm, size)()
    assert found == [True]


def test_other_kernels_are_other_measurements() -> None:
    costs = Costs(Store(None), COSTS)
    for kernel in (kernel_of(SMALL, 1), kernel_of(SMALL, 1, BACKWARD_FILTER), kernel_of(LARGE, 1)):
        before = len(costs.asked)
        costs.table(kernel)
        assert len(costs.asked) == before + 3


@pytest.mark.parametrize("batch", [1, 7, 32, 33, 100, 256])
def test_sizes_of_all_are_capped(batch: int) -> None:
    sizes = measured_sizes("all", batch)
    assert sizes == tuple(sorted(set(sizes))) and sizes[0] == 1 and sizes[-1] == batch
    powers = set(measured_sizes("powerOfTwo", batch))
    assert powers <= set(sizes) and min(batch, 32) <= len(sizes) <= 32 + len(powers)
    assert max(np.diff(sizes), default=1) <= -(-batch // 31)


def test_repetitions_end() -> None:
    calls: list[int] = []
    timed(lambda: calls.append(1), Effort(least=3, seconds=1e9, most=5))
    assert len(calls) == 5
    timed(lambda: calls.append(1), Effort(least=2, seconds=0.0, most=5))
    assert len(calls) == 7
