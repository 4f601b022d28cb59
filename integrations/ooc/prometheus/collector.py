"""A collector for prometheus_client, for a program that has a registry and a way out of its own.

import prometheus_client
from ooc.prometheus.collector import Collector

prometheus_client.REGISTRY.register(Collector())
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import core

from ooc.prometheus.exporting import current_session
from ooc.prometheus.families import OfSession, empty_families
from swapd.session import Session


class Collector:
    """The catalogue's metrics, read when they are collected. A session that has ended gives its last figures.

    Args:
        session: whose metrics; None means the session that this process turned on last. Nothing is collected if there
            is no session, nor in a forked child.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def describe(self) -> list[core.Metric]:
        """Tells the registry the names of the metrics beforehand."""
        return empty_families()

    def collect(self) -> Iterable[core.Metric]:
        """Gives the registry the metrics with their figures."""
        session = self._session or current_session()
        return OfSession(session).collect() if session is not None else ()
