"""The server of scrapes by itself: what it answers, what it refuses and survives, and that it stays within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import resource
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from ooc.prometheus import server as module
from ooc.prometheus.server import MOST_CONNECTIONS, Server
from swapd.config import server_tls

LINES = 200  # as many as the real page has, or so
PAGE = b"# HELP ooc_x x\n# TYPE ooc_x gauge\n" + b"".join(b'ooc_x{n="%d"} 1.0\n' % n for n in range(LINES))
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
MOST_THREADS = 1  # the server's
HANG_SECONDS = 60.0  # of a test that found something that hangs
TLS = Path(__file__).with_name("tls")


class Running:
    """A server, and what it was seen to do."""

    def __init__(self, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1") -> None:
        self.broken = False
        self.may_collect = threading.Event()
        self.may_collect.set()
        self.threads_before = threading.active_count()
        self.most_threads = 0
        self.server = Server(address, 0, self, tls)
        self.port = self.server.server_port

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        if self.broken:
            raise RuntimeError("on purpose")
        self.may_collect.wait(HANG_SECONDS)
        self.most_threads = max(self.most_threads, threading.active_count() - self.threads_before)
        family = GaugeMetricFamily("ooc_x", "x", labels=["n"])
        for n in range(LINES):
            family.add_metric([str(n)], 1)
        return [family]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=HANG_SECONDS)

    def ask(self, request: bytes = GET) -> bytes:
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
def running(capfd: pytest.CaptureFixture[str]) -> Iterator[Running]:
    """Nothing that happens to it is said on the program's standard error, and no thread outlives it."""
    one = Running()
    yield one
    one.server.stop()
    until = time.monotonic() + HANG_SECONDS
    while threading.active_count() > one.threads_before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= one.threads_before
    assert capfd.readouterr() == ("", "")


def test_a_scrape(running: Running) -> None:
    with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.read() == PAGE
    assert running.server.url == f"http://127.0.0.1:{running.port}/metrics"


def test_a_scrape_as_prometheus_asks_for_it(running: Running) -> None:
    wanted = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "Accept-Encoding": "gzip"}
    request = urllib.request.Request(running.server.url, headers=wanted)
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert gzip.decompress(answer.read()).endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (GET, 200),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics?x=y HTTP/1.1\r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
    ],
)
def test_answers(running: Running, request_text: bytes, status: int) -> None:
    head, _, body = running.ask(request_text).partition(b"\r\n\r\n")
    assert b" %d " % status in head[:20]
    assert (body == PAGE) == (status == 200)
    assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"  # so that half a page is noticed


@pytest.mark.parametrize(
    "request_text",
    [
        b"\r\n\r\n",
        b"GET /metrics HTTP/x\r\n\r\n",
        b"GET /metrics HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x00\xff\xfe\x00 \x00 \x00\r\n\r\n",  # TLS where none is spoken
        b"GET /" + b"a" * (1 << 17) + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"b" * (1 << 17) + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    ],
    ids=range(7),
)
def test_what_is_no_request_gets_no_page_and_does_no_harm(running: Running, request_text: bytes) -> None:
    assert b"ooc_x" not in running.ask(request_text)
    assert running.ask().endswith(PAGE)


def test_a_client_that_sends_without_end_is_cut_off(running: Running) -> None:
    with running.connect() as connection, contextlib.suppress(OSError):
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)
        pytest.fail("100 MB were taken")
    assert running.ask().endswith(PAGE)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTT", b"\x16\x03\x01\x02\x00\x01", GET], ids=range(4))
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_200_who_hold_connections_open_keep_nobody_waiting(tls: bool, sent: bytes) -> None:
    """Without sending, amid a request, amid the handshake of TLS, and without reading."""
    running = Running(server_tls(TLS / "certificate.pem", TLS / "key.pem") if tls else None)
    trusting = ssl.create_default_context(cafile=TLS / "certificate.pem") if tls else None
    with contextlib.ExitStack() as stack:
        stack.callback(running.server.stop)
        for _ in range(200):
            stack.enter_context(running.connect()).sendall(sent)
        for _ in range(3):
            began = time.monotonic()
            with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS, context=trusting) as answer:
                assert answer.read() == PAGE
            assert time.monotonic() - began < 5  # in fact, about (200 - 32) / 32 times GRACE_SECONDS
        assert running.most_threads <= MOST_THREADS


def test_who_is_alone_is_waited_for(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away while there is room, however slow."""
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    slow = [running.connect() for _ in range(MOST_CONNECTIONS - 1)]
    for connection in slow:
        connection.sendall(b"GET /metrics ")
    assert running.ask().endswith(PAGE)
    for connection in slow:
        connection.sendall(b"HTTP/1.1\r\n\r\n")
        assert read_all(connection).endswith(PAGE)
        connection.close()


def test_whose_request_the_program_had_no_time_to_read_is_not_cut_off(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 1.0)
    asking = [running.connect() for _ in range(MOST_CONNECTIONS + 1)]
    running.server._loop.call_soon_threadsafe(time.sleep, 2.5)
    time.sleep(0.1)  # all are accepted, or wait for a place
    for connection in asking:
        connection.sendall(GET)
    for connection in asking:
        assert read_all(connection).endswith(PAGE)
        connection.close()


def test_who_waits_for_a_page_is_not_cut_off(running: Running) -> None:
    running.may_collect.clear()
    asking = [running.connect() for _ in range(MOST_CONNECTIONS + 1)]
    for connection in asking:
        connection.sendall(GET)
    time.sleep(1)
    running.may_collect.set()
    for connection in asking:
        assert read_all(connection).endswith(PAGE)
        connection.close()


def test_who_sends_nothing_more_is_dropped(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(b"GET /metrics HTT")
        connection.settimeout(4 * module.SECONDS)
        assert read_all(connection) == b""


def test_a_thousand_scrapes_at_once(running: Running) -> None:
    """All are answered, with few connections open."""
    count = 1000

    async def scrape() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(GET)
        answer = await reader.read()
        writer.close()
        return answer

    async def scrape_all() -> list[bytes]:
        return await asyncio.wait_for(asyncio.gather(*(scrape() for _ in range(count))), 2 * HANG_SECONDS)

    with enough_files(count + 200):
        answers = asyncio.run(scrape_all())
    assert all(answer.endswith(PAGE) for answer in answers)
    assert running.most_threads <= MOST_THREADS


@contextlib.contextmanager
def enough_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_page_that_cannot_be_made_is_an_error_of_the_scrape(running: Running) -> None:
    running.broken = True
    assert b" 500 " in running.ask()[:30]
    running.broken = False
    assert b" 200 " in running.ask()[:30]


def test_no_file_descriptor_left_is_a_pause(running: Running) -> None:
    with contextlib.ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        connection = stack.enter_context(socket.socket())
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        connection.connect(("127.0.0.1", running.port))
        connection.sendall(GET)
        began = time.process_time()
        time.sleep(1)
        assert time.process_time() - began < 0.1
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.settimeout(HANG_SECONDS)
        assert read_all(connection).endswith(PAGE)


def test_tls() -> None:
    running = Running(server_tls(TLS / "certificate.pem", TLS / "key.pem"))
    trusting = ssl.create_default_context(cafile=TLS / "certificate.pem")
    try:
        assert running.server.url.startswith("https://")
        for _ in range(2):
            with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS, context=trusting) as answer:
                assert answer.read() == PAGE
            assert PAGE not in running.ask()  # without TLS: no page, and no harm
    finally:
        running.server.stop()


def test_ipv6() -> None:
    try:
        running = Running(address="::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with urllib.request.urlopen(running.server.url, timeout=HANG_SECONDS) as answer:
        assert answer.read() == PAGE
    assert running.server.url.startswith("http://[::1]:")
    running.server.stop()


def test_a_taken_port_is_an_error(running: Running) -> None:
    with pytest.raises(OSError, match="in use"):
        Server("127.0.0.1", running.port, running)


def test_stopping_ends_every_connection_at_once(running: Running) -> None:
    open_ones = [running.connect() for _ in range(MOST_CONNECTIONS + 10)]
    for connection in open_ones:
        connection.sendall(b"GET ")
    assert running.ask().endswith(PAGE)  # so the first ones were accepted
    began = time.monotonic()
    running.server.stop()
    for connection in open_ones:
        assert read_all(connection) == b""
        connection.close()
    assert time.monotonic() - began < module.SECONDS / 2
    with pytest.raises(ConnectionRefusedError):
        running.connect()


def test_the_end_of_a_program_does_not_wait_for_the_server() -> None:
    servers = [Running().server for _ in range(5)]
    began = time.monotonic()
    for server in servers:
        server.stop()
    assert time.monotonic() - began < 1.5  # the thread that accepts looks around every half second by itself
