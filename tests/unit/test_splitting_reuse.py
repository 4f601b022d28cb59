"""WR: the dynamic programme against every division, and micro-cuDNN's own example."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import examples
from splitting_cases import ANY_SECONDS, MIB, all_divisions, complete_table, require_division, tables

from swapd.splitting.configurations import (
    POLICIES,
    Configuration,
    KernelTable,
    MicroConfiguration,
    micro_batch_sizes,
)
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError
from swapd.splitting.reuse import fastest_division, smallest_workspace_bytes


@examples(300)
@given(tables(), st.integers(0, 10))
def test_the_fastest_of_all_divisions(table, limit):
    divisions = list(all_divisions(table))
    if not divisions:
        with pytest.raises(UnreachableBatchError):
            fastest_division(table, limit)
        return
    smallest = min(division.workspace_bytes for division in divisions)
    assert smallest_workspace_bytes(table) == smallest
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


@examples(100)
@given(tables(), st.sampled_from(POLICIES))
def test_a_policy_is_the_best_of_its_own_sizes(table, policy):
    sizes = micro_batch_sizes(policy, table.batch)
    allowed = [d.seconds for d in all_divisions(table) if all(part.batch in sizes for part in d.parts)]
    if allowed:
        assert fastest_division(table, 9, policy).seconds == min(allowed)
    else:
        with pytest.raises(UnreachableBatchError):
            fastest_division(table, 9, policy)


@pytest.mark.parametrize(
    ("policy", "batch", "sizes"),
    [
        ("all", 5, (1, 2, 3, 4, 5)),
        ("powerOfTwo", 1, (1,)),
        ("powerOfTwo", 8, (1, 2, 4, 8)),
        ("powerOfTwo", 5, (1, 2, 4, 5)),
        ("powerOfTwo", 256, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("undivided", 5, (5,)),
    ],
)
def test_the_sizes_of_a_policy(policy, batch, sizes):
    assert micro_batch_sizes(policy, batch) == sizes


def test_there_is_no_such_policy():
    with pytest.raises(ValueError, match="all, powerOfTwo, undivided"):
        micro_batch_sizes("powersOfTwo", 8)


def conv2() -> KernelTable:
    """AlexNet's conv2, forward, batch 256, in micro-cuDNN's Figure 10.

    The workspaces are the paper's: 4.3 KiB for GEMM; for FFT 48.9 MiB with 32 samples and 213 MiB with 256, linear
    between. The times are made up: FFT takes half of GEMM's for a sample, and each call of it 0.1 ms.
    """
    by_sample = (213 - 48.9) / (256 - 32)
    fft = [
        MicroConfiguration(b, "FFT", 1e-4 + 2e-5 * b, round((48.9 + by_sample * (b - 32)) * MIB)) for b in range(1, 257)
    ]
    gemm = [MicroConfiguration(b, "GEMM", 4e-5 * b, 4403) for b in range(1, 257)]
    return KernelTable("conv2", 256, (*fft, *gemm))


def test_conv2_of_figure_10():
    table, limit = conv2(), 64 * MIB
    undivided = fastest_division(table, limit, "undivided")
    assert [(part.algorithm, part.batch) for part in undivided.parts] == [("GEMM", 256)]
    powers = fastest_division(table, limit, "powerOfTwo")
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
    assert smallest_workspace_bytes(table) == 2
    assert fastest_division(table, 6).seconds == 4.0  # 1 + 1 + 1 + 1
    assert fastest_division(table, 7).seconds == 2.0  # 3 + 1
    assert fastest_division(table, 4).seconds == 9.0


def test_sizes_that_do_not_add_up_name_the_nearest_that_do():
    table = KernelTable("kernel", 7, (MicroConfiguration(3, "A", 1.0, 0), MicroConfiguration(5, "A", 1.0, 0)))
    with pytest.raises(UnreachableBatchError, match="batch of 7; the nearest that they reach: 6 and 8") as refused:
        fastest_division(table, 100)
    assert (refused.value.below, refused.value.above) == (6, 8)
    with pytest.raises(UnreachableBatchError) as refused:
        fastest_division(KernelTable("kernel", 7, ()), 100)
    assert (refused.value.below, refused.value.above) == (None, None)


def test_errors_survive_a_process_boundary():
    for error in (LimitTooSmallError("x", 1, 2), UnreachableBatchError("x", 7, 6, None)):
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


def test_a_negative_limit_and_an_empty_batch_are_refused():
    with pytest.raises(ValueError, match="-1"):
        fastest_division(complete_table(1, 2), -1)
    with pytest.raises(ValueError, match="at least 1 sample"):
        KernelTable("kernel", 0, ())


def test_the_cost_of_a_configuration():
    parts = (MicroConfiguration(3, "A", 0.1, 7), MicroConfiguration(1, "B", 0.2, 9), MicroConfiguration(2, "A", 0.3, 4))
    forwards, backwards = Configuration(parts), Configuration(parts[::-1])
    assert (forwards.batch, forwards.workspace_bytes) == (6, 9)
    assert forwards.seconds == backwards.seconds == pytest.approx(0.6)


# --- noise -----------------------------------------------------------------------------------------------------------


def noisy(part: float, spread: float) -> KernelTable:
    rows = (MicroConfiguration(4, "a", 1.0, 100), MicroConfiguration(2, "b", part, 10, spread))
    return KernelTable("kernel", 4, rows)


@pytest.mark.parametrize(("part", "spread", "noise", "divided"), [
    (0.48, 0.01, 0.0, True), (0.48, 0.03, 0.0, False), (0.48, 0.0, 0.02, True), (0.48, 0.0, 0.05, False),
    (0.48, 0.03, 0.01, False),
])  # fmt: skip
def test_a_gain_within_the_noise_is_none(part: float, spread: float, noise: float, divided: bool) -> None:
    table = noisy(part, spread)
    assert len(fastest_division(table, 100).parts) == 2
    chosen = fastest_division(table.cautious(noise), 100)
    assert len(chosen.parts) == (2 if divided else 1)
    assert table.measured(chosen).seconds == pytest.approx(2 * part if divided else 1.0)
    assert len(fastest_division(table.cautious(noise), 50).parts) == 2  # where only a division fits, it is taken
