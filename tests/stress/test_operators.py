"""Strict mode over PyTorch's own databases: no fault, and every bit as with plain memory.

STRESS_DISK names a folder on a disk for every host copy. With STRESS_RECOMPUTE=1 what can be made again is given up
as soon as a function has ended.
"""

from __future__ import annotations

import json
import zlib

import pytest

from tests.stress import campaign, cases
from tests.stress.left_out import UNDEFINED

SHARDS = 16  # a few minutes each, also on a busy machine


def _name(case: str) -> str:
    return case.split("|")[1]


def _shard(all_cases: list[str], shard: int) -> list[str]:
    """All cases of an operator are in one shard."""
    return [case for case in all_cases if zlib.crc32(_name(case).encode()) % SHARDS == shard]


def _check(chosen: list[str]) -> campaign.Report:
    assert chosen
    report = campaign.run(chosen)
    figures = {"cases": report.cases, "samples": report.samples, "raise in both": len(report.errors)}
    figures |= {name: sum(stats[name] for stats in report.stats) for name in ("functions", "swap_in_count")}
    print(json.dumps(figures))
    assert not report.faults and not report.mismatches, report.failures()
    assert report.samples >= report.cases
    assert figures["swap_in_count"] > figures["cases"], "hardly anything was ever away"
    undefined = {_name(case) for case in report.undefined}
    listed = {name for name in map(_name, chosen) if name in UNDEFINED}
    assert undefined == listed, "undefined results and their list differ"
    return report


@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators(shard: int) -> None:
    _check(_shard(cases.operator_cases(), shard))


def test_sparse_operators() -> None:
    _check(cases.sparse_cases())


def test_operators_over_lists() -> None:
    _check(cases.list_cases())


def test_optimizers() -> None:
    report = _check(cases.optimizer_cases())
    assert not report.errors, report.errors


def test_modules() -> None:
    report = _check(cases.module_cases())
    assert not report.errors, report.errors


def test_other_layouts_and_doors_to_memory() -> None:
    report = _check(cases.layout_cases())
    assert not report.errors, report.errors
