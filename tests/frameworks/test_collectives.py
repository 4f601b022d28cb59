"""Collectives under budgets around their need: same bits, no hang, and the budget that an error names works."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import EMULATED, HERE, Ended, run

PROGRAM = HERE / "collectives.py"
CHUNK = 64 << 10
QUICK = ("reduced", "sent", "in_functions", "under_way")
SLOW = ("all_gather", "all_gather_into_tensor", "all_to_all", "reduce_scatter", "coalesced", "gather", "data_parallel")
KINDS = (*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW))
HANG_SECONDS = 120  # far beyond what any of these takes


def run_ranks(kind: str, ranks: int, budget: int | None) -> list[Ended]:
    """All ranks of the program at the same time; without a budget in plain memory."""
    managed = {**EMULATED, "OOC_SMALL_LIMIT": "1KiB", "OOC_BUDGET": str(budget)} if budget is not None else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        begun = [
            pool.submit(
                run,
                [PROGRAM, str(rank), str(ranks), str(Path(folder, "store")), kind],
                managed,
                summary=Path(folder, f"summary.{rank}") if managed else None,
                timeout=HANG_SECONDS,
            )
            for rank in range(ranks)
        ]
        return [one.result() for one in begun]


def digests(ended: list[Ended]) -> list[str]:
    return [one.check().output for one in ended]


def need_of(ended: list[Ended]) -> int:
    return max(int(one.figures["min_budget_bytes"]) for one in ended)


def named_budget(ended: list[Ended]) -> int:
    """The largest of the budgets that the ranks' errors name. A rank that lost another one names none."""
    found = [int(number) for one in ended for number in re.findall(r"set OOC_BUDGET=(\d+)", one.errors)]
    assert found, "\n".join(one.errors[-3000:] for one in ended)
    return max(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.medium
def test_the_need_that_a_run_shows_is_enough_and_collectives_leave_nothing_behind(kind: str) -> None:
    plain = digests(run_ranks(kind, 2, None))
    ample = run_ranks(kind, 2, 64 << 20)
    assert digests(ample) == plain
    need = need_of(ample)
    live = max(int(one.figures["live_peak_bytes"]) for one in ample)
    assert need < live / {"reduced": 2.4, "sent": 2.4, "in_functions": 2.2}.get(kind, 1.3), (
        "the operands of collectives that have ended still take room"
    )
    assert digests(run_ranks(kind, 2, need)) == plain


@pytest.mark.parametrize("kind", ["all_to_all", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW[:1])])
def test_the_budget_that_an_error_names_works(kind: str) -> None:
    plain = digests(run_ranks(kind, 2, None))
    need = need_of(run_ranks(kind, 2, 64 << 20))
    failed = run_ranks(kind, 2, need - CHUNK)
    assert any(one.status != 0 for one in failed)
    assert digests(run_ranks(kind, 2, named_budget(failed))) == plain


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [*QUICK, *SLOW])
def test_no_budget_around_the_need_makes_ranks_hang(kind: str, ranks: int) -> None:
    """Ten budgets from 0.9 to 1.1 times the need for each kind, with two and with four ranks: 220 runs and more."""
    plain = digests(run_ranks(kind, ranks, None))
    need = need_of(run_ranks(kind, ranks, 256 << 20))
    for tenth in range(10):
        budget = int(need * (0.9 + 0.2 * tenth / 9))
        ended = run_ranks(kind, ranks, budget)  # a rank that does not end in time fails the test
        if all(one.status == 0 for one in ended):
            assert digests(ended) == plain
            continue
        assert budget // CHUNK * CHUNK < need, f"{budget} bytes are the need of {need} or more"
        assert digests(run_ranks(kind, ranks, named_budget(ended))) == plain
