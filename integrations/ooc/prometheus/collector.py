"""A collector for prometheus_client, for a program that has a registry and a way out of its own.

import prometheus_client
from ooc.prometheus.collector import Collector

prometheus_client.REGISTRY.register(Collector())
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ooc.prometheus.catalogue import CATALOGUE, COMMON_LABELS, STEP_BUCKETS, Metric
from ooc.prometheus.exporting import current_session
from ooc.prometheus.figures import Figure, figures
from ooc.prometheus.page import number
from swapd.ranks import rank
from swapd.session import Session
from swapd.step_times import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


class Collector:
    """The catalogue's metrics, read when they are collected; of a session that has ended, its last ones.

    Args:
        session: whose; None: of the one that this process turned on last. Without one nothing is collected, nor in a
            forked child.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def describe(self) -> list[Family]:
        """For the registry, which wants to know the names beforehand."""
        return [_empty(metric) for metric in CATALOGUE]

    def collect(self) -> Iterator[Family]:
        """For the registry."""
        session = self._session or current_session()
        if session is None or session.forked:
            return
        found = figures(session)
        for metric in CATALOGUE:
            yield _filled(metric, found)


def _empty(metric: Metric) -> Any:
    from prometheus_client import core

    labels = (*COMMON_LABELS, *metric.labels)
    if metric.type == "gauge":
        return core.GaugeMetricFamily(metric.name, metric.help, labels=labels, unit=metric.unit)
    if metric.type == "counter":
        return core.CounterMetricFamily(metric.name, metric.help, labels=labels, unit=metric.unit)
    if metric.type == "histogram":
        return core.HistogramMetricFamily(metric.name, metric.help, labels=COMMON_LABELS, unit=metric.unit)
    return core.InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=COMMON_LABELS)


def _filled(metric: Metric, found: dict[str, Figure]) -> Any:
    family = _empty(metric)
    common = (rank(),)
    if metric.type == "info":
        family.add_metric(common, {values[0]: str(found[source]) for values, source in metric.sources.items()})
        return family
    for values, source in metric.sources.items():
        value = found[source]
        if isinstance(value, Histogram):
            below, buckets = 0, []
            for end, count in zip([*map(number, STEP_BUCKETS), "+Inf"], value.counts, strict=True):
                below += count
                buckets.append((end, below))
            family.add_metric(common, buckets, value.sum)
        elif isinstance(value, (int, float)):
            family.add_metric((*common, *values), value)
    return family
