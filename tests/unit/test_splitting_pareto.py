"""The desirable configurations: none is lost, none is there for nothing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import examples
from splitting_cases import (
    ANY_SECONDS,
    all_divisions,
    complete_table,
    costs,
    require_division,
    tables,
)

from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError
from swapd.splitting.pareto import desirable, pareto_front
from swapd.splitting.reuse import fastest_division


def front_by_the_formula(table: KernelTable) -> tuple[Configuration, ...]:
    """C(B) as section III-C1 of micro-cuDNN writes it: a pruned set for every b."""
    sets: list[tuple[Configuration, ...]] = [(Configuration(()),)]
    for b in range(1, table.batch + 1):
        union = [
            Configuration((row, *rest.parts)) for row in table.rows if row.batch <= b for rest in sets[b - row.batch]
        ]
        sets.append(desirable(union))
    return sets[table.batch]


def point(seconds: float, workspace: int, algorithm: str = "A") -> MicroConfiguration:
    return MicroConfiguration(1, algorithm, seconds, workspace)


def test_the_pruning_by_hand():
    small, middle, large = point(5.0, 1), point(3.0, 4), point(2.0, 9)
    beaten = [point(5.0, 2), point(3.5, 4), point(6.0, 0 + 1), point(2.0, 10)]
    for order in itertools.permutations([small, middle, large, *beaten[:2]]):
        assert desirable([*order, *beaten[2:]]) == (small, middle, large)
    assert desirable([]) == ()


def test_one_of_equals_stays():
    first, second = point(1.0, 1, "A"), point(1.0, 1, "B")
    assert desirable([first, second]) == (first,)  # the paper's formula, read to the letter, keeps neither


@examples(300)
@given(tables())
def test_the_front_of_all_divisions(table):
    divisions = tuple(all_divisions(table))
    if not divisions:
        with pytest.raises(UnreachableBatchError):
            pareto_front(table)
        return
    front = pareto_front(table)
    for configuration in front:
        require_division(table, configuration)
    assert costs(front) == costs(desirable(divisions)) == costs(front_by_the_formula(table))


@examples(200)
@given(tables(), st.integers(0, 10))
def test_pruning_never_loses_the_optimum(table, limit):
    fitting = [division.seconds for division in all_divisions(table) if division.workspace_bytes <= limit]
    if not fitting:
        with pytest.raises((LimitTooSmallError, UnreachableBatchError)):
            pareto_front(table, limit)
        return
    within = pareto_front(table, limit)
    assert costs(within) == [cost for cost in costs(pareto_front(table)) if cost[0] <= limit]
    assert within[-1].seconds == min(fitting)
    assert [c.seconds for c in front_by_the_formula(table) if c.workspace_bytes <= limit][-1] == min(fitting)


@examples(100)
@given(tables(seconds=ANY_SECONDS), st.integers(0, 10))
def test_pruning_with_times_that_round(table, limit):
    fitting = [division.seconds for division in all_divisions(table) if division.workspace_bytes <= limit]
    if fitting:
        within = [c.seconds for c in pareto_front(table) if c.workspace_bytes <= limit]
        assert min(within) == pytest.approx(min(fitting), rel=1e-12)


@examples(60)
@given(tables(most=12))
def test_each_is_what_reuse_finds_within_its_workspace(table):
    try:
        front = pareto_front(table)
    except UnreachableBatchError:
        return
    for configuration in front:
        assert fastest_division(table, configuration.workspace_bytes).seconds == configuration.seconds


def layer_of_256() -> KernelTable:
    """A made-up layer at the paper's batch, with three algorithms: larger workspaces are faster, calls cost time."""
    kinds = (
        ("GEMM", 0.02, 4e-5, 0, 16),
        ("FFT", 0.10, 2e-5, 25_000_000, 730_000),
        ("WINOGRAD", 0.05, 3e-5, 9_000, 90_000),
    )
    rows = [
        MicroConfiguration(b, name, call / 1000 + each * b, fixed + more * b)
        for name, call, each, fixed, more in kinds
        for b in range(1, 257)
    ]
    return KernelTable("conv", 256, tuple(rows))


def test_a_layer_of_256_samples():
    table = layer_of_256()
    front = pareto_front(table, 120 << 20)
    for before, after in itertools.pairwise(front):
        assert before.workspace_bytes < after.workspace_bytes
        assert before.seconds > after.seconds
    for configuration in front[:: max(1, len(front) // 8)]:
        require_division(table, configuration)
        assert fastest_division(table, configuration.workspace_bytes).seconds == pytest.approx(configuration.seconds)
        if configuration is not front[0]:
            with_less = fastest_division(table, configuration.workspace_bytes - 1)
            assert with_less.seconds > configuration.seconds * (1 + 1e-12)
    assert front[-1].seconds == pytest.approx(fastest_division(table, 120 << 20).seconds)


def test_policies_restrict_the_front():
    table = complete_table(2, 8)
    for policy, sizes in (("undivided", {8}), ("powerOfTwo", {1, 2, 4, 8})):
        expected = desirable(d for d in all_divisions(table) if {part.batch for part in d.parts} <= sizes)
        assert costs(pareto_front(table, policy=policy)) == costs(expected)


def test_a_limit_below_the_smallest_says_so():
    table = KernelTable("conv", 2, (MicroConfiguration(1, "A", 1.0, 8), MicroConfiguration(2, "A", 1.0, 12)))
    with pytest.raises(LimitTooSmallError) as refused:
        pareto_front(table, 7)
    assert refused.value.smallest_bytes == 8
    assert costs(pareto_front(table, 8)) == [(8, 2.0)]
    assert costs(pareto_front(table, 12)) == [(8, 2.0), (12, 1.0)]


@pytest.mark.parametrize(("algorithms", "batch"), [(1, 1), (1, 6), (2, 4), (3, 4), (4, 3)])
def test_the_papers_number_of_configurations(algorithms, batch):
    """Section III-C1: |A| (|A| + 1)^(B - 1). It also says that the enumeration here leaves nothing out."""
    divisions = [division.parts for division in all_divisions(complete_table(algorithms, batch))]
    assert len(set(divisions)) == len(divisions) == algorithms * (algorithms + 1) ** (batch - 1)


def test_an_empty_configuration_costs_nothing():
    assert costs((Configuration(()),)) == [(0, 0.0)]
