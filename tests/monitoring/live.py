"""A training run on the emulated device and a real Prometheus that scrapes it.

Prometheus runs with `grafana/stack/prometheus.yml` and the rules as they are; only its intervals, its own address and
the targets differ. Everything listens on 127.0.0.1, on ports that were free.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "grafana"
# A GPT of a few megabytes whose steps take one or two tenths of a second, with half the memory that it needs.
GPT = ("--layers", "2", "--width", "128", "--batch-size", "8", "--context", "128", "--text-bytes", "400000")
EMULATED = {
    "OOC_ALLOC": "emulated",
    "OOC_BUDGET": "14MiB",
    "OOC_CHUNK_SIZE": "64KiB",
    "OOC_SMALL_LIMIT": "32KiB",
    "OOC_EMULATED_BANDWIDTH": "h2d=400MiB/s,d2h=400MiB/s",
}


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Raises FileNotFoundError, which says what to do."""
    unpacked = Path(os.environ.get("TOOLS", ROOT / ".tools")) / "prometheus" / "bin"
    found = shutil.which(name) or shutil.which(name, path=str(unpacked))
    if found is None:
        raise FileNotFoundError(f"{name} is neither on the PATH nor in {unpacked}: run `make monitoring-tools`")
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetch(url: str, timeout: float = 10) -> str:
    """A page's text. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return str(answer.read().decode())


def until(what: str, ready: Callable[[], Any], seconds: float, alive: Sequence[Running] = ()) -> Any:
    """Calls `ready` until it returns a true value, and returns that. Raises TimeoutError, or as `Running.check`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if value := ready():
                return value
        for one in alive:
            one.check()
        time.sleep(0.1)
    raise TimeoutError(f"{what}: not within {seconds:g} seconds\n" + "\n".join(one.log() for one in alive))


class Running:
    """A program in the background; leaving its context ends it."""

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=dict(variables or os.environ), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        """The end of what the program has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def check(self) -> None:
        """Raises RuntimeError if the program has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode}:\n{self.log()}")


def start_training(port: int, log: Path) -> Running:
    """Starts an example that trains on the emulated device until it is stopped, with metrics on a port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    kept.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    paths = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "integrations"), kept.get("PYTHONPATH"))))
    kept |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OOC_PLANNING": "blocking", **EMULATED}
    kept["OOC_METRICS_PORT"] = str(port)
    script = ROOT / "examples" / "gpt.py"
    return Running((sys.executable, str(script), "--steps", "1000000000", *GPT), log, kept)


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer of the HTTP API. Raises OSError, or RuntimeError with Prometheus' own words."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            answer = json.loads(fetch(f"{self.url}/api/v1/{path}?{query}"))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {error.read().decode()}") from error
        return answer["data"]

    def instant(self, expr: str, at: float) -> list[tuple[dict[str, str], list[float]]]:
        """(labels, [value]) of every series of a vector."""
        result = self.get("query", query=expr, time=at)["result"]
        return [(series["metric"], [float(series["value"][1])]) for series in result]

    def range(self, expr: str, start: float, end: float, step: float) -> list[tuple[dict[str, str], list[float]]]:
        """(labels, values) of every series between two times."""
        result = self.get("query_range", query=expr, start=start, end=end, step=step)["result"]
        return [(series["metric"], [float(value) for _, value in series["values"]]) for series in result]


def lay_out(folder: Path, port: int, targets: Mapping[str, Sequence[str]], scrape_seconds: float) -> Path:
    """Copies rules and configuration below `folder`, changed as the module says. Returns the configuration's path."""
    shutil.copytree(GRAFANA / "rules", folder / "rules")
    shutil.copytree(GRAFANA / "stack" / "targets", folder / "stack" / "targets")
    interval = f"{round(1000 * scrape_seconds)}ms"
    config = yaml.safe_load((GRAFANA / "stack" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    for job in config["scrape_configs"]:
        if job["job_name"] == "prometheus":
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        for discovery in job.get("file_sd_configs", []):
            discovery["refresh_interval"] = "1s"
    for name, addresses in targets.items():
        path = folder / "stack" / "targets" / f"{name}.yaml"
        if not path.exists():
            raise FileNotFoundError(f"{path.name}: no such file of targets in grafana/stack/targets")
        path.write_text(yaml.safe_dump([{"targets": list(addresses)}]), encoding="utf-8")
    path = folder / "stack" / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextlib.contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]], scrape_seconds: float
) -> Iterator[tuple[Prometheus, Running]]:
    """Runs a Prometheus that is ready to be asked, and ends it afterwards. Its data stay in the caller's `folder`."""
    port = free_port()
    config = lay_out(folder, port, targets, scrape_seconds)
    command = (
        program("prometheus"), f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={folder / 'data'}",
    )  # fmt: skip
    with Running(command, folder / "prometheus.log") as running:
        server = Prometheus(port)
        until("Prometheus is ready", lambda: fetch(f"{server.url}/-/ready"), 30, [running])
        yield server, running
