"""What every integration calls when its session has started. It loads and starts nothing that no setting asks for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ooc.prometheus
from swapd.ranks import claim
from swapd.session import Session

if TYPE_CHECKING:
    from ooc.prometheus.exporter import Exporter

log = logging.getLogger("ooc.prometheus")

_EXPORTED_BY = "_OOC_METRICS_OF"  # tells child processes that a parent's metrics are exported already
_exported: tuple[Session, Exporter] | None = None


def export(session: Session) -> None:
    """Exports the metrics of a session that has started in the ways that its settings ask for, until it ends.

    Never raises: what cannot be done is a warning, and the program goes on.
    """
    global _exported
    ooc.prometheus.last_session = session
    config = session.config
    if config.metrics_port is None and config.metrics_file is None and config.metrics_push is None:
        return
    try:
        from ooc.prometheus.exporter import Exporter

        if not claim(_EXPORTED_BY):
            log.info("a launcher, or a child process of one whose metrics are exported: no metrics of this one")
            return
        if _exported is not None and not _exported[0].closed:
            log.warning("metrics of another session of this process are exported already; of this one they are not")
            return
        _exported = session, Exporter(session)
        session.follow(_exported[1])
    except Exception:
        log.warning("no metrics: the exporter did not start", exc_info=True)


def served_at() -> str | None:
    """Where the metrics of this process are scraped; None if they are not."""
    if _exported is None or _exported[0].closed or _exported[0].forked or _exported[1].server is None:
        return None
    return _exported[1].server.url
