"""The server that is scraped: prometheus_client answers, and what clients may take of the program is bounded here.

`prometheus_client.start_http_server` would give every client a thread for as long as the client likes, and print
tracebacks. It also does the TLS handshake in the one thread that accepts, where a silent client keeps all others out.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import select
import socket
import ssl
import threading
import time
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger("ooc.prometheus")

MOST_CONNECTIONS = 32
SECONDS = 5.0  # for which a thread waits for its client
GRACE_SECONDS = 0.2
_SILENT_SECONDS = 3  # for which the system does not show us a client that sends nothing
_PAUSE_SECONDS = 0.1  # after the system refused a connection


class _Debug(io.TextIOBase):
    """Writes to the log what wsgiref writes to standard error."""

    def write(self, text: str) -> int:
        log.debug("%s", text.rstrip())
        return len(text)


class _Handler(WSGIRequestHandler):
    """One client, in a thread of its own."""

    timeout = SECONDS
    server: Server

    def parse_request(self) -> bool:
        """Reads the rest of the request, and tells the server that the request is complete."""
        complete = super().parse_request()
        self.server.asked(self.connection)
        return complete

    def get_stderr(self) -> io.TextIOBase:
        """Where wsgiref explains why a page could not be made or written."""
        return _Debug()

    def log_message(self, *_: Any) -> None:
        """Writes nothing: what clients do is not worth a line on the program's standard error."""


def _one_at_a_time(application: WSGIApplication) -> WSGIApplication:
    """Makes clients wait for each other, as many at once would leave the program little of Python's global lock."""
    lock = threading.Lock()

    def locked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with lock:
            return application(environ, start_response)

    return locked


class Server(ThreadingMixIn, WSGIServer):
    """Serves what a collector collects, in threads of its own, from when it is made until `stop`.

    Every connection is for one request and has a thread. At most MOST_CONNECTIONS are open at a time, and the others
    wait in the system's queue. While one waits there, the oldest client whose request is not complete is cut off once
    it has had GRACE_SECONDS to complete it: a scrape takes milliseconds, so such a client only holds a place.

    Args:
        address: numeric, IPv4 or IPv6.
        port: 0 for any free one.
        collector: asked in the threads of clients; if it raises, the client gets a 500.
        tls: None serves plain HTTP.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    daemon_threads = True
    request_queue_size = 4096  # the system may allow fewer

    def __init__(self, address: str, port: int, collector: Collector, tls: ssl.SSLContext | None = None) -> None:
        self._changed = threading.Condition()
        self._open: dict[Any, float] = {}  # each connection -> when its time for the request is over
        self._ended = False
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        if tls is not None:  # the handshake happens in the client's thread, when it reads
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        registry = CollectorRegistry()
        registry.register(collector)
        self.set_app(_one_at_a_time(make_wsgi_app(registry)))
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if tls is not None else ''}://{host}:{self.server_port}/metrics"
        threading.Thread(target=self.serve_forever, name="ooc-metrics", daemon=True).start()

    def stop(self) -> None:
        """Closes every connection and the port. Waits for the thread that accepts, not for those of clients."""
        with self._changed:
            self._ended = True
            for request in list(self._open):
                self._cut_off(request)
            self._changed.notify()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self.shutdown()
        self.server_close()

    def close_in_child(self) -> None:
        """Closes the sockets of a forked child, so that clients of the parent notice when the parent ends."""
        for one in (self.socket, *self._open):  # without the lock: a thread of the parent may have held it
            with contextlib.suppress(OSError):
                one.close()

    def server_bind(self) -> None:
        """Binds without asking a name server, for which the program would wait."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError:  # no file descriptor is left, or the client is gone: the caller tries again at once
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a connection as soon as there is a place."""
        with self._changed:
            while len(self._open) >= MOST_CONNECTIONS and not self._ended:
                oldest = min(self._open, key=self._open.__getitem__)
                left = self._open[oldest] - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, SECONDS))
                elif _sent_more(oldest):  # its thread has had no time to read that
                    self._open[oldest] = time.monotonic() + GRACE_SECONDS
                else:
                    self._cut_off(oldest)
            if self._ended:
                self.shutdown_request(request)
                return
            self._open[request] = time.monotonic() + GRACE_SECONDS
        super().process_request(request, client_address)

    def asked(self, request: Any) -> None:
        """Notes that a request is complete, so that its client is no longer cut off."""
        with self._changed:
            if request in self._open:
                self._open[request] = math.inf

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs that a client went away, spoke no TLS, or was cut off."""
        log.debug("a scrape ended early", exc_info=True)

    def _cut_off(self, request: Any) -> None:
        """Shuts a connection down, so that its thread wakes and ends. Its place is free from now on."""
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _sent_more(request: socket.socket) -> bool:
    poll = select.poll()
    poll.register(request, select.POLLIN)
    return poll.poll(0) != []
