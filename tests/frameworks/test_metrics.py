"""Metrics of running programs: the same figures by three routes, every way out, and what must not stop a program."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from metrics_programs import HANG_SECONDS, PROGRAM, Samples, run_numpy, samples, start, value

from ooc.prometheus.catalogue import CATALOGUE
from swapd.trace.trace import Trace

# Every figure of the summary that metrics have, and where. The others are texts, or lists (below).
SAME: dict[str, tuple[str, dict[str, str]]] = {
    "budget_bytes": ("budget_bytes", {}),
    "live_peak_bytes": ("live_peak_bytes", {}),
    "device_peak_bytes": ("device_peak_bytes", {}),
    "host_peak_bytes": ("host_peak_bytes", {}),
    "disk_budget_bytes": ("disk_budget_bytes", {}),
    "disk_peak_bytes": ("disk_peak_bytes", {}),
    "disk_read_bytes": ("disk_read_bytes_total", {}),
    "disk_written_bytes": ("disk_written_bytes_total", {}),
    "disk_failure_count": ("disk_failures_total", {}),
    "stall_disk_seconds": ("disk_stall_seconds_total", {}),
    "swap_out_bytes": ("swap_bytes_total", {"direction": "out"}),
    "swap_in_bytes": ("swap_bytes_total", {"direction": "in"}),
    "swap_out_count": ("swap_operations_total", {"direction": "out"}),
    "swap_in_count": ("swap_operations_total", {"direction": "in"}),
    "demand_swap_in_count": ("demand_swap_ins_total", {}),
    "demand_swap_in_bytes": ("demand_swap_bytes_total", {"direction": "in"}),
    "demand_swap_out_bytes": ("demand_swap_bytes_total", {"direction": "out"}),
    "clean_drop_count": ("clean_drops_total", {}),
    "clean_drop_bytes": ("clean_drop_bytes_total", {}),
    "write_back_bytes": ("write_back_bytes_total", {}),
    "cancelled_swap_out_count": ("cancelled_swap_outs_total", {}),
    "divergence_count": ("divergences_total", {}),
    "plan_count": ("plans_total", {}),
    "plan_switch_count": ("plan_switches_total", {}),
    "planned_iteration_count": ("planned_steps_total", {}),
    "functions": ("functions_total", {}),
    "allocations": ("allocations_total", {}),
    "external_pin_count": ("pins_total", {}),
    "host_backed_function_count": ("host_backed_functions_total", {}),
    "stall_swap_in_seconds": ("stall_seconds_total", {"cause": "swap_in"}),
    "stall_room_seconds": ("stall_seconds_total", {"cause": "room"}),
    "copy_out_seconds": ("swap_seconds_total", {"direction": "out"}),
    "copy_in_seconds": ("swap_seconds_total", {"direction": "in"}),
    "min_budget_bytes": ("min_budget_bytes", {}),
    "chunk_bytes": ("chunk_size_bytes", {}),
    "steps": ("step_seconds_count", {}),
    "window_bytes": ("window_bytes", {}),
    "predicted_step_seconds": ("predicted_step_seconds", {}),
    "bound_step_seconds": ("bound_step_seconds", {}),
    "planning_seconds": ("planning_seconds_total", {}),
    "recompute_drop_count": ("recompute_drops_total", {}),
    "recompute_drop_bytes": ("recompute_drop_bytes_total", {}),
    "recompute_function_count": ("recompute_functions_total", {}),
    "recompute_seconds": ("recompute_seconds_total", {}),
    "recompute_refused_count": ("recompute_refused_drops_total", {}),
    "oversubscription": ("oversubscription_ratio", {}),
    "internal_fragmentation_ratio": ("internal_fragmentation_ratio", {"at": "live_peak"}),
    "external_fragmentation_ratio": ("external_fragmentation_ratio", {}),
}
OTHERWISE = {"version", "final", "pid", "device", "policy", "step_seconds", "driver_failure_count", "stall_seconds",
             "peak_rss_bytes", "fit_budget_bytes", "budget_rank_count", "host_budget_bytes", "no_plan_reason",
             "main_step_count", "main_step_seconds", "recompute"}  # fmt: skip
ONLY_IN_SUMMARIES = {"split", "split_function_count", "split_part_count", "split_layers"}


def expect_same(found: Samples, summary: dict[str, Any]) -> None:
    """The last metrics and the summary, every figure that both have, exactly."""
    assert set(summary) == {*SAME, *OTHERWISE, *ONLY_IN_SUMMARIES}
    for key, (name, labels) in SAME.items():
        assert value(found, name, **labels) == (summary[key] or 0), key
    errors = [sample for (name, _), sample in found.items() if name == "ooc_driver_errors_total"]
    assert sum(errors) == summary["driver_failure_count"]
    causes = [value(found, "stall_seconds_total", cause=cause) for cause in ("swap_in", "room")]
    assert sum(causes) == pytest.approx(summary["stall_seconds"], abs=1e-9)  # the parts are added up one by one
    assert value(found, "step_seconds_sum") == pytest.approx(sum(summary["step_seconds"]), abs=1e-5)  # rounded there
    assert summary["peak_rss_bytes"] > 8 << 20
    assert value(found, "process_peak_resident_bytes") == pytest.approx(summary["peak_rss_bytes"], rel=0.2)  # it grows
    assert value(found, "policy_info", configured="auto", policy=summary["policy"]) == 1


def test_metrics_summary_and_trace_agree_at_the_end(tmp_path: Path) -> None:
    steps = 40
    ended = run_numpy(
        tmp_path,
        f"""
        device.step()  # ends the making of the arrays, so that all others are equal
        for _ in range({steps}):
            step()
        """,
        OOC_METRICS_FILE=str(tmp_path / "ooc.prom"),
        OOC_TRACE=str(tmp_path / "trace"),
    ).check()
    found = samples((tmp_path / "ooc.prom").read_text())
    expect_same(found, ended.figures)
    assert ended.figures["swap_in_bytes"] > 0 and ended.figures["plan_count"] > 0
    assert ended.figures["no_plan_reason"] is None

    trace = Trace.load(tmp_path / "trace")
    live_peak = int(trace.live_bytes.max()) + trace.dormant_bytes
    arrays = 8  # making one is a function, too
    assert value(found, "functions_total") == arrays + trace.functions * steps == ended.figures["functions"]
    assert value(found, "step_seconds_count") == 1 + steps
    assert value(found, "live_peak_bytes") == live_peak == ended.figures["live_peak_bytes"]
    assert value(found, "chunk_size_bytes") == trace.chunk_bytes == ended.figures["chunk_bytes"]
    assert value(found, "allocations_total") == trace.variables == ended.figures["allocations"]
    largest = max(
        sum(-(-int(trace.variable_bytes[v]) // trace.chunk_bytes) for v in set(trace.use_variables[start:end].tolist()))
        for start, end in zip(trace.use_offsets, trace.use_offsets[1:])
    )
    assert value(found, "min_budget_bytes") == largest * trace.chunk_bytes == ended.figures["min_budget_bytes"]
    assert np.all(trace.function_seconds >= 0)


def test_a_scrape_at_rest_agrees_with_the_summary(tmp_path: Path) -> None:
    """By the HTTP route, of a program that runs: after `settle` nothing moves."""
    ended = run_numpy(
        tmp_path,
        """
        import urllib.request
        for _ in range(5):
            step()
        device._core.settle()
        page = urllib.request.urlopen(exporting.served_at()).read().decode()
        print(json.dumps([page, device.summary()]))
        """,
        OOC_METRICS_PORT="0",
    ).check()
    page, summary = json.loads(ended.output)
    expect_same(samples(page), summary)
    assert page.count("# TYPE ") == len(CATALOGUE)


def test_a_disk_is_shown_in_the_place_of_host_memory(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        """
        for _ in range(5):
            step()
        """,
        OOC_METRICS_FILE=str(tmp_path / "ooc.prom"),
        OOC_EMULATED_BANDWIDTH="",
        OOC_DISK=str(tmp_path),
        OOC_DISK_BUDGET="64MiB",
    ).check()
    found = samples((tmp_path / "ooc.prom").read_text())
    expect_same(found, ended.figures)
    assert value(found, "disk_budget_bytes") == 64 << 20
    states = [value(found, "disk_bytes", state=state) for state in ("used", "free")]
    assert 0 < states[0] <= sum(states) == value(found, "disk_peak_bytes") <= 64 << 20
    # A copy that a write overtook, or the end, was made all the same.
    assert value(found, "disk_written_bytes_total") >= value(found, "swap_bytes_total", direction="out") > 0
    assert value(found, "disk_read_bytes_total") >= value(found, "swap_bytes_total", direction="in") > 0
    assert value(found, "disk_failures_total") == 0
    for name in ("host_budget_bytes", "host_peak_bytes"):
        assert value(found, name) == 0


FAULTS = "cuMemMap:every=40;cuMemcpyHtoDAsync:every=30;cuMemUnmap:times=2"


def test_driver_errors_agree_too(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        """
        for _ in range(6):
            step()
        """,
        OOC_METRICS_FILE=str(tmp_path / "ooc.prom"),
        OOC_EMULATED_FAULTS=FAULTS,
    ).check()
    found = samples((tmp_path / "ooc.prom").read_text())
    expect_same(found, ended.figures)
    failed = {call for call in ("cuMemMap", "cuMemcpyHtoDAsync") if value(found, "driver_errors_total", call=call) > 0}
    assert failed == {"cuMemMap", "cuMemcpyHtoDAsync"}
    assert value(found, "driver_errors_total", call="cuMemUnmap") == 2


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("device.close(); print(len([t for t in __import__('threading').enumerate()]))", 0),
    ],
)
def test_the_last_metrics_are_written_however_the_program_ends(tmp_path: Path, ending: str, status: int) -> None:
    """The interval is an hour: what is there is what was written at the end."""
    ended = run_numpy(
        tmp_path,
        f"""
        for _ in range(4):
            step()
        {ending}
        """,
        OOC_METRICS_FILE=str(tmp_path / "ooc.prom"),
        OOC_METRICS_INTERVAL="3600s",
        OOC_METRICS_PORT="0",
    )
    assert ended.status == status, ended.errors
    expect_same(samples((tmp_path / "ooc.prom").read_text()), ended.figures)
    if status == 0:
        assert ended.output.strip() == "1"  # no thread is left


def test_the_file_is_written_again_and_again(tmp_path: Path) -> None:
    """Whole each time: a reader sees the functions grow, and never half a page."""
    variables = {"OOC_METRICS_FILE": str(tmp_path / "x.prom"), "OOC_METRICS_INTERVAL": "0.1s"}
    running = start(tmp_path, PROGRAM, "while True: step()", **variables)
    try:
        seen: set[float] = set()
        until = time.monotonic() + HANG_SECONDS
        while len(seen) < 4 and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                text = (tmp_path / "x.prom").read_text()
                assert text.count("# TYPE ") == len(CATALOGUE)
                seen.add(value(samples(text), "functions_total"))
        assert len(seen) >= 4
    finally:
        running.kill()
        running.communicate()
    assert [path.name for path in tmp_path.glob("*.prom")] == ["x.prom"]


# ---- Where something is wrong ---------------------------------------------------------------------------------------


def test_a_pipe_gets_the_metrics_once_at_the_end(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        "step(); time.sleep(0.3)",
        OOC_METRICS_FILE="/dev/stdout",
        OOC_METRICS_INTERVAL="0.1s",
    ).check()
    assert ended.output.count("# TYPE ooc_functions_total") == 1
    assert value(samples(ended.output), "functions_total") == ended.figures["functions"]


def test_a_taken_port_is_a_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_numpy(tmp_path, "for _ in range(4): step()", OOC_METRICS_PORT=str(port)).check()
    assert f"port {port}" in ended.errors and "OOC_METRICS_PORT=0" in ended.errors
    assert ended.errors.count("\n") == 1, ended.errors
    assert ended.figures["steps"] == 4


def test_an_address_of_another_machine_is_a_warning(tmp_path: Path) -> None:
    ended = run_numpy(tmp_path, "step()", OOC_METRICS_PORT="0", OOC_METRICS_ADDRESS="192.0.2.1").check()
    assert "no metrics are served: 192.0.2.1" in ended.errors


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        "for _ in range(4): step(); time.sleep(0.2)",
        OOC_METRICS_FILE=str(tmp_path / "absent" / "ooc.prom"),
        OOC_METRICS_INTERVAL="0.1s",
    ).check()
    assert ended.errors.count("cannot write the metrics") == 1


def test_tls_and_another_address(tmp_path: Path) -> None:
    """From its settings to a scrape that checks the certificate."""
    tls = Path(__file__).resolve().parents[1] / "unit" / "tls"
    ended = run_numpy(
        tmp_path,
        """
        import ssl, urllib.request
        step()
        trusting = ssl.create_default_context(cafile=os.environ["OOC_METRICS_CERT"])
        address = exporting.served_at()
        assert address.startswith("https://0.0.0.0:"), address
        address = address.replace("0.0.0.0", "localhost")
        print(urllib.request.urlopen(address, context=trusting).read().decode())
        """,
        OOC_METRICS_PORT="0",
        OOC_METRICS_ADDRESS="0.0.0.0",
        OOC_METRICS_CERT=str(tls / "certificate.pem"),
        OOC_METRICS_KEY=str(tls / "key.pem"),
    ).check()
    assert value(samples(ended.output), "step_seconds_count") == 1


def test_a_second_session_at_the_same_time_is_not_exported(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        """
        first = exporting.served_at()
        other = ooc.Device()
        assert exporting.served_at() == first
        other.close()
        device.close()
        assert exporting.served_at() is None
        third = ooc.Device()
        assert exporting.served_at() not in (None, first)
        """,
        OOC_METRICS_PORT="0",
    ).check()
    assert ended.errors.count("exported already") == 1


def test_nothing_is_loaded_and_no_thread_made_unless_asked_for(tmp_path: Path) -> None:
    ended = run_numpy(
        tmp_path,
        """
        import threading
        step()
        print(threading.active_count(), [name for name in sys.modules if "prometheus" in name])
        """,
    ).check()
    names = ["ooc.prometheus", "ooc.prometheus.exporting"]
    assert ended.output.strip() == f"1 {names}"
    assert ended.errors == ""


# ---- Pushes ---------------------------------------------------------------------------------------------------------


class Gateway(BaseHTTPRequestHandler):
    pushes: ClassVar[list[tuple[str, str, str]]] = []

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.pushes.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    Gateway.pushes.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def grouped_by(path: str) -> dict[str, str]:
    """The labels that a pushgateway reads from an address."""
    names, values = path.split("/")[2::2], path.split("/")[3::2]
    return {
        name.removesuffix("@base64"): base64.urlsafe_b64decode(value).decode()
        if name.endswith("@base64")
        else urllib.parse.unquote(value)
        for name, value in zip(names, values, strict=True)
    }


@pytest.mark.parametrize("job", ["night", "night run"])
def test_the_last_metrics_are_pushed_once(tmp_path: Path, gateway: str, job: str) -> None:
    ended = run_numpy(tmp_path, "for _ in range(4): step()", OOC_METRICS_PUSH=gateway, OOC_METRICS_JOB=job).check()
    ((path, content_type, page),) = Gateway.pushes
    assert path.startswith("/metrics/job")
    assert grouped_by(path) == {"job": job, "instance": socket.gethostname(), "rank": "0"}
    assert content_type.startswith("text/plain; version=0.0.4")
    expect_same(samples(page), ended.figures)
    assert ended.errors == ""


def test_a_gateway_that_is_away_or_hangs_is_a_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never answers
        port = silent.getsockname()[1]
        ended = run_numpy(tmp_path, "step()", OOC_METRICS_PUSH=f"http://127.0.0.1:{port}").check()
    assert "were not pushed" in ended.errors and ended.errors.count("\n") == 1
    ended = run_numpy(tmp_path, "step()", OOC_METRICS_PUSH=f"http://127.0.0.1:{port}").check()  # nobody there by now
    assert "were not pushed" in ended.errors
