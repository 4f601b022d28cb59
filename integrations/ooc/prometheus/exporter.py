"""Metrics of one session on their ways out: a server for scrapes, a file for node_exporter, a push at the end.

The server has threads of its own; one more thread writes and pushes. A failure is a warning, once for each kind.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading

from prometheus_client import generate_latest, push_to_gateway

from ooc.prometheus.collector import Collector
from ooc.prometheus.server import Server
from swapd.config import Config, ConfigError, server_tls
from swapd.files import is_stream, write_whole
from swapd.ranks import local_rank, own_file, rank
from swapd.session import Session, Snapshot

log = logging.getLogger("ooc.prometheus")

_PUSH_SECONDS = 2.0  # that each step of a push may take
_END_SECONDS = 5.0  # the program's end waits no longer


class Exporter:
    """A `swapd.session.Follower`. Making one starts it."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self._session = session
        self._config = config
        self._warned: set[str] = set()
        self._over = False
        self.server = self._listen(config) if config.metrics_port is not None else None
        self._file = own_file(config.metrics_file)
        # What the thread is to write and push, and what it then sets; None ends it. A signal's handler may put into it.
        self._asked: queue.SimpleQueue[tuple[Snapshot, threading.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ooc-metrics-file", daemon=True)
        if self._file is not None or config.metrics_push is not None:
            self._thread.start()

    def _listen(self, config: Config) -> Server | None:
        assert config.metrics_port is not None
        port = config.metrics_port + (local_rank() or 0 if config.metrics_port != 0 else 0)
        try:
            tls = server_tls(config.metrics_cert, config.metrics_key) if config.metrics_cert is not None else None
            server = Server(config.metrics_address, port, Collector(self._session), tls)
        except (OSError, OverflowError, ConfigError) as error:
            log.warning(
                "no metrics are served: %s port %d: %s; the program goes on (OOC_METRICS_PORT=0 takes any free port)",
                config.metrics_address,
                port,
                error,
            )
            return None
        log.info("metrics at %s", server.url)
        return server

    # --- swapd.session.Follower ---

    def finish(self, last: Snapshot) -> None:
        """Writes and pushes the last figures, and ends the exporter."""
        if self._over:
            return
        self._over = True  # first, as a signal may come now
        self._give(last)
        if self._thread.is_alive():
            self._asked.put(None)
            self._thread.join(_END_SECONDS)
        if self.server is not None:
            self.server.stop()

    def program_ends(self, last: Snapshot) -> None:
        """Writes and pushes the last figures."""
        if not self._over:
            self._give(last)

    def _give(self, last: Snapshot) -> None:
        if not self._thread.is_alive():
            return
        done = threading.Event()
        self._asked.put((last, done))
        if not done.wait(_END_SECONDS):
            self._warn("end", "the last metrics were not written or pushed in %g s", _END_SECONDS)

    def in_child(self) -> None:
        """Makes the copy in a forked child serve, write and push nothing."""
        self._over = True
        if self.server is not None:
            self.server.close_in_child()

    # --- In the thread ---

    def _run(self) -> None:
        rewritten = self._file is not None and not is_stream(self._file)
        every = self._config.metrics_interval if rewritten else None
        if rewritten:
            self._write()
        while True:
            try:
                asked = self._asked.get(timeout=every)
            except queue.Empty:
                self._write()
                continue
            if asked is None:
                return
            snapshot, done = asked
            self._write(snapshot)
            self._push(snapshot)
            done.set()

    def _write(self, snapshot: Snapshot | None = None) -> None:
        """Writes the file; not by `write_to_textfile`, which would replace a link or a pipe by a file."""
        if self._file is None:
            return
        try:
            write_whole(self._file, generate_latest(Collector(self._session, snapshot)))
        except Exception as error:
            self._warn("file", "cannot write the metrics to %s: %s", self._file, error)

    def _push(self, snapshot: Snapshot) -> None:
        gateway = self._config.metrics_push
        if gateway is None:
            return
        group = {"instance": socket.gethostname() or "localhost", "rank": rank()}
        figures = Collector(self._session, snapshot)
        try:
            push_to_gateway(gateway, self._config.metrics_job, figures, group, timeout=_PUSH_SECONDS)
        except Exception as error:
            self._warn("push", "the metrics were not pushed to %s: %s", gateway, error)

    def _warn(self, kind: str, message: str, *arguments: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *arguments)
