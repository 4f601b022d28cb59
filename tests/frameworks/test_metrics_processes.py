"""Metrics where processes are killed, forked, started and launched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from metrics_programs import HANG_SECONDS, PROGRAM, Samples, free_ports, run_numpy, samples, start, value
from processes import EMULATED, code, environment, write_script


def test_kill_in_the_middle_of_a_scrape_leaves_nothing_that_hangs(tmp_path: Path) -> None:
    """Also with a forked child that lives on: it has not kept the sockets."""
    running = start(
        tmp_path,
        PROGRAM,
        """
        step()
        address = exporting.served_at()
        import socket
        half = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1].split("/")[0])))
        import urllib.request
        urllib.request.urlopen(address).read()  # so the connection before it was accepted
        child = os.fork()
        if child == 0:
            half.close()
            time.sleep(600)
        half.close()
        print(address, child, flush=True)
        while True:
            step()
        """,
        OOC_METRICS_PORT="0",
    )
    assert running.stdout is not None
    words = running.stdout.readline().split()
    assert len(words) == 2, running.communicate()
    port, child = int(words[0].rsplit(":", 1)[1].split("/")[0]), int(words[1])
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n")
            running.send_signal(signal.SIGKILL)
            running.wait(HANG_SECONDS)
            os.kill(child, 0)  # it lives
            with contextlib.suppress(ConnectionResetError):
                assert scraper.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS)
    finally:
        os.kill(child, signal.SIGKILL)
        running.communicate(timeout=HANG_SECONDS)


def test_a_forked_child_neither_serves_nor_writes(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        """
        import urllib.request
        for _ in range(4):
            step()
        page = tmp = os.environ["OOC_METRICS_FILE"]
        child = os.fork()
        if child == 0:
            assert exporting.served_at() is None
            os.remove(page)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not os.path.exists(page)
        assert b"ooc_functions_total" in urllib.request.urlopen(exporting.served_at()).read()
        """,
        OOC_METRICS_PORT="0",
        OOC_METRICS_FILE=str(tmp_path / "ooc.prom"),
        OOC_METRICS_INTERVAL="3600s",
    ).check()
    assert value(samples((tmp_path / "ooc.prom").read_text()), "functions_total") == ended.figures["functions"]


def test_a_started_child_is_not_exported(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        """
        import subprocess
        child = "import ooc.numpy as ooc; ooc.Device(); "
        child += "from ooc.prometheus.exporting import served_at; print(served_at())"
        print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True))
        """,
        OOC_METRICS_PORT=str(free_ports(1)),
    ).check()
    assert r"stdout='None\n', stderr=''" in ended.output


@pytest.mark.medium
def test_torchrun_has_a_port_and_a_file_for_each_rank(tmp_path: Path) -> None:
    """And the launcher, which imports PyTorch too, takes none of them; so it is with summaries and the like."""
    base = free_ports(2)
    script = write_script(
        tmp_path,
        code(
            f"base = {base}",
            """
            import sys
            import urllib.request
            import torch
            import torch.distributed as dist
            from ooc.prometheus.exporting import served_at

            dist.init_process_group("gloo")
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2 + dist.get_rank()):
                model(torch.randn(64, 512)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            page = urllib.request.urlopen(f"http://127.0.0.1:{base + 1 - dist.get_rank()}/metrics").read().decode()
            assert f'ooc_functions_total{{rank="{1 - dist.get_rank()}"}}' in page
            sys.stdout.write(f"served at {served_at()}\\n")  # at once: the ranks share the pipe
            dist.barrier()
            """,
        ),
    )
    variables = {**EMULATED, "OOC_METRICS_PORT": str(base), "OOC_METRICS_FILE": str(tmp_path / "ooc.prom")}
    variables |= {"OOC_SUMMARY": str(tmp_path / "s.json"), "OOC_TRACE": str(tmp_path / "s.trace")}
    variables["RANK"] = "1"  # of a launcher on the second host, where launchers are numbered too
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = launched([sys.executable, *torchrun, script], variables)
    assert sorted(line for line in output.splitlines() if "served at" in line) == [
        f"served at http://127.0.0.1:{port}/metrics" for port in (base, base + 1)
    ]
    assert "no metrics" not in output
    assert sorted(path.name for path in tmp_path.glob("*.*") if path != script) == [
        *("ooc.rank0.prom", "ooc.rank1.prom"),
        *("s.rank0.json", "s.rank0.trace", "s.rank1.json", "s.rank1.trace"),
    ]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"s.rank{rank}.json").read_text())["steps"] == 2 + rank
    pages = [samples((tmp_path / f"ooc.rank{rank}.prom").read_text()) for rank in (0, 1)]
    assert value(pages[0], "step_seconds_count", rank="0") == 2
    assert value(pages[1], "step_seconds_count", rank="1") == 3
    expect_one_page_of_both(tmp_path, pages)


def launched(command: list[str | Path], variables: dict[str, str]) -> str:
    """All output of a program that starts others; none of them outlives this."""
    pipe = subprocess.PIPE
    running = subprocess.Popen(
        command, env=environment(variables), stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = running.communicate(timeout=4 * HANG_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, output[-4000:]
    return output


def expect_one_page_of_both(folder: Path, pages: list[Samples]) -> None:
    """`swapd metrics` serves all of them."""

    command = [sys.executable, "-m", "swapd.cli", "metrics", str(folder), "--metrics-port", "0"]
    serving = subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert " at http" in line, serving.communicate()
        with urllib.request.urlopen(line.split()[-1], timeout=HANG_SECONDS) as answer:
            assert samples(answer.read().decode()) == {**pages[0], **pages[1]}
    finally:
        serving.send_signal(signal.SIGINT)
        assert serving.wait(HANG_SECONDS) == 0
        serving.communicate()
