"""Metrics of one session on their ways out: a server for scrapes, a file for node_exporter, a push at the end.

All of it is done by one thread with an event loop. What goes wrong is a warning, once of each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request

from ooc.prometheus.figures import figures
from ooc.prometheus.page import CONTENT_TYPE, Page
from ooc.prometheus.server import Server
from swapd.config import Config, ConfigError, server_tls
from swapd.files import is_stream, write_whole
from swapd.ranks import local_rank, own_file, rank
from swapd.session import Session, Snapshot

log = logging.getLogger("ooc.prometheus")

_PUSH_SECONDS = 2.0  # of each step of a push
_END_SECONDS = 5.0  # the program's end waits no longer


class Exporter:
    """A `swapd.session.Follower`. Making one starts it."""

    def __init__(self, session: Session) -> None:
        config = session.config
        self._session = session
        self._page = Page((rank(),))
        self._warned: set[str] = set()
        self._forked = False
        self._finished = False
        self.server = self._listen(config) if config.metrics_port is not None else None
        self._file = own_file(config.metrics_file)
        self._push = push_url(config.metrics_push, config.metrics_job) if config.metrics_push is not None else None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ooc-metrics", daemon=True)
        if self.server is not None or self._file is not None or self._push is not None:
            self._thread.start()
        else:
            self._loop.close()

    def _listen(self, config: Config) -> Server | None:
        assert config.metrics_port is not None
        port = config.metrics_port + (local_rank() or 0 if config.metrics_port != 0 else 0)
        try:
            tls = server_tls(config.metrics_cert, config.metrics_key) if config.metrics_cert is not None else None
            server = Server(config.metrics_address, port, self.page, tls)
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

    def page(self, snapshot: Snapshot | None = None) -> bytes:
        """As it is now, or of a snapshot."""
        return self._page.text(figures(self._session, snapshot)).encode()

    # --- swapd.session.Follower ---

    def finish(self, last: Snapshot) -> None:
        """Writes and pushes the last figures, and ends."""
        if self._finished:
            return
        self._finished = True
        self._give_last(last, stop=True)
        if self._thread.is_alive() and not self._forked:
            self._thread.join(_END_SECONDS)

    def program_ends(self, last: Snapshot) -> None:
        """Writes and pushes the last figures."""
        if not self._finished:
            self._give_last(last, stop=False)

    def in_child(self) -> None:
        """The copy serves, writes and pushes nothing."""
        self._forked = True
        if self.server is not None:
            self.server.close_in_child()

    def _give_last(self, last: Snapshot, *, stop: bool) -> None:
        if self._forked or not self._thread.is_alive():
            return
        done = asyncio.run_coroutine_threadsafe(self._last(last, stop), self._loop)
        try:
            done.result(_END_SECONDS)
        except Exception as error:  # a timeout too
            self._warn("end", "the last metrics were not written or pushed in time: %r", error)

    # --- In the thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        tasks = []
        if self.server is not None:
            tasks.append(asyncio.ensure_future(self.server.run()))
        if self._file is not None and not is_stream(self._file):
            tasks.append(asyncio.ensure_future(self._write_often()))
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_often(self) -> None:
        while True:
            self._write()
            await asyncio.sleep(self._session.config.metrics_interval)

    async def _last(self, last: Snapshot, stop: bool) -> None:
        try:
            self._write(last)
            if self._push is not None:
                self._push_page(self._push, last)
        finally:
            if stop:
                self._stop.set()

    def _write(self, snapshot: Snapshot | None = None) -> None:
        if self._file is None:
            return
        try:
            write_whole(self._file, self.page(snapshot))
        except OSError as error:
            self._warn("file", "cannot write the metrics to %s: %s", self._file, error)

    def _push_page(self, url: str, snapshot: Snapshot) -> None:
        request = urllib.request.Request(url, self.page(snapshot), {"Content-Type": CONTENT_TYPE}, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=_PUSH_SECONDS):
                pass
        except (OSError, ValueError) as error:
            self._warn("push", "the metrics were not pushed to %s: %s", url, error)

    def _warn(self, kind: str, message: str, *arguments: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *arguments)


def push_url(gateway: str, job: str) -> str:
    """Where this process's figures are kept at a pushgateway: one group for each rank of a job on a host."""
    parts = {"job": job, "instance": socket.gethostname() or "localhost", "rank": rank()}
    quoted = (f"{name}/{urllib.parse.quote(part, safe='')}" for name, part in parts.items())
    return f"{gateway}/metrics/" + "/".join(quoted)
