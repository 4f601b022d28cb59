"""The server of scrapes by itself: what it answers, what it refuses and survives, and that it stays within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ooc.prometheus import server as module
from ooc.prometheus.server import HEAD_BYTES, MOST_CONNECTIONS, Server
from swapd.config import server_tls

PAGE = b"# HELP ooc_x x\n" + b"ooc_x 1\n" * 2000
HANG_SECONDS = 60.0  # of a test that found something that hangs
TLS = Path(__file__).with_name("tls")


class Running:
    """A server in a thread."""

    def __init__(self, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        self.pages = 0
        self.threads: set[int] = set()
        self.most_connections = 0
        self.server = Server(address, 0, self.page, tls)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.task = self.loop.create_task(self.server.run())
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.task)
        self.loop.close()

    def page(self) -> bytes:
        self.pages += 1
        self.threads.add(threading.get_ident())
        self.most_connections = max(self.most_connections, len(self.server.connections))
        return PAGE

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(HANG_SECONDS)
        assert not self.thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=HANG_SECONDS)

    def ask(self, request: bytes) -> bytes:
        """All of the answer."""
        with self.connect() as connection:
            connection.sendall(request)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture
def running() -> Iterator[Running]:
    one = Running()
    yield one
    one.stop()


def test_a_scrape(running: Running) -> None:
    with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.read() == PAGE


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics?x=y HTTP/1.1\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xff\xfe\x00 \x00 \x00\r\n\r\n", 400),  # TLS where none is spoken
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"GET /" + b"a" * 2 * HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"b" * 2 * HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * HEAD_BYTES + b"\r\n", 431),
    ],
)
def test_answers(running: Running, request_text: bytes, status: int) -> None:
    answer = running.ask(request_text)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    if not request_text.startswith(b"HEAD"):
        assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"
    assert (body == PAGE) == (status == 200 and not request_text.startswith(b"HEAD"))
    assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").endswith(PAGE)


def test_a_client_that_sends_without_end_is_cut_off(running: Running) -> None:
    with running.connect() as connection, contextlib.suppress(OSError):
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)
        pytest.fail("100 MB were taken")
    assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").endswith(PAGE)


def test_clients_that_hang_are_dropped_and_others_are_served(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)
    silent = [running.connect() for _ in range(MOST_CONNECTIONS + 5)]
    for place, connection in enumerate(silent):
        if place % 2:
            connection.sendall(b"GET /metrics HTT")
    try:
        assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").endswith(PAGE)
        for connection in silent:
            assert read_all(connection) == b""
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metrics HTT", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_who_holds_connections_open_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Not until they time out, which here they never do: without sending, amid a request, and without reading."""
    monkeypatch.setattr(module, "SECONDS", 1e6)
    monkeypatch.setattr(__name__ + ".PAGE", b"x" * (16 << 20))  # more than the system's buffers take
    running = Running()
    strangers = [running.connect() for _ in range(MOST_CONNECTIONS + 8)]
    try:
        for stranger in strangers:
            stranger.sendall(sent)
        for _ in range(3):
            assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").endswith(PAGE)
        assert running.most_connections <= MOST_CONNECTIONS
    finally:
        for stranger in strangers:
            stranger.close()
        running.stop()


def test_who_is_alone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away while there is room, however slow."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    running = Running()
    slow = [running.connect() for _ in range(MOST_CONNECTIONS - 1)]
    for connection in slow:
        connection.sendall(b"GET /metrics ")
    try:
        assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").endswith(PAGE)
        for connection in slow:
            connection.sendall(b"HTTP/1.1\r\n\r\n")
            assert read_all(connection).endswith(PAGE)
    finally:
        running.stop()


def test_a_client_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)
    monkeypatch.setattr(__name__ + ".PAGE", b"x" * (64 << 20))  # more than the system's buffers take
    running = Running()
    lazy = [running.connect() for _ in range(3)]
    try:
        for connection in lazy:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until = time.monotonic() + HANG_SECONDS
        while (running.pages == 0 or running.server.connections) and time.monotonic() < until:
            time.sleep(0.01)
        assert running.pages > 0 and not running.server.connections
        assert all(len(read_all(connection)) < 64 << 20 for connection in lazy)
    finally:
        for connection in lazy:
            connection.close()
        running.stop()


def test_a_thousand_scrapes_at_once(running: Running) -> None:
    """All are answered, in one thread, with few connections open and few pages made."""
    count = 1000

    async def scrape() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def scrape_all() -> list[bytes]:
        return await asyncio.wait_for(asyncio.gather(*(scrape() for _ in range(count))), HANG_SECONDS)

    with enough_files(count + 200):
        answers = asyncio.run(scrape_all())
    assert all(answer.endswith(PAGE) for answer in answers)
    assert len(running.threads) == 1
    assert 1 < running.most_connections <= MOST_CONNECTIONS
    assert running.pages < count


@contextlib.contextmanager
def enough_files(count: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_page_that_cannot_be_made_is_an_error_of_the_scrape(running: Running) -> None:
    def broken() -> bytes:
        raise RuntimeError("on purpose")

    running.server._page = broken
    assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500 ")
    running.server._page = running.page
    assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_tls() -> None:
    running = Running(server_tls(TLS / "certificate.pem", TLS / "key.pem"))
    try:
        trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
        with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS, context=trusting) as answer:
            assert answer.read() == PAGE
        assert running.server.url.startswith("https://")
        running.ask(b"GET /metrics HTTP/1.1\r\n\r\n")  # without TLS: no page, and no harm
        with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS, context=trusting) as answer:
            assert answer.read() == PAGE
        assert running.pages == 2
    finally:
        running.stop()


def test_ipv6() -> None:
    try:
        running = Running(address="::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS) as answer:
        assert answer.read() == PAGE
    assert running.server.url.startswith("http://[::1]:")
    running.stop()


def test_a_taken_port_is_an_error(running: Running) -> None:
    with pytest.raises(OSError, match="in use"):
        Server("127.0.0.1", running.server.port, lambda: b"")


def test_stopping_ends_every_connection(running: Running) -> None:
    open_ones = [running.connect() for _ in range(10)]
    for connection in open_ones:
        connection.sendall(b"GET ")
    assert running.ask(b"GET /metrics HTTP/1.1\r\n\r\n").endswith(PAGE)  # so they were accepted
    running.loop.call_soon_threadsafe(running.task.cancel)
    running.thread.join(HANG_SECONDS)
    assert not running.thread.is_alive()
    assert all(read_all(connection) == b"" for connection in open_ones)
    with pytest.raises(ConnectionRefusedError):
        running.connect()
    running.stop = lambda: None  # type: ignore[method-assign]
