"""A small HTTP server for scrapes, in the exporter's one thread. Nothing that a client does holds up the program.

    GET /metrics -> the page; every connection is for one request

Bounds: MOST_CONNECTIONS at a time, the others wait in the system's queue (and take none of the program's file
descriptors); HEAD_BYTES of a request; SECONDS from accepting a connection to its end, whatever the client does or does
not. Whoever sends nothing is left in the queue by the system, which hands out those behind it. While one of them waits
the oldest connection gives way as soon as it had GRACE_SECONDS: a scrape takes a millisecond, so whoever is still there
holds a place. Requests that come in while others wait for a page share it.

It is written on the event loop's readers and writers, not on its streams: a scrape then takes a third of the
processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from ooc.prometheus.page import CONTENT_TYPE

log = logging.getLogger("ooc.prometheus")

MOST_CONNECTIONS = 32
HEAD_BYTES = 8192
SECONDS = 5.0
GRACE_SECONDS = 0.1
_SILENT_SECONDS = 3  # that the system keeps whoever sends nothing to itself
_LINGER_BYTES = 1 << 20  # of a refused request that are read, so that its client gets to read the answer
_QUEUE = 4096  # connections that the system keeps waiting; it may allow fewer
_PAUSE_SECONDS = 0.5  # after the system refused a connection (no file descriptor left)


class Server:
    """Serves what `page` returns. Made in any thread, run in one event loop.

    Args:
        address: numeric, IPv4 or IPv6.
        port: 0 for any free one.
        page: called in the loop's thread for scrapes; it must be quick and may raise (then the client gets a 500).
        tls: None serves plain HTTP.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, address: str, port: int, page: Callable[[], bytes], tls: ssl.SSLContext | None = None) -> None:
        self._page = page
        self._tls = tls
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
            self._listener.bind((address, port))
            self._listener.listen(_QUEUE)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if tls is not None else ''}://{host}:{self.port}/metrics"
        self.connections: dict[_Connection, None] = {}  # the oldest first
        self._room: asyncio.TimerHandle | None = None  # while somebody waits for it
        self._waiting: list[_Connection] = []  # for a page

    async def run(self) -> None:
        """Serves until it is cancelled."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)
        try:
            await self._loop.create_future()  # for ever
        finally:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            for connection in list(self.connections):
                connection.close()

    def close_in_child(self) -> None:
        """In a forked copy: gives up the sockets, so that clients see the end of the parent as what it is."""
        for one in (self._listener, *(connection.socket for connection in self.connections)):
            with contextlib.suppress(OSError):
                one.close()

    def _accept(self) -> None:
        """Somebody waits: in they come, while there is room."""
        if len(self.connections) == MOST_CONNECTIONS:
            self._loop.remove_reader(self._listener)  # until one of them ends, or gives way
            self._make_room_later()
        while len(self.connections) < MOST_CONNECTIONS:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._loop.remove_reader(self._listener)  # or it would be ready again at once
                    self._loop.call_later(_PAUSE_SECONDS, self._listen_again)
                return  # or the client is gone already
            accepted.setblocking(False)
            if self._tls is not None:
                try:
                    accepted = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
                except OSError:
                    accepted.close()
                    continue
            connection = _Connection(self, self._loop, accepted)
            self.connections[connection] = None
            connection.read()

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def closed(self, connection: _Connection) -> None:
        """A connection has ended."""
        if len(self.connections) == MOST_CONNECTIONS:
            if self._room is not None:
                self._room.cancel()
                self._room = None
            self._listen_again()
        del self.connections[connection]

    def _make_room_later(self) -> None:
        oldest = next(iter(self.connections))
        # Not now: what has come in from it meanwhile is looked at first.
        self._room = self._loop.call_at(max(oldest.began + GRACE_SECONDS, self._loop.time()), oldest.close)

    def want_page(self, connection: _Connection) -> None:
        """Answers soon, together with whoever else asks until then."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._answer_waiting)

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            answer = _response(200, self._page(), content_type=CONTENT_TYPE)
        except Exception:
            log.debug("the page of metrics could not be made", exc_info=True)
            answer = _response(500, b"the metrics could not be read; the program's log says more at level DEBUG\n")
        for connection in waiting:
            connection.answer(answer)


class _Connection:
    """One client. Reads a request, writes an answer, ends."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
        self.socket = accepted
        self._server = server
        self._loop = loop
        self._head = b""
        self._left = memoryview(b"")  # of the answer
        self._without_body = False
        self._lingers = 0  # bytes that may still come, once refused
        self.began = loop.time()
        self._timer = loop.call_later(SECONDS, self.close)
        self._registered = False  # for reading

    def read(self) -> None:
        """As much as is there."""
        try:
            part = self.socket.recv(HEAD_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._wait_to_read()
            return
        except ssl.SSLWantWriteError:  # amid a handshake
            self._loop.add_writer(self.socket, self._write_for_reading)
            return
        except OSError:
            self.close()
            return
        if not part:  # the client went away
            self.close()
        elif self._lingers:
            self._lingers -= len(part)
            if self._lingers <= 0:
                self.close()
        else:
            self._head += part
            self._look()

    def _wait_to_read(self) -> None:
        if not self._registered:
            self._registered = True
            self._loop.add_reader(self.socket, self.read)

    def _write_for_reading(self) -> None:
        self._loop.remove_writer(self.socket)
        self.read()

    def _look(self) -> None:
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if len(head) > HEAD_BYTES:
            self._refuse(431, f"a request of more than {HEAD_BYTES} bytes\n")
        elif end:
            self._stop_reading()
            self._ask(head)
        else:
            self._wait_to_read()

    def _ask(self, head: bytes) -> None:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            self._refuse(400, "this is no request of HTTP/1.1\n")
        elif words[0] not in (b"GET", b"HEAD"):
            self._refuse(405, "GET it\n", "Allow: GET, HEAD\r\n")
        elif words[1].split(b"?", 1)[0] != b"/metrics":
            self._refuse(404, "the metrics are at /metrics\n")
        else:
            self._without_body = words[0] == b"HEAD"
            self._server.want_page(self)

    def _refuse(self, status: int, text: str, more: str = "") -> None:
        self._lingers = _LINGER_BYTES
        self.answer(_response(status, text.encode(), more))

    def answer(self, answer: bytes) -> None:
        """Writes it, and ends."""
        if self.socket.fileno() < 0:  # closed meanwhile
            return
        if self._without_body:
            answer = answer[: answer.index(b"\r\n\r\n") + 4]
        self._left = memoryview(answer)
        self._write()

    def _write(self) -> None:
        self._loop.remove_writer(self.socket)
        try:
            while self._left:
                self._left = self._left[self.socket.send(self._left) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            self._loop.add_writer(self.socket, self._write)
        except (OSError, ValueError):  # ValueError: a session of TLS that is over
            self.close()
        else:
            self._written()

    def _written(self) -> None:
        if not self._lingers:
            self.close()
            return
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._wait_to_read()

    def _stop_reading(self) -> None:
        if self._registered:
            self._registered = False
            self._loop.remove_reader(self.socket)

    def close(self) -> None:
        """Now."""
        if self.socket.fileno() < 0:
            return
        self._timer.cancel()
        self._stop_reading()
        self._loop.remove_writer(self.socket)
        self.socket.close()
        self._server.closed(self)


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def _response(status: int, content: bytes, more: str = "", *, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + content
