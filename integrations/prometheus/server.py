"""A small HTTP server for scrapes, in the exporter's one thread. Nothing that a client does holds up the program.

    GET /metrics -> the page; every connection is for one request

Bounds: MOST_CONNECTIONS at a time, the others wait in the system's queue (and take none of the program's file
descriptors); HEAD_BYTES of a request; SECONDS from accepting a connection to its end, whatever the client does or does
not. Requests that come in while a page is being made share the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from integrations.prometheus.page import CONTENT_TYPE

log = logging.getLogger("ooc.prometheus")

MOST_CONNECTIONS = 32
HEAD_BYTES = 8192
SECONDS = 5.0
_QUEUE = 4096  # connections that the system keeps waiting; it may allow fewer
_PAUSE_SECONDS = 0.5  # after the system refused a connection (no file descriptor left)


class Server:
    """Serves what `page` returns. Made in any thread, run in one event loop.

    Args:
        address: numeric, IPv4 or IPv6.
        port: 0 for any free one.
        page: called in the loop's thread for each scrape; it must be quick and may raise (then the client gets a 500).
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
            self._listener.bind((address, port))
            self._listener.listen(_QUEUE)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if tls is not None else ''}://{host}:{self.port}/metrics"
        self._connections: set[socket.socket] = set()
        self._next_page: asyncio.Future[bytes] | None = None

    async def run(self) -> None:
        """Accepts connections until it is cancelled."""
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(MOST_CONNECTIONS)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await room.acquire()
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    room.release()
                    if error.errno in (errno.EBADF, errno.EINVAL):
                        return  # closed
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                self._connections.add(connection)
                task = loop.create_task(self._serve(connection))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: room.release())
        finally:
            self._listener.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close_in_child(self) -> None:
        """In a forked copy: gives up the sockets, so that clients see the end of the parent as what it is."""
        for one in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                one.close()

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await asyncio.wait_for(self._exchange(connection), SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError) as error:  # EOFError: the request was not whole
            log.debug("a scrape was dropped: %r", error)
        except Exception:
            log.debug("a scrape failed", exc_info=True)
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _exchange(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            writer.write(await self._answer(reader))
            writer.close()
            await writer.wait_closed()
        finally:
            transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(431, f"a request of more than {HEAD_BYTES} bytes\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response(400, "this is no request of HTTP/1.1\n")
        method, target, _ = words
        if method not in (b"GET", b"HEAD"):
            return _response(405, "GET it\n", "Allow: GET, HEAD\r\n")
        if target.split(b"?", 1)[0] != b"/metrics":
            return _response(404, "the metrics are at /metrics\n")
        try:
            page = await self._shared_page()
        except Exception:
            log.debug("the page of metrics could not be made", exc_info=True)
            return _response(500, "the metrics could not be read; the log of the program says more at level DEBUG\n")
        return _response(200, page, content_type=CONTENT_TYPE, body=method == b"GET")

    async def _shared_page(self) -> bytes:
        """Made after the request came in, once for all requests that came in by then."""
        if self._next_page is None:
            loop = asyncio.get_running_loop()
            self._next_page = loop.create_future()
            loop.call_soon(self._make_page, self._next_page)
        return await asyncio.shield(self._next_page)

    def _make_page(self, page: asyncio.Future[bytes]) -> None:
        self._next_page = None
        try:
            page.set_result(self._page())
        except Exception as error:
            page.set_exception(error)


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}


def _response(
    status: int,
    content: str | bytes,
    more: str = "",
    *,
    content_type: str = "text/plain; charset=utf-8",
    body: bool = True,
) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (data if body else b"")
