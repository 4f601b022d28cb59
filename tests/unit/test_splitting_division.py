"""WD: the integer programme against every choice, and at the sizes that the paper solves."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import examples
from splitting_cases import MIB, all_divisions, least_by_mebibytes, tables

from swapd.splitting import division
from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration
from swapd.splitting.division import divide_workspace, fronts_of
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError
from swapd.splitting.micro_batches import desirable, fastest_division

COST = st.tuples(st.integers(1, 64).map(lambda n: n / 16), st.integers(0, 12))


def single(seconds: float, workspace_bytes: int) -> Configuration:
    return Configuration((MicroConfiguration(1, "A", seconds, workspace_bytes),))


def choices(options: "list[list[tuple[float, int]]]") -> dict[str, list[Configuration]]:
    return {f"kernel{k}": [single(*cost) for cost in front] for k, front in enumerate(options)}


def seconds_of(chosen: dict[str, Configuration]) -> float:
    return math.fsum(configuration.seconds for configuration in chosen.values())


def bytes_of(chosen: dict[str, Configuration]) -> int:
    return sum(configuration.workspace_bytes for configuration in chosen.values())


def least_seconds(fronts: "dict[str, list[Configuration]]", limit: int) -> "float | None":
    """By looking at every choice."""
    totals = (
        sum(c.seconds for c in chosen)
        for chosen in itertools.product(*fronts.values())
        if sum(c.workspace_bytes for c in chosen) <= limit
    )
    return min(totals, default=None)


@examples(150)
@given(st.lists(st.lists(COST, min_size=1, max_size=5), max_size=4), st.integers(0, 40))
def test_the_best_of_all_choices(options, limit):
    fronts = choices(options)
    least = least_seconds(fronts, limit)
    if least is None:
        smallest = sum(min(c.workspace_bytes for c in front) for front in fronts.values())
        with pytest.raises(LimitTooSmallError) as refused:
            divide_workspace(fronts, limit)
        assert (refused.value.limit_bytes, refused.value.smallest_bytes) == (limit, smallest)
        limit = smallest
        least = least_seconds(fronts, limit)
    found = divide_workspace(fronts, limit)
    assert bytes_of(found) <= limit
    assert seconds_of(found) == least
    assert list(found) == list(fronts) and all(found[name] in front for name, front in fronts.items())


@examples(60)
@given(st.lists(tables(most=4), min_size=1, max_size=3), st.integers(0, 20))
def test_from_measurements_to_the_best_of_all_divisions(measured, limit):
    """The pruned programme against every division of every kernel."""
    named = [KernelTable(f"kernel{k}", table.batch, table.rows) for k, table in enumerate(measured)]
    least = least_seconds({table.name: list(all_divisions(table)) for table in named}, limit)
    try:
        found = divide_workspace(fronts_of(named, limit), limit)
    except (LimitTooSmallError, UnreachableBatchError):
        assert least is None
        return
    assert seconds_of(found) == least
    assert bytes_of(found) <= limit


@examples(60)
@given(st.lists(tables(most=4), min_size=1, max_size=3), st.integers(0, 9))
def test_a_shared_workspace_is_never_slower_than_one_for_each(measured, limit):
    named = [KernelTable(f"kernel{k}", table.batch, table.rows) for k, table in enumerate(measured)]
    try:
        apart = sum(fastest_division(table, limit).seconds for table in named)
    except (LimitTooSmallError, UnreachableBatchError):
        return
    total = limit * len(named)
    assert seconds_of(divide_workspace(fronts_of(named, total), total)) <= apart


def test_room_goes_to_the_kernel_that_gains():
    """As in Figure 12: 8 MiB for each of three kernels help none; 24 MiB together help the one that takes longest."""
    fronts = {
        "conv1": [single(1.0, 0), single(0.9, 20 * MIB)],
        "conv2": [single(9.0, 0), single(5.0, 16 * MIB), single(4.0, 23 * MIB)],
        "conv4": [single(1.0, 0), single(0.5, 9 * MIB)],
    }
    assert all(front[1].workspace_bytes > 8 * MIB for front in fronts.values())
    for mib, expected, seconds in ((24, [0, 23, 0], 6.0), (31, [0, 23, 0], 6.0), (32, [0, 23, 9], 5.5)):
        found = divide_workspace(fronts, mib * MIB)
        assert [c.workspace_bytes // MIB for c in found.values()] == expected
        assert seconds_of(found) == seconds


def network(seed: int, kernels: int, variables: int, unit: float = 1.0) -> dict[str, list[Configuration]]:
    """Made-up fronts, `variables` configurations in all, of a layer's sizes: MiB, and milliseconds times `unit`."""
    source = random.Random(seed)
    counts = [1] * kernels
    for _ in range(variables - kernels):
        counts[source.randrange(kernels)] += 1
    fronts = {}
    for k, count in enumerate(counts):
        seconds, workspace = unit * source.uniform(1e-4, 8e-3), 0
        front = [single(seconds, workspace)]
        for _ in range(count - 1):
            seconds *= source.uniform(0.6, 0.99)
            workspace += source.randrange(1, 30) * MIB
            front.append(single(seconds, workspace))
        fronts[f"kernel{k}"] = front
    return fronts


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 1.0])
@pytest.mark.parametrize(("kernels", "variables"), [(159, 562), (465, 3000)], ids=["ResNet-50", "ResNet-152"])
def test_networks_of_the_papers_sizes(kernels, variables, share):
    """Section IV-B2: 562 variables for ResNet-50, whose 53 convolutions have three kernels each; ResNet-152 has 155."""
    fronts = network(1, kernels, variables)
    limit = int(share * sum(front[-1].workspace_bytes for front in fronts.values()))
    found = divide_workspace(fronts, limit)
    assert bytes_of(found) <= limit
    assert seconds_of(found) == pytest.approx(least_by_mebibytes(fronts, limit), rel=1e-10)
    if share == 1.0:
        assert seconds_of(found) == pytest.approx(sum(front[-1].seconds for front in fronts.values()))


def test_times_of_another_unit():
    """The same network a million times faster has the same optimum."""
    slow, fast = (network(2, 60, 240, unit) for unit in (1.0, 1e-6))
    limit = sum(front[-1].workspace_bytes for front in slow.values()) // 3
    slowly, quickly = (divide_workspace(fronts, limit) for fronts in (slow, fast))
    assert seconds_of(quickly) == pytest.approx(seconds_of(slowly) * 1e-6, rel=1e-9)


def test_kernels_that_are_the_same():
    """ResNet-152 repeats few layers often: 465 kernels of 12 kinds, in an order that mixes them."""
    kinds = list(network(3, 12, 90).values())
    fronts = {f"kernel{k}": kinds[k * k % 12] for k in range(465)}
    limit = sum(front[-1].workspace_bytes for front in fronts.values()) // 5
    found = divide_workspace(fronts, limit)
    assert bytes_of(found) <= limit
    assert seconds_of(found) == pytest.approx(least_by_mebibytes(fronts, limit), rel=1e-10)
    assert all(found[name] in front for name, front in fronts.items())


def test_savings_down_to_nothing():
    """0.3 less three times 0.1 is not 0 in floating point; the solution that takes no time is found all the same."""
    assert seconds_of(divide_workspace(choices([[(0.1, 0), (0.0, 1)]] * 3), 3)) == 0.0


@examples(150)
@given(st.lists(st.lists(COST, min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 40))
def test_in_units_the_limit_holds_and_only_the_last_units_are_lost(options, limit):
    """With three units of room, each of up to 14 bytes."""
    fronts = choices(options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(division, "LEVELS", 3)
        try:
            found = divide_workspace(fronts, limit)
        except LimitTooSmallError:
            return
    smallest = sum(min(c.workspace_bytes for c in front) for front in fronts.values())
    unit = -(-(limit - smallest) // 3)
    assert bytes_of(found) <= limit
    least = least_seconds(fronts, limit)
    assert least is not None and seconds_of(found) >= least
    within = least_seconds(fronts, limit - len(fronts) * unit)
    assert within is None or seconds_of(found) <= within


def test_equal_kernels_are_solved_once():
    desirable.cache_clear()
    rows = (MicroConfiguration(1, "A", 1.0, 4),)
    fronts = fronts_of([KernelTable(name, 2, rows) for name in "abc"] + [KernelTable("d", 3, rows)], 9)
    assert list(fronts) == ["a", "b", "c", "d"]
    assert desirable.cache_info().misses == 2
    assert fronts["a"] == fronts["c"] != fronts["d"]


def test_what_is_refused():
    table = KernelTable("a", 1, (MicroConfiguration(1, "A", 1.0, 4),))
    with pytest.raises(ValueError, match="2 kernels have 1 names"):
        fronts_of([table, table], 9)
    with pytest.raises(LimitTooSmallError, match="a does not fit in 3 bytes"):
        fronts_of([table], 3)
    with pytest.raises(ValueError, match="-1"):
        divide_workspace({}, -1)


def test_nothing_to_divide():
    assert divide_workspace({}, 0) == {}
