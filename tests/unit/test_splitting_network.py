"""A network's plan: Algorithm 1's numbers, micro-batches in what is left, and no claim that nothing stands for."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from swapd.splitting.configurations import KernelTable, MicroConfiguration
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.network import (
    NOT_VERIFIED,
    ONE_PIECE,
    NetworkLayer,
    NetworkPlan,
    plan_network,
    time_memory_front,
)
from swapd.splitting.picture import draw, kind_of
from swapd.splitting.segments import Layer, schedule_layers
from swapd.splitting.store import Verdict

MIB = 1 << 20
ROWS = (
    MicroConfiguration(4, "fast", 1.0, 8 * MIB),
    MicroConfiguration(2, "fast", 0.55, 4 * MIB, 0.001),
    MicroConfiguration(1, "fast", 0.3, 2 * MIB, 0.001),
    MicroConfiguration(4, "slow", 3.0, 1 * MIB),
)


def convolution(
    name: str, *, rows: tuple[MicroConfiguration, ...] = ROWS, verdicts: tuple[Verdict, ...] = ()
) -> NetworkLayer:
    layer = Layer(name, 6 * MIB, 2 * MIB, 3 * MIB, heavy=True, weight_units=64, activation_units=32)
    return NetworkLayer(layer, "aten::convolution", name, (KernelTable(f"{name} Forward", 4, rows),), verdicts)


def relu(name: str) -> NetworkLayer:
    return NetworkLayer(Layer(name, 2 * MIB, 0), "aten::relu_", name)


NETWORK = [convolution("a"), relu("b"), convolution("c")]


def test_numbers_are_those_of_algorithm_1() -> None:
    plan = plan_network(NETWORK, 8 * MIB)
    steps = schedule_layers([layer.layer for layer in NETWORK], 8 * MIB)
    assert [line.step for line in plan.layers] == steps
    assert all(step.peak_bytes <= 8 * MIB for step in steps)


@pytest.mark.parametrize(
    ("budget_mib", "parts"),
    [(20, [(4, "fast")]), (16, [(2, "fast")] * 2), (14, [(1, "fast")] * 4), (12, [(4, "slow")])],
)
def test_a_workspace_is_what_the_budget_leaves(budget_mib: int, parts: list[tuple[int, str]]) -> None:
    """Beside a layer of 11 MiB."""
    (line,) = plan_network([convolution("a")], budget_mib * MIB).layers
    chosen = line.kernels[0].configuration
    assert line.step is not None and line.step.peak_bytes == 11 * MIB
    assert chosen is not None and [(part.batch, part.algorithm) for part in chosen.parts] == parts


def test_times_are_the_measured_ones_not_the_charged_ones() -> None:
    (line,) = plan_network([convolution("a")], 16 * MIB).layers
    assert line.seconds == pytest.approx(1.1) and line.workspace_bytes == 4 * MIB


def test_where_no_workspace_fits_it_says_what_would() -> None:
    (line,) = plan_network([convolution("a")], 11 * MIB).layers
    assert line.kernels[0].configuration is None and line.seconds is None and line.workspace_bytes is None
    assert line.kernels[0].problem == f"needs a workspace of {MIB} bytes"


def test_what_is_not_measured_has_no_time() -> None:
    plan = plan_network([convolution("a", rows=()), convolution("c")], 20 * MIB)
    assert plan.layers[0].seconds is None and plan.layers[0].kernels[0].problem == "not measured"
    assert plan.layers[1].seconds == 1.0 and plan.not_measured == 1


def test_a_limit_for_each_kernel_or_one_for_all() -> None:
    each = plan_network(NETWORK, 64 * MIB, workspace_bytes=4 * MIB)
    assert [line.workspace_bytes for line in each.layers] == [4 * MIB, None, 4 * MIB]
    shared = plan_network(NETWORK, 64 * MIB, workspace_bytes=9 * MIB, division="WD")
    assert sorted(line.workspace_bytes or 0 for line in shared.layers) == [0, 4 * MIB, 4 * MIB]
    with pytest.raises(LimitTooSmallError) as caught:
        plan_network(NETWORK, 64 * MIB, workspace_bytes=MIB, division="WD")
    assert caught.value.smallest_bytes == 2 * MIB
    plan_network(NETWORK, 64 * MIB, workspace_bytes=2 * MIB, division="WD")


def test_training_has_no_numbers_of_algorithm_1() -> None:
    plan = plan_network(NETWORK, 8 * MIB, training=True)
    assert [line.step for line in plan.layers] == [None] * 3
    assert plan.layers[0].seconds == 1.0


def test_a_budget_that_is_too_small_names_the_smallest_that_works() -> None:
    with pytest.raises(LimitTooSmallError) as caught:
        plan_network(NETWORK, 1000)
    plan_network(NETWORK, caught.value.smallest_bytes)
    with pytest.raises(LimitTooSmallError):
        plan_network(NETWORK, caught.value.smallest_bytes - 1)


def exactness(budget_mib: int, *verdicts: Verdict) -> str:
    return plan_network([convolution("a", verdicts=verdicts)], budget_mib * MIB).layers[0].exactness


def test_exact_is_only_what_was_verified() -> None:
    rows, batch = Verdict("rows", 4, True, 0.0, 0.0), Verdict("batch", 2, False, 3e-6, 1e-7)
    assert exactness(64) == ONE_PIECE
    assert exactness(64, rows) == ONE_PIECE
    assert exactness(6) == NOT_VERIFIED
    assert exactness(6, batch, rows) == "exact (rows, 4 parts)"
    assert exactness(6, batch) == "differs by 3e-06 (batch, 2 parts)"
    assert exactness(16) == NOT_VERIFIED  # in one part of Algorithm 1, but in micro-batches
    kinds = [kind_of(plan_network([convolution("a", verdicts=v)], 6 * MIB).layers[0]) for v in ((), (rows,), (batch,))]
    assert kinds == ["not verified", "exact", "differs"]


def test_the_front_falls_and_ends_at_the_fastest() -> None:
    tables = [layer.kernels[0] for layer in NETWORK if layer.kernels]
    front = time_memory_front(tables)
    assert front[0] == (2 * MIB, 6.0) and front[-1][1] == pytest.approx(2.0)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(front))
    assert time_memory_front([]) == ()


def test_it_goes_through_json() -> None:
    layer = convolution("a", verdicts=(Verdict("rows", 4, True, 0.0, 0.0),))
    assert NetworkLayer.from_json(json.loads(json.dumps(layer.to_json()))) == layer


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="WR, WD"):
        plan_network(NETWORK, 8 * MIB, division="both")
    with pytest.raises(ValueError, match="policy"):
        plan_network(NETWORK, 64 * MIB, policy="some")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_the_picture(tmp_path: Path, training: bool, measured: bool) -> None:
    pytest.importorskip("matplotlib")
    layers = [convolution("a", rows=ROWS if measured else ()), relu("b")]
    plan = plan_network(layers, 8 * MIB, training=training)
    draw(plan, "model", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_an_empty_network() -> None:
    assert plan_network([], MIB) == NetworkPlan((), MIB, False, (), 0)
