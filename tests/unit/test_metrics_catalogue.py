"""The catalogue keeps to Prometheus's conventions, and the documentation is made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ooc.prometheus import reference
from ooc.prometheus.catalogue import CATALOGUE, COMMON_LABELS, STEP_BUCKETS, Metric
from ooc_alloc.core import STATISTICS

ROOT = Path(__file__).resolve().parents[2]
NAMES = [metric.name for metric in CATALOGUE]


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES) > 50


@pytest.mark.parametrize("metric", CATALOGUE, ids=NAMES)
def test_each_metric_keeps_to_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"ooc_[a-z][a-z_]*[a-z]", metric.name)
    assert metric.name.endswith("_total") == (metric.type == "counter")
    assert metric.name.endswith("_info") == (metric.type == "info")
    assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created"))
    stem = metric.name.removesuffix("_total")
    assert metric.unit in ("", "seconds", "bytes", "bytes_per_second", "ratio")
    assert not metric.unit or stem.endswith(f"_{metric.unit}")
    if not metric.unit:
        assert not stem.endswith(("_seconds", "_bytes", "_ratio", "_second"))
    assert metric.help.endswith((".", "?")) and "\n" not in metric.help and "|" not in metric.help
    assert metric.group
    assert metric.sources
    assert not set(metric.labels) & {*COMMON_LABELS, "le", "job", "instance"}
    if metric.type == "info":
        assert list(metric.sources) == [(label,) for label in metric.labels]
    else:
        assert all(len(values) == len(metric.labels) for values in metric.sources)
        assert all(re.fullmatch(r"[A-Za-z_]+", value) for values in metric.sources for value in values)


def test_every_kind_of_metric_that_an_operator_needs_is_there() -> None:
    """The list of the design, by name."""
    states = {values[0] for metric in CATALOGUE if metric.name == "ooc_device_bytes" for values in metric.sources}
    assert {"resident", "cached", "free", "slab"} <= states
    needed = """
        requested_bytes host_bytes budget_bytes live_peak_bytes oversubscription_ratio internal_fragmentation_ratio
        internal_fragmentation_bytes external_fragmentation_ratio external_fragmentation_bytes chunks swap_bytes_total
        swap_operations_total swap_seconds_total link_achieved_bytes_per_second link_probed_bytes_per_second
        stall_seconds_total demand_swap_ins_total divergences_total clean_drops_total plans_total
        planning_seconds_total policy_info window_bytes step_seconds step_over_bound_ratio functions_total
        driver_errors_total min_budget_bytes build_info device_info disk_budget_bytes disk_bytes disk_peak_bytes
        disk_read_bytes_total disk_written_bytes_total disk_failures_total process_peak_resident_bytes
        recompute_drops_total recompute_drop_bytes_total recompute_seconds_total
    """.split()
    assert {f"ooc_{name}" for name in needed} <= set(NAMES)


def test_every_failure_that_the_core_counts_by_name_has_its_label() -> None:
    counted = {name for name in STATISTICS if name.startswith("driver_failures_")}
    (errors,) = (metric for metric in CATALOGUE if metric.name == "ooc_driver_errors_total")
    assert set(errors.sources.values()) == counted


def test_buckets_rise() -> None:
    assert list(STEP_BUCKETS) == sorted(set(STEP_BUCKETS))


def test_the_documentation_is_up_to_date() -> None:
    kept = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert kept == reference.text(), "run: python -m ooc.prometheus.reference > docs/metrics.md"
    assert all(f"`{name}`" in kept for name in NAMES)
