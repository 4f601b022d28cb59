"""Scrapers that mean harm, or many of them, while PyTorch trains: the training is what it is without any."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metrics_programs import HANG_SECONDS, samples, value
from processes import EMULATED, code, environment, run, write_script

from ooc.prometheus.server import MOST_CONNECTIONS

# Trains until the file `over` is there (and `LEAST` steps at least), or as many steps as it is told. Says what came out
# of each step, and the most threads and files that it had.
TRAINING = """
    import hashlib, json, os, sys
    import torch
    import torch.nn.functional as F
    from torch import nn

    def descend():  # an optimizer imports much
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None

    folder, wanted = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    x = torch.randn(256, 512)
    losses, threads, files = [], 0, 0
    while len(losses) < wanted or (wanted == 0 and not (len(losses) > 5 and os.path.exists(folder + "/over"))):
        loss = F.mse_loss(model(x), x)
        loss.backward()
        descend()
        losses.append(loss.item().hex())
        threads = max(threads, len(os.listdir("/proc/self/task")))
        files = max(files, len(os.listdir("/proc/self/fd")))
        if len(losses) == 2 and wanted == 0:
            from ooc.prometheus.exporting import served_at
            print(served_at(), flush=True)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(json.dumps([losses, digest.hexdigest(), threads, files]))
"""
BUDGET = str(10 << 20)  # less than it needs
GOOD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
MALFORMED = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /metrics HTTP/9\r\n\r\n",
    b"\x00\xff" * 3000 + b"\r\n\r\n",
    b"GET /" + b"a" * 1_000_000,
    b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n",
    b"PUT /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 400,
)


def command(folder: Path, steps: int) -> list[str]:
    return [sys.executable, str(write_script(folder, TRAINING)), str(folder), str(steps)]


@contextlib.contextmanager
def training(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, and the port where it is scraped."""
    variables = {**EMULATED, "OOC_BUDGET": BUDGET, "OOC_METRICS_PORT": "0", "OOC_SUMMARY": str(folder / "summary.json")}
    pipe = subprocess.PIPE
    running = subprocess.Popen(command(folder, 0), env=environment(variables), stdout=pipe, stderr=pipe, text=True)
    try:
        assert running.stdout is not None
        address = running.stdout.readline()
        assert address.startswith("http://127.0.0.1:"), (address, running.communicate())
        yield running, int(address.rsplit(":", 1)[1].split("/")[0])
    finally:
        running.kill()
        running.communicate()


def expect_as_without(folder: Path, running: subprocess.Popen[str]) -> None:
    """It ends by itself; losses and parameters are those of plain memory; threads and files stay in bounds."""
    (folder / "over").touch()
    output, errors = running.communicate(timeout=HANG_SECONDS)
    assert running.returncode == 0, errors
    assert errors == ""
    losses, digest, threads, files = json.loads(output)
    reference = run(command(folder, len(losses))[1:], {"OOC_ALLOC": "0"}).check()
    plain_losses, plain_digest, plain_threads, plain_files = json.loads(reference.output)
    assert (losses, digest) == (plain_losses, plain_digest)
    ours = 1 + 2 + 2  # the server's; the daemon's; two streams of the emulated device
    assert threads <= plain_threads + ours
    others = 20  # a listener, the emulated device's memory, connections that were just cut off
    assert files <= plain_files + MOST_CONNECTIONS + others
    assert json.loads((folder / "summary.json").read_text())["swap_in_bytes"] > 0


async def scrape(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GOOD)
    answer = await reader.read()
    writer.close()
    return answer


async def scrape_at_once(port: int, count: int) -> list[bytes]:
    return await asyncio.wait_for(asyncio.gather(*(scrape(port) for _ in range(count))), HANG_SECONDS)


def functions_of(answer: bytes) -> float:
    head, _, page = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK"), answer[:300]
    return value(samples(page.decode()), "functions_total")


@pytest.mark.slow
def test_a_thousand_scrapes_at_once(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    try:
        with training(tmp_path) as (running, port):
            answers = asyncio.run(scrape_at_once(port, 1000))
            assert len(answers) == 1000
            counts = [functions_of(answer) for answer in answers]
            later = functions_of(asyncio.run(scrape(port)))
            assert min(counts) > 0 and max(counts) <= later
            expect_as_without(tmp_path, running)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.medium
def test_scrapers_that_hang(tmp_path: Path) -> None:
    """Some send nothing, some half a request, some never read: more of them than there are places."""
    with training(tmp_path) as (running, port), contextlib.ExitStack() as stack:
        for place in range(MOST_CONNECTIONS + 10):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS))
            one.sendall((b"", GOOD[:10], GOOD)[place % 3])
        assert functions_of(asyncio.run(asyncio.wait_for(scrape(port), HANG_SECONDS))) > 0
        expect_as_without(tmp_path, running)  # while all of them are still open here


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    with served_page() as port:
        yield port


@pytest.mark.parametrize("request_bytes", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_get_no_page(page_port: int, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", page_port), timeout=HANG_SECONDS) as one:
        with contextlib.suppress(OSError):  # cut off in the middle
            one.sendall(request_bytes)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := one.recv(1 << 16):
                answer += part
        assert b"ooc_" not in answer and b" 200 " not in answer
        assert functions_of(asyncio.run(scrape(page_port))) > 0


@contextlib.contextmanager
def served_page() -> Iterator[int]:
    """The page of a program that waits."""
    program = """
import sys
import ooc.numpy as ooc
from ooc.prometheus.exporting import served_at
device = ooc.Device(budget="1MiB", chunk_size="64KiB", metrics_port=0)
device.zeros(100)
print(served_at(), flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    running: subprocess.Popen[Any] = subprocess.Popen(
        [sys.executable, "-c", program], env=environment({}), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert running.stdout is not None
        yield int(running.stdout.readline().rsplit(":", 1)[1].split("/")[0])
        assert running.communicate("", timeout=HANG_SECONDS) == ("", "")
        assert running.returncode == 0
    finally:
        running.kill()
        running.communicate()


@pytest.mark.slow
def test_everything_malformed_while_it_trains(tmp_path: Path) -> None:
    with training(tmp_path) as (running, port):
        for _ in range(10):
            for request_bytes in MALFORMED:
                one = socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)
                with one, contextlib.suppress(OSError):
                    one.sendall(request_bytes)
        assert functions_of(asyncio.run(scrape(port))) > 0
        expect_as_without(tmp_path, running)


@pytest.mark.medium
def test_logging_is_one_line_at_activation_and_one_at_the_end(tmp_path: Path) -> None:
    """Quiet unless asked for."""
    program = """
        import sys
        if len(sys.argv) > 1:
            import logging
            logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
            logging.getLogger("ooc").setLevel(sys.argv[1])
        import torch
        from torch import nn
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            model(torch.randn(256, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    script = write_script(tmp_path, code(program))
    quiet = run([script], {**EMULATED, "OOC_BUDGET": BUDGET}).check()
    assert quiet.output == quiet.errors == ""
    # The line at activation needs an interpreter of its own; what is asked for at INFO is among what is at DEBUG.
    asked = run(["-s", script, "DEBUG"], {**EMULATED, "OOC_BUDGET": BUDGET}).check()
    lines = asked.errors.splitlines()
    first, last = (line for line in lines if " INFO " in line)
    assert first.startswith("ooc.swapd INFO active on emulated, budget 10485760 bytes")
    assert last.startswith("ooc.swapd INFO ended after 4 steps: ")
    assert asked.output == "" and len(lines) > 2 and all(line.startswith("ooc.") for line in lines)
