"""A real Prometheus against a real training run on the emulated device: every expression of every panel returns data.

The panels of NVIDIA's dcgm-exporter have nothing to show on a machine without its GPUs. For them a stand-in
plays the exporter; it shows that the expressions and the scrape job fit together, and nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import http.server
import math
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import queries
import yaml
from live import Prometheus, fetch, free_port, program, prometheus, start_training, until

from ooc.prometheus.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
SCRAPE_SECONDS = 1.0
# What is asked for lies within this long before the end: three seconds of points, whose rates look back for four.
LOOKED_AT = "9s"
# The last of the metrics to come has been there all the time, no scrape failed, and steps ended in every window: on a
# machine that is busy with other things this takes longer.
SETTLED = f"""
    min_over_time(up{{job="out-of-core"}}[{LOOKED_AT}]) == 1
    and on (instance) count_over_time(ooc_step_over_bound_ratio[{LOOKED_AT}]) >= 8
    and on (instance) min_over_time(rate(ooc_step_seconds_count[4s])[{LOOKED_AT}:1s]) > 0
"""

DASHBOARDS = queries.load()
ASKED = [one for name, dashboard in DASHBOARDS.items() for one in queries.asked(name, dashboard)]

DCGM_LABELS = 'gpu="0",UUID="GPU-0",device="nvidia0",modelName="stand-in",Hostname="host-0"'
DCGM = {
    "DCGM_FI_DEV_GPU_UTIL": 57, "DCGM_FI_DEV_MEM_COPY_UTIL": 31, "DCGM_FI_DEV_FB_USED": 40960,
    "DCGM_FI_DEV_POWER_USAGE": 412.5, "DCGM_FI_DEV_GPU_TEMP": 61, "DCGM_FI_DEV_XID_ERRORS": 0,
}  # fmt: skip


@contextlib.contextmanager
def dcgm_stand_in() -> Iterator[int]:
    """The port of a page like dcgm-exporter's, with one GPU that does not exist."""
    page = "".join(f"# TYPE {name} gauge\n{name}{{{DCGM_LABELS}}} {value}\n" for name, value in DCGM.items())

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Seen:
    """What was scraped: the server, the address of the run, one page as it served it, and the time to ask for."""

    server: Prometheus
    instance: str
    page: str
    end: float


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("monitoring")
    port = free_port()
    instance = f"127.0.0.1:{port}"
    with start_training(port, folder / "training.log") as training, dcgm_stand_in() as gpu_port:
        targets = {"out-of-core": [instance], "dcgm": [f"127.0.0.1:{gpu_port}"]}
        with prometheus(folder, targets, SCRAPE_SECONDS) as (server, running):
            # The adapter may have to be compiled first.
            until("the run was scraped", lambda: server.instant(SETTLED, time.time()), 400, [training, running])
            end = time.time()
            yield Seen(server, instance, fetch(f"http://{instance}/metrics"), end)
            training.check()


def answer(seen: Seen, one: queries.Asked, choices: dict[str, list[str]]) -> list[list[float]]:
    """The values of every series that a panel's query returns, over the last seconds or (instant) now."""
    step = 1.0
    expr = queries.filled(one.expr, SCRAPE_SECONDS, step, choices)
    if one.instant:
        return [values for _, values in seen.server.instant(expr, seen.end)]
    return [values for _, values in seen.server.range(expr, seen.end - 3 * step, seen.end, step)]


def missing(seen: Seen, choices: dict[str, list[str]]) -> list[str]:
    """A line for each query that returns nothing, or something that is no finite number."""
    found = []
    for one in ASKED:
        series = answer(seen, one, choices)
        if not series:
            found.append(f"{one.name}: no data")
        found += [f"{one.name}: {values}" for values in series if not all(map(math.isfinite, values))]
    return found


EVERYTHING: dict[str, list[str]] = {"job": [], "instance": [], "rank": [], "gpu_host": []}


@pytest.mark.medium
def test_every_expression_of_every_panel_returns_data(seen: Seen) -> None:
    assert missing(seen, EVERYTHING) == []


def test_so_does_every_expression_with_the_run_chosen_at_the_top(seen: Seen) -> None:
    chosen = {"job": ["out-of-core"], "instance": [seen.instance], "rank": ["0"], "gpu_host": ["host-0", "host-1"]}
    assert missing(seen, chosen) == []


def test_nothing_is_shown_of_a_run_that_was_not_chosen(seen: Seen) -> None:
    """So that the two tests above can fail: what is not there gives no data, but for what says 0 on purpose."""
    nobody = {"job": [], "instance": ["10.0.0.1:1"], "rank": [], "gpu_host": ["elsewhere"]}
    lines = missing(seen, nobody)
    says_zero = [one for one in ASKED if one.expr.endswith("or vector(0)")]
    assert len(says_zero) < len(ASKED) / 5
    assert len(lines) == len(ASKED) - len(says_zero)


def test_the_variables_at_the_top_have_values(seen: Seen) -> None:
    expected = {"job": ["out-of-core"], "instance": [seen.instance], "rank": ["0"], "gpu_host": ["host-0"]}
    for dashboard in DASHBOARDS.values():
        for name, query in queries.variables(dashboard).items():
            selector, label = queries.label_values(query)
            selector = queries.filled(selector, SCRAPE_SECONDS, 1, EVERYTHING)
            assert seen.server.get(f"label/{label}/values", **{"match[]": selector}) == expected[name]


def test_the_run_really_swapped(seen: Seen) -> None:
    """The figures behind the panels are those of a run that needs more memory than it may use, under a plan."""

    def value(expr: str) -> float:
        ((_, (number,)),) = seen.server.instant(expr, seen.end)
        return number

    assert value("ooc_oversubscription_ratio") > 1.5
    assert value("ooc_plans_total") >= 1
    for direction in ("in", "out"):
        assert value(f'rate(ooc_swap_bytes_total{{direction="{direction}"}}[4s])') > 100_000
    assert 0 < value("ooc_step_over_bound_ratio") < 1000
    assert value("sum(ooc_device_bytes)") <= value("ooc_budget_bytes")


def test_every_rule_evaluates_and_records(seen: Seen) -> None:
    groups = seen.server.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    written = [
        rule
        for path in ("recording.yaml", "alerts.yaml")
        for group in yaml.safe_load((ROOT / "grafana" / "rules" / path).read_text())["groups"]
        for rule in group["rules"]
    ]
    assert {rule["name"] for rule in rules} == {rule.get("record", rule.get("alert")) for rule in written}
    for rule in rules:
        assert rule["health"] == "ok" and not rule.get("lastError"), rule
    for rule in written:
        if "record" in rule:
            recorded = seen.server.instant(rule["record"], seen.end)
            assert recorded and all(math.isfinite(value) for _, (value,) in recorded), rule["record"]


def test_every_target_is_up(seen: Seen) -> None:
    up = {labels["job"]: value for labels, (value,) in seen.server.instant("up", seen.end)}
    assert up == {"out-of-core": 1, "dcgm": 1, "prometheus": 1}


def promtool_check_metrics(page: str) -> tuple[int, str]:
    command = (program("promtool"), "check", "metrics")
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_promtool_accepts_the_page(seen: Seen) -> None:
    assert promtool_check_metrics(seen.page) == (0, "")
    planted = seen.page.replace("ooc_plans_total", "ooc_plans")
    status, says = promtool_check_metrics(planted)
    assert status != 0 and "ooc_plans" in says


def test_the_page_has_the_catalogue(seen: Seen) -> None:
    typed = {line.split()[2] for line in seen.page.splitlines() if line.startswith("# TYPE ")}
    assert {metric.name for metric in CATALOGUE} <= typed
