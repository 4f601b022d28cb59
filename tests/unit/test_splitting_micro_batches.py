"""Divisions of one kernel: the fastest and the desirable ones against all of them, and micro-cuDNN's own example."""

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import examples
from splitting_cases import ANY_SECONDS, MIB, all_divisions, complete_table, costs, desirable, require_division, tables

from swapd.splitting.configurations import (
    Configuration,
    KernelTable,
    MicroConfiguration,
    micro_batch_sizes,
)
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError
from swapd.splitting.micro_batches import fastest_division, pareto_front, smallest_division

ANY = 1 << 62  # bytes: no limit


@examples(300)
@given(tables(), st.integers(0, 10))
def test_the_fastest_of_all_divisions(table, limit):
    divisions = list(all_divisions(table))
    if not divisions:
        with pytest.raises(UnreachableBatchError):
            fastest_division(table, limit)
        return
    smallest = min(division.workspace_bytes for division in divisions)
    assert smallest_division(table).workspace_bytes == smallest
    if smallest > limit:
        with pytest.raises(LimitTooSmallError) as refused:
            fastest_division(table, limit)
        assert (refused.value.limit_bytes, refused.value.smallest_bytes) == (limit, smallest)
        limit = smallest  # what the error says would do, does
    found = fastest_division(table, limit)
    require_division(table, found)
    assert found.workspace_bytes <= limit
    fitting = [division for division in divisions if division.workspace_bytes <= limit]
    least = min(division.seconds for division in fitting)
    assert found.seconds == least
    assert len(found.parts) == min(len(division.parts) for division in fitting if division.seconds == least)


@examples(100)
@given(tables(seconds=ANY_SECONDS), st.integers(0, 10))
def test_the_fastest_with_times_that_round(table, limit):
    fitting = [division.seconds for division in all_divisions(table) if division.workspace_bytes <= limit]
    if fitting:
        assert fastest_division(table, limit).seconds == pytest.approx(min(fitting), rel=1e-12)


@pytest.mark.parametrize(
    ("policy", "batch", "sizes"),
    [
        ("all", 5, (1, 2, 3, 4, 5)),
        ("powerOfTwo", 1, (1,)),
        ("powerOfTwo", 8, (1, 2, 4, 8)),
        ("powerOfTwo", 5, (1, 2, 4, 5)),
        ("powerOfTwo", 256, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_the_sizes_of_a_policy(policy, batch, sizes):
    assert micro_batch_sizes(policy, batch) == sizes


def test_there_is_no_such_policy():
    with pytest.raises(ValueError, match="all, powerOfTwo"):
        micro_batch_sizes("powersOfTwo", 8)


def conv2(policy: str = "all") -> KernelTable:
    """AlexNet's conv2, forward, batch 256, in micro-cuDNN's Figure 10.

    The workspaces are the paper's: 4.3 KiB for GEMM; for FFT 48.9 MiB with 32 samples and 213 MiB with 256, linear
    between. The times are made up: FFT takes half of GEMM's for a sample, and each call of it 0.1 ms.
    """
    by_sample = (213 - 48.9) / (256 - 32)
    sizes = (256,) if policy == "undivided" else micro_batch_sizes(policy, 256)
    fft = [MicroConfiguration(b, "FFT", 1e-4 + 2e-5 * b, round((48.9 + by_sample * (b - 32)) * MIB)) for b in sizes]
    gemm = [MicroConfiguration(b, "GEMM", 4e-5 * b, 4403) for b in sizes]
    return KernelTable("conv2", 256, (*fft, *gemm))


def test_conv2_of_figure_10():
    table, limit = conv2(), 64 * MIB
    undivided = fastest_division(conv2("undivided"), limit)
    assert [(part.algorithm, part.batch) for part in undivided.parts] == [("GEMM", 256)]
    powers = fastest_division(conv2("powerOfTwo"), limit)
    assert [(part.algorithm, part.batch) for part in powers.parts] == [("FFT", 32)] * 8  # 64 samples take 72.3 MiB
    assert powers.workspace_bytes == round(48.9 * MIB)
    best = fastest_division(table, limit)
    assert {part.algorithm for part in best.parts} == {"FFT"}
    assert len(best.parts) == 5  # at most 52 samples fit
    assert max(part.batch for part in best.parts) <= 52
    assert best.seconds == pytest.approx(5 * 1e-4 + 256 * 2e-5)
    roomy = fastest_division(table, 213 * MIB)
    assert [(part.algorithm, part.batch) for part in roomy.parts] == [("FFT", 256)]


def test_without_workspace_the_smallest_that_would_do_is_named():
    with pytest.raises(LimitTooSmallError, match=r"conv2 does not fit in 4402 bytes.*is 4403 bytes"):
        fastest_division(conv2(), 4402)
    assert fastest_division(conv2(), 4403).workspace_bytes == 4403


def test_a_part_may_not_need_more_because_another_is_smaller():
    rows = (MicroConfiguration(1, "A", 1.0, 5), MicroConfiguration(3, "A", 1.0, 7), MicroConfiguration(4, "A", 9.0, 2))
    table = KernelTable("kernel", 4, rows)
    assert smallest_division(table).workspace_bytes == 2
    assert fastest_division(table, 6).seconds == 4.0  # 1 + 1 + 1 + 1
    assert fastest_division(table, 7).seconds == 2.0  # 3 + 1
    assert fastest_division(table, 4).seconds == 9.0


def test_sizes_that_do_not_add_up_name_the_nearest_that_do():
    table = KernelTable("kernel", 7, (MicroConfiguration(3, "A", 1.0, 0), MicroConfiguration(5, "A", 1.0, 0)))
    with pytest.raises(UnreachableBatchError, match="batch of 7; the nearest that they reach: 6 and 8") as refused:
        fastest_division(table, 100)
    assert refused.value.nearest == [6, 8]
    with pytest.raises(UnreachableBatchError) as refused:
        fastest_division(KernelTable("kernel", 7, ()), 100)
    assert refused.value.nearest == []


def test_errors_survive_a_process_boundary():
    for error in (LimitTooSmallError("x", 1, 2), UnreachableBatchError("x", 7, {0, 3, 6})):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize(
    "values",
    [(0, "A", 1.0, 0), (1, "A", float("nan"), 0), (1, "A", -1.0, 0), (1, "A", float("inf"), 0), (1, "A", 1.0, -1)],
)
def test_what_cannot_have_been_measured_is_refused(values):
    with pytest.raises(ValueError, match="A"):
        MicroConfiguration(*values)


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="-1"):
        fastest_division(complete_table(1, 2), -1)


def test_the_cost_of_a_configuration():
    parts = (MicroConfiguration(3, "A", 0.1, 7), MicroConfiguration(1, "B", 0.2, 9), MicroConfiguration(2, "A", 0.3, 4))
    forwards, backwards = Configuration(parts), Configuration(parts[::-1])
    assert forwards.workspace_bytes == 9
    assert forwards.seconds == backwards.seconds == pytest.approx(0.6)


# --- the desirable configurations -------------------------------------------------------------------------------------


def front_by_the_formula(table: KernelTable) -> tuple[Configuration, ...]:
    """C(B) as section III-C1 of micro-cuDNN writes it: a pruned set for every b."""
    sets: list[tuple[Configuration, ...]] = [(Configuration(()),)]
    for b in range(1, table.batch + 1):
        union = [
            Configuration((row, *rest.parts)) for row in table.rows if row.batch <= b for rest in sets[b - row.batch]
        ]
        sets.append(desirable(union))
    return sets[table.batch]


@examples(300)
@given(tables())
def test_the_front_of_all_divisions(table):
    divisions = tuple(all_divisions(table))
    if not divisions:
        with pytest.raises(UnreachableBatchError):
            pareto_front(table, ANY)
        return
    front = pareto_front(table, ANY)
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
    assert costs(within) == [cost for cost in costs(pareto_front(table, ANY)) if cost[0] <= limit]
    assert within[-1].seconds == min(fitting)
    assert [c.seconds for c in front_by_the_formula(table) if c.workspace_bytes <= limit][-1] == min(fitting)


@examples(100)
@given(tables(seconds=ANY_SECONDS), st.integers(0, 10))
def test_pruning_with_times_that_round(table, limit):
    fitting = [division.seconds for division in all_divisions(table) if division.workspace_bytes <= limit]
    if fitting:
        within = [c.seconds for c in pareto_front(table, ANY) if c.workspace_bytes <= limit]
        assert min(within) == pytest.approx(min(fitting), rel=1e-12)


@examples(60)
@given(tables(most=12))
def test_each_is_what_reuse_finds_within_its_workspace(table):
    try:
        front = pareto_front(table, ANY)
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


# --- noise -----------------------------------------------------------------------------------------------------------


def noisy(part: float, spread: float) -> KernelTable:
    rows = (MicroConfiguration(4, "a", 1.0, 100), MicroConfiguration(2, "b", part, 10, spread))
    return KernelTable("kernel", 4, rows)


@pytest.mark.parametrize(("spread", "divided"), [(0.01, True), (0.03, False)])
def test_a_gain_within_the_noise_is_none(spread: float, divided: bool) -> None:
    table = noisy(0.48, spread)
    assert len(fastest_division(table, 100).parts) == 2
    assert len(fastest_division(table.cautious(), 100).parts) == (2 if divided else 1)
    assert len(fastest_division(table.cautious(), 50).parts) == 2  # where only a division fits, it is taken
