"""The catalogue's metrics with their figures, as prometheus_client wants to have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import core

from ooc.prometheus.catalogue import CATALOGUE, COMMON_LABELS, STEP_BUCKETS, Metric
from ooc.prometheus.figures import Figure, figures
from swapd.ranks import rank
from swapd.session import Session, Snapshot
from swapd.step_times import Histogram


class OfSession:
    """A collector of one session, which collects nothing in a forked child.

    Args:
        session: whose metrics; a session that has ended gives its last figures.
        snapshot: the counters to show; None means the counters at the time when somebody collects.
    """

    def __init__(self, session: Session, snapshot: Snapshot | None = None) -> None:
        self._session = session
        self._snapshot = snapshot

    def describe(self) -> list[core.Metric]:
        """Tells the registry the names of the metrics beforehand."""
        return empty_families()

    def collect(self) -> Iterator[core.Metric]:
        """Gives the registry the metrics with their figures."""
        if not self._session.forked:
            yield from families(figures(self._session, self._snapshot))


def empty_families() -> list[core.Metric]:
    """Every metric of the catalogue, without samples."""
    return [_empty(metric) for metric in CATALOGUE]


def families(found: Mapping[str, Figure]) -> Iterator[core.Metric]:
    """Every metric of the catalogue with these figures. A figure that is None has no sample.

    Raises:
        KeyError: a figure is missing.
    """
    common = (rank(),)
    for metric in CATALOGUE:
        yield _filled(metric, common, found)


def _empty(metric: Metric) -> Any:
    labels = (*COMMON_LABELS, *metric.labels)
    if metric.type == "gauge":
        return core.GaugeMetricFamily(metric.name, metric.help, labels=labels, unit=metric.unit)
    if metric.type == "counter":
        return core.CounterMetricFamily(metric.name, metric.help, labels=labels, unit=metric.unit)
    if metric.type == "histogram":
        return core.HistogramMetricFamily(metric.name, metric.help, labels=COMMON_LABELS, unit=metric.unit)
    return core.InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=COMMON_LABELS)


def _filled(metric: Metric, common: tuple[str, ...], found: Mapping[str, Figure]) -> Any:
    family = _empty(metric)
    if metric.type == "info":
        family.add_metric(common, {values[0]: str(found[source]) for values, source in metric.sources.items()})
        return family
    for values, source in metric.sources.items():
        value = found[source]
        if isinstance(value, Histogram):
            below, buckets = 0, []
            for end, count in zip([*map(str, STEP_BUCKETS), "+Inf"], value.counts, strict=True):
                below += count
                buckets.append((end, below))
            family.add_metric(common, buckets, value.sum)
        elif isinstance(value, (int, float)):
            family.add_metric((*common, *values), value)
    return family
