"""The catalogue's metrics as prometheus_client wants them; also for a program that has a registry of its own.

    import prometheus_client
    from ooc.prometheus.collector import Collector

    prometheus_client.REGISTRY.register(Collector())
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric as Family

import ooc.prometheus
from ooc.prometheus.catalogue import CATALOGUE, STEP_BUCKETS, Metric
from ooc.prometheus.figures import Figure, figures
from swapd.ranks import rank
from swapd.session import Session, Snapshot
from swapd.step_times import Histogram


class Collector:
    """Collects one session's metrics; none if there is no session, or in a forked child.

    Args:
        session: None means the session that this process turned on last. One that has ended gives its last figures.
        snapshot: the counters to show; None means the counters at the time when somebody collects.
    """

    def __init__(self, session: Session | None = None, snapshot: Snapshot | None = None) -> None:
        self._session = session
        self._snapshot = snapshot

    def describe(self) -> list[Family]:
        return [empty_family(metric) for metric in CATALOGUE]

    def collect(self) -> Iterator[Family]:
        session = self._session or ooc.prometheus.last_session
        if session is not None and not session.forked:
            yield from families(figures(session, self._snapshot))


def empty_family(metric: Metric) -> Family:
    """A metric without samples."""
    return Family(metric.name.removesuffix("_total").removesuffix("_info"), metric.help, metric.type, metric.unit)


def families(found: Mapping[str, Figure]) -> Iterator[Family]:
    """Every metric of the catalogue with these figures. A figure that is None has no sample.

    Raises:
        KeyError: a figure is missing.
    """
    common = {"rank": rank()}
    for metric in CATALOGUE:
        family = empty_family(metric)
        if metric.type == "info":
            texts = {label: str(found[source]) for (label,), source in metric.sources.items()}
            family.add_sample(metric.name, common | texts, 1)
        else:
            for values, source in metric.sources.items():
                _add(family, metric.name, common | dict(zip(metric.labels, values)), found[source])
        yield family


def _add(family: Family, name: str, labels: dict[str, str], value: Figure) -> None:
    if isinstance(value, Histogram):
        below = 0
        for end, count in zip([*map(str, STEP_BUCKETS), "+Inf"], value.counts, strict=True):
            below += count
            family.add_sample(f"{name}_bucket", labels | {"le": end}, below)
        family.add_sample(f"{name}_count", labels, below)
        family.add_sample(f"{name}_sum", labels, value.sum)
    elif isinstance(value, (int, float)):
        family.add_sample(name, labels, value)
