"""Algorithm 1 of mmCNN: the paper's tables once more, and that no schedule exceeds its limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import examples

from benchmarks.splitting.mmcnn_tables import (
    LIMITS_MIB,
    MIB,
    TABLE_3,
    TABLE_4_ALEXNET,
    TABLE_6_VGG_D19,
    alexnet,
    rows,
    vgg_d19,
)
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.segments import MOST_PREFETCH_PARTS, Layer, LayerStep, schedule_layers, segments_of

ODD_LAYER = (
    3  # VGG-D19's relu1_1: the paper adds conv1_1's weights there (0.007 MiB), though conv1_2's come next (0.14)
)


def papers_mib(step: LayerStep) -> float:
    """As the tables count: a prefetch where it starts, a layer's own weights only where it brings them in itself."""
    prefetch = step.prefetched_part_bytes if step.conv_number else 0
    return (step.activation_part_bytes + prefetch + step.weight_part_bytes) / MIB


@pytest.mark.parametrize("column", range(5), ids=[f"{mib}MiB" for mib in LIMITS_MIB])
def test_table_3(column):
    steps = schedule_layers(vgg_d19(), LIMITS_MIB[column] * MIB)
    expected = [tuple(int(n) for n in row[2 * column : 2 * column + 2]) for row in rows(TABLE_3)]
    found = [(step.self_number, step.conv_number) for step in steps]
    if LIMITS_MIB[column] == 5:
        assert (expected[ODD_LAYER - 1], found[ODD_LAYER - 1]) == ((3, 1), (3, 2))
        found[ODD_LAYER - 1] = (3, 1)
    assert found == expected


@pytest.mark.parametrize("column", range(5), ids=[f"{mib}MiB" for mib in LIMITS_MIB])
@pytest.mark.parametrize(
    ("layers", "table", "odd"), [(alexnet(), TABLE_4_ALEXNET, 0), (vgg_d19(), TABLE_6_VGG_D19, ODD_LAYER)]
)
def test_tables_4_and_6(layers, table, odd, column):
    steps = schedule_layers(layers, LIMITS_MIB[column] * MIB)
    assert len(steps) == len(rows(table))
    for number, (step, row) in enumerate(zip(steps, rows(table)), 1):
        assert step.peak_bytes <= LIMITS_MIB[column] * MIB
        if number != odd:
            assert papers_mib(step) == pytest.approx(row[column], abs=0.018), number  # biases are not in the sizes here


def test_self_number_of_the_first_fully_connected_layer_by_hand():
    """VGG-D19's fc6 under 5 MiB: 392 MiB of weights beside 0.1113 MiB of input and output; 392 / 4.8887 = 80.2."""
    fc6 = schedule_layers(vgg_d19(), 5 * MIB)[38]
    assert fc6.self_number == 81
    assert fc6.weight_part_bytes == -(-392 * MIB // 81)


def test_segments_end_with_what_is_heavy():
    layers = vgg_d19()
    segments = segments_of(layers)
    assert [layer for segment in segments for layer in segment] == layers
    assert len(segments) == 19
    assert [len(segment) for segment in segments] == [2, 2, 3, 2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2]
    light = Layer("softmax", 8, 8)
    assert segments_of([*layers, light])[-1] == (light,)
    assert segments_of([]) == []
    assert schedule_layers([], 0) == []


BYTES = st.integers(0, 40)
LIGHT = st.builds(Layer, st.just("layer"), BYTES, BYTES)
HEAVY = st.builds(Layer, st.just("layer"), BYTES, BYTES, st.integers(0, 90), st.just(True))
LAYER = st.one_of(LIGHT, HEAVY)


def part(size: int, parts: int) -> int:
    return -(-size // parts)


def fewest(size: int, room: int) -> "int | None":
    """By trying: the smallest number of parts that fit, None if not even many do."""
    return next((n for n in range(1, 200) if part(size, n) <= room), None)


@examples(400)
@given(st.lists(LAYER, min_size=1, max_size=6), st.integers(2, 140))
def test_every_number_by_trying(layers, limit):
    steps = schedule_layers(layers, limit)
    assert len(steps) == len(layers)
    assert all(step.peak_bytes <= limit for step in steps)
    at = 0
    for segment in segments_of(layers):
        own, at = steps[at : at + len(segment)], at + len(segment)
        sizes = [layer.input_bytes + layer.output_bytes for layer in segment]
        parts = [fewest(size, limit - (layer.weight_bytes > 0)) for size, layer in zip(sizes, segment)]
        assert [step.activation_part_bytes for step in own] == list(map(part, sizes, parts))
        assert [step.self_number for step in own[:-1]] == parts[:-1]
        assert all(step.conv_number == 0 for step in own[1:])
        end = segment[-1]
        if not end.weight_bytes:
            assert (own[-1].self_number, own[0].conv_number, own[-1].weight_part_bytes) == (parts[-1], 0, 0)
            continue
        ahead = fewest(end.weight_bytes, limit - max(map(part, sizes, parts)))
        prefetch = ahead if ahead is not None and ahead <= MOST_PREFETCH_PARTS else 0
        assert own[0].conv_number == prefetch
        if prefetch:
            assert {step.prefetched_part_bytes for step in own} == {part(end.weight_bytes, prefetch)}
        weights = prefetch or fewest(end.weight_bytes, limit - part(sizes[-1], parts[-1]))
        assert own[-1].weight_part_bytes == (0 if prefetch else part(end.weight_bytes, weights))
        assert own[-1].self_number == max(weights, parts[-1])


def test_what_is_refused():
    for limit in (-1, 1):
        with pytest.raises(LimitTooSmallError, match=str(limit)):
            schedule_layers([Layer("a", 1, 0)], limit)
