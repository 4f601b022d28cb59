"""mmCNN in a recorded iteration: which layers it has, and what is brought in ahead."""

import pytest
from planning_traces import Builder

from swapd.planning.problem import Problem
from swapd.policies.published.mmcnn import mmcnn
from swapd.simulation.simulator import simulate
from swapd.splitting.segments import Layer, layers_of
from swapd.trace.trace import Machine, Trace


def network() -> Builder:
    """A convolution in two parts, a ReLU in place, a pool, and a product of which only the weights are recorded."""
    b = Builder()
    image, weights, product = b.entry(30), b.entry(8), b.entry(12)
    (maps,) = b.call("aten::empty", [], [40])
    for _ in range(2):
        (copy,) = b.call("aten::copy_", [image], [15])
        (part,) = b.call("aten::convolution", [copy, weights], [20])
        b.call("aten::copy_", [part], writes=[maps])
        b.free(copy, part)
    b.call("aten::relu_", [maps], writes=[maps])
    (pooled,) = b.call("aten::max_pool2d", [maps], [10])
    b.free(maps)
    b.call("aten::addmm.out", [product], writes=[pooled])
    b.free(pooled)
    return b


def test_layers_of_an_iteration_with_a_call_in_parts() -> None:
    layers, places = layers_of(network().trace(chunk_bytes=1), [(0, 7)])
    assert places == [0]
    assert layers == [
        Layer("0 aten::convolution", 30, 40, 8, heavy=True),
        Layer("7 aten::relu_", 40, 0),
        Layer("8 aten::max_pool2d", 40, 10),
        Layer("9 aten::addmm.out", 0, 10, 12, heavy=True),
    ]


def test_each_function_is_a_layer_where_nothing_ran_in_parts() -> None:
    layers, places = layers_of(network().trace(chunk_bytes=1))
    assert places == [] and len(layers) == 10
    assert layers[2] == Layer("2 aten::convolution", 15, 20, 8, heavy=True)
    assert layers[1] == Layer("1 aten::copy_", 30, 15)


def chain(pool: int) -> Trace:
    """Two segments: a ReLU and a convolution in two parts of its weights, and a pool and a convolution."""
    b = Builder()
    x, one, two, three = b.entry(14), b.entry(6), b.entry(6), b.entry(4)
    (y,) = b.call("aten::relu", [x], [10])
    (z,) = b.call("aten::convolution", [y, one], [10])
    b.call("aten::convolution", [y, two], writes=[z])
    b.free(y)
    (p,) = b.call("aten::max_pool2d", [z], [pool])
    b.free(z)
    b.call("aten::convolution", [p, three], [1])
    b.free(p, b.call("aten::mean", [], [1])[0])
    return b.trace(chunk_bytes=1, machine=Machine(1e3, 1e3))


@pytest.mark.parametrize(
    ("capacity", "ahead"),
    [
        (30, {1: -1, 2: 1, 3: 2}),  # the first part of a segment's weights comes as its first layer starts
        (29, {1: 0, 2: 1, 3: 2}),  # beside the ReLU there is no room for it
    ],
)
def test_the_part_that_a_segment_uses_first_comes_as_it_starts(capacity: int, ahead: dict[int, int]) -> None:
    problem = Problem.from_trace(chain(pool=5), capacity)
    plan = mmcnn(problem)
    found = {move.variable: move.after_function for move in plan.ins if move.variable in (1, 2, 3)}
    assert found == ahead
    timeline = simulate(problem, plan, 3)
    assert timeline.demand_in_count == 0 and timeline.peak_chunks <= capacity


def test_nothing_moves_where_everything_fits() -> None:
    assert mmcnn(Problem.from_trace(chain(pool=5), 100)).ins == ()


def test_what_no_function_uses_is_away() -> None:
    plan = mmcnn(Problem.from_trace(chain(pool=5), 30))
    left = {out.variable: out.after_function for out in plan.outs}
    assert [left[v] for v in range(4)] == [0, 1, 2, 4]  # the image and the weights, after their only use
