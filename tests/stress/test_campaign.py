"""The suite finds what it is for: planted faults, hidden writes, and differences."""

from __future__ import annotations

import pytest

from tests.stress import campaign
from tests.stress.layouts import PLANTED


@pytest.fixture(scope="module")
def report() -> campaign.Report:
    return campaign.run([f"planted|{name}||" for name in PLANTED])


def test_a_fault_is_survived_and_reported(report: campaign.Report) -> None:
    (fault,) = report.faults
    assert fault.startswith("planted|reads_behind_our_back|| (ours): dies with status -11")
    assert "string_at" in fault, "the report says where"


def test_a_write_that_the_schema_hides_is_found(report: campaign.Report) -> None:
    (mismatch,) = (each for each in report.mismatches if "writes_what_it_only_reads" in each)
    assert "aten::sum wrote a variable" in mismatch


def test_a_wrong_result_is_found(report: campaign.Report) -> None:
    (mismatch,) = (each for each in report.mismatches if "wrong_in_strict_mode" in each)
    assert "ours False, plain True" in mismatch
    assert len(report.mismatches) == 2


def test_undefined_results_are_told_from_wrong_ones(report: campaign.Report) -> None:
    assert set(report.undefined) == {"planted|differs||", "planted|uninitialised||"}


def test_what_is_right_passes(report: campaign.Report) -> None:
    assert report.cases == len(PLANTED)
    assert not any("fine" in each for each in report.faults + report.mismatches)
