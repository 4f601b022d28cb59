"""The server that is scraped: one thread for all clients. prometheus_client and wsgiref make the answers.

`prometheus_client.start_http_server` would give every client a thread for as long as the client likes, and print
tracebacks. It also does the TLS handshake in the one thread that accepts, where a silent client keeps all others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import socket
import ssl
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

log = logging.getLogger("ooc.prometheus")

MOST_CONNECTIONS = 32
SECONDS = 5.0  # that a connection may last
GRACE_SECONDS = 0.2  # that others wait for a place
_QUEUE = 4096  # connections that wait in the system; it may allow fewer
_SILENT_SECONDS = 3  # for which the system does not show us a client that sends nothing
_ROUNDS = 10  # of the event loop, from accepting to closing a connection, and some more
_PAUSE_SECONDS = 0.1  # after the system refused a connection


class _Debug(io.TextIOBase):
    """Writes to the log what wsgiref writes to standard error."""

    def write(self, text: str) -> int:
        log.debug("%s", text.rstrip())
        return len(text)


class _Exchange(WSGIRequestHandler):
    """A request and its answer, both in memory."""

    wfile: io.BytesIO

    def setup(self) -> None:
        self.rfile, self.wfile = io.BytesIO(self.request), io.BytesIO()

    def finish(self) -> None:
        """Leaves the answer in `wfile`."""

    def get_stderr(self) -> io.TextIOBase:
        return _Debug()

    def log_message(self, *_: Any) -> None:
        """Writes nothing: what clients do is not worth a line on the program's standard error."""


class Server:
    """Serves what a collector collects, one request of each connection, from when it is made until `stop`.

    At most MOST_CONNECTIONS are open at a time, and the others wait in the system's queue. If one waits there and none
    ends in GRACE_SECONDS, all that are open are cut off: a scrape takes milliseconds, so they only hold places.

    Args:
        address: numeric, IPv4 or IPv6.
        port: 0 for any free one.
        collector: asked in the server's thread; if it raises, the client gets a 500.
        tls: None serves plain HTTP.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, address: str, port: int, collector: Collector, tls: ssl.SSLContext | None = None) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        application = make_wsgi_app(registry)
        self.get_app = lambda: application  # this and the next are for wsgiref
        self.base_environ: dict[str, str] = {}
        self._tls = tls
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=_QUEUE)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
        self._listener.setblocking(False)
        self.server_port: int = self._listener.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if tls is not None else ''}://{host}:{self.server_port}/metrics"
        self._open: dict[asyncio.Task[None], socket.socket] = {}
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(lambda _, context: log.debug("a scrape ended early: %s", context))
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name="ooc-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes every connection and the port."""
        with contextlib.suppress(RuntimeError):  # it was stopped before
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join(SECONDS)

    def close_in_child(self) -> None:
        """Closes the sockets of a forked child, so that clients of the parent notice when the parent ends."""
        for one in (self._listener, *self._open.values()):
            with contextlib.suppress(OSError):
                one.close()

    # --- In the thread ---

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        self._loop.close()

    async def _accept(self) -> None:
        try:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except OSError:  # no file descriptor is left, or the client is gone
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                await self._make_room()
                client = self._loop.create_task(self._serve(connection))
                self._open[client] = connection
                client.add_done_callback(self._open.pop)
                self._loop.call_later(SECONDS, client.cancel)
        finally:
            self._listener.close()
            self._cut_off()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _make_room(self) -> None:
        while len(self._open) >= MOST_CONNECTIONS:
            ended, _ = await asyncio.wait(self._open, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                for _ in range(_ROUNDS):  # what was sent while the program was busy is read and answered first
                    await asyncio.sleep(0)
                if len(self._open) >= MOST_CONNECTIONS:
                    self._cut_off()

    def _cut_off(self) -> None:
        for client in self._open:
            client.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._exchange(connection)
        except Exception:
            log.debug("a scrape ended early", exc_info=True)

    async def _exchange(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            writer.write(_Exchange(request, ("", 0), self).wfile.getvalue())  # type: ignore[arg-type]
            writer.close()
            await writer.wait_closed()
        finally:
            transport.abort()
