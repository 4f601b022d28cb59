"""Pictures of dashboards: `python -m grafana.render.picture [--seconds 60] [--out docs/pictures] [overview ...]`

A training run on the emulated device gives the data, a real Prometheus scrapes it, and Grafana's own UI components
(@grafana/ui) draw in headless Chromium. This is not the Grafana server: queries, variables and layout are done here, as
Grafana does them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grafana import queries
from grafana.live import Prometheus, free_port, prometheus, start_training, until
from grafana.render.browser import DrawingFailed, chromium, photograph, served

HERE = Path(__file__).resolve().parent
MODULES = HERE / "node_modules"
WIDTH = 24 * 60 + 8
SCRAPE_SECONDS = 1.0
STEP_SECONDS = 1.0
# A GPT that needs 145 MiB and has 60 MiB. A step takes half a second on two cores.
GPT = ("--layers", "4", "--width", "192", "--batch-size", "12", "--context", "192", "--text-bytes", "400000")
SETTINGS = {
    "OOC_BUDGET": "60MiB",
    "OOC_CHUNK_SIZE": "256KiB",
    "OOC_SMALL_LIMIT": "64KiB",
    "OOC_EMULATED_BANDWIDTH": "h2d=180MiB/s,d2h=150MiB/s",
}
# After so long the window of every rate is full, and the planning of the first step has left it.
SETTLED_SECONDS = 8.0
CAPTION = "GPT training on the emulated device (no GPU) — drawn with @grafana/ui, not by the Grafana server"

PAGE = b"""<!doctype html><html><head><meta charset="utf-8"><link rel="stylesheet" href="/page.css"><style>
body { margin: 0 } [class*="panel-content"] { overflow: hidden }
</style></head><body><div id="root"></div><script type="module" src="/page.js"></script></body></html>"""


def bundle() -> dict[str, bytes]:
    """page.jsx and everything that it uses, as a script and a style sheet. Raises FileNotFoundError, DrawingFailed."""
    program = MODULES / ".bin" / "esbuild"
    if not program.exists():
        raise FileNotFoundError(f"{MODULES} is not there: run `make dashboard-pictures`")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(program), str(HERE / "page.jsx"), "--bundle", "--minify", "--format=esm", "--jsx=automatic",
            '--define:process.env.NODE_ENV="production"', "--loader:.ttf=dataurl", "--log-level=error",
            f"--outdir={folder}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            raise DrawingFailed(done.stderr.decode())
        return {f"/page{kind}": (Path(folder) / f"page{kind}").read_bytes() for kind in (".js", ".css")}


def answers(server: Prometheus, panel: dict[str, Any], start: float, end: float) -> list[dict[str, Any]]:
    """Every series of every query of a panel, for page.jsx. Times are in milliseconds; null is no finite number."""
    found = []
    everything: dict[str, list[str]] = {"job": [], "instance": [], "rank": [], "gpu_host": []}
    for target in panel.get("targets", []):
        expr = queries.filled(target["expr"], SCRAPE_SECONDS, STEP_SECONDS, everything)
        if target.get("instant"):
            series = [(labels, [(end, values[0])]) for labels, values in server.instant(expr, end)]
        else:
            series = server.points(expr, start, end, STEP_SECONDS)
        for labels, points in series:
            found.append(
                {
                    "refId": target["refId"],
                    "legend": target.get("legendFormat", ""),
                    "labels": labels,
                    "times": [round(1000 * at) for at, _ in points],
                    "values": [value if math.isfinite(value) else None for _, value in points],
                }
            )
    return found


def picture(server: Prometheus, dashboard: dict[str, Any], start: float, end: float) -> dict[str, Any]:
    """What page.jsx draws. A collapsed row shows nothing, as in Grafana."""
    shown = {**dashboard, "panels": [panel for panel in dashboard["panels"] if not panel.get("collapsed")]}
    return {
        "dashboard": shown,
        "caption": CAPTION,
        "from": round(1000 * start),
        "to": round(1000 * end),
        "answers": {panel["id"]: answers(server, panel, start, end) for panel in shown["panels"]},
    }


def draw(content: dict[str, Any], script: dict[str, bytes], out: Path) -> None:
    """Writes one PNG. Raises DrawingFailed where the page reports an error or lacks a panel."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in content["dashboard"]["panels"])
    pages = {"/": PAGE, **script, "/picture.json": json.dumps(content).encode()}
    with served(pages, MODULES / "@grafana" / "ui" / "dist" / "public") as (address, reported):
        photograph(address, out, WIDTH, rows * 38 + 60)
    if reported.errors:
        raise DrawingFailed("\n".join(reported.errors))
    if not reported.drawn:
        raise DrawingFailed(f"{out.name}: nothing was drawn in time")
    panels, text = content["dashboard"]["panels"], reported.drawn["text"]
    missing = [panel["title"] for panel in panels if panel["title"] not in text]
    charts = sum(panel["type"] == "timeseries" for panel in panels)
    if missing or reported.drawn["charts"] < charts or "No data" in text:
        raise DrawingFailed(f"{out.name}: without {missing}, {reported.drawn['charts']} charts of {charts} or more")


def watched(names: list[str], seconds: float, ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Trains, scrapes for `seconds` under a plan, and returns what to draw of each dashboard."""
    dashboards, ports = queries.load(), [free_port() for _ in range(ranks)]
    # This metric is there from the first step under a plan.
    ready = f"count(ooc_step_over_bound_ratio) == {ranks}"
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(start_training(port, folder / f"training-{rank}.log", GPT, **SETTINGS, RANK=str(rank)))
            for rank, port in enumerate(ports)
        ]
        targets = {"out-of-core": [f"127.0.0.1:{port}" for port in ports]}
        server, running = stack.enter_context(prometheus(folder, targets, SCRAPE_SECONDS))
        until("the first step under a plan", lambda: server.instant(ready, time.time()), 400, [*programs, running])
        time.sleep(SETTLED_SECONDS + seconds)
        end = math.floor(time.time())
        for program in programs:
            program.check()
        return {name: picture(server, dashboards[name], end - seconds, end) for name in names}


def main() -> int:
    """Draws the dashboards. Prints what is missing or went wrong, and then returns 1."""
    parser = argparse.ArgumentParser(
        prog="python -m grafana.render.picture", description="Draw dashboards from live data."
    )
    parser.add_argument("names", nargs="*", default=["overview"], help="dashboards (default: overview)")
    parser.add_argument("--seconds", type=float, default=60, help="how long to watch the run (default %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes to train, each for itself (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/pictures"), help="folder of the PNGs (default %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        chromium()
        script = bundle()
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            print(f"training, and scraping it for {arguments.seconds:g} s after the first plan ...", flush=True)
            drawings = watched(arguments.names, arguments.seconds, arguments.ranks, Path(folder))
        for name, content in drawings.items():
            draw(content, script, arguments.out / f"{name}.png")
            print(arguments.out / f"{name}.png", flush=True)
    except (DrawingFailed, FileNotFoundError, RuntimeError, TimeoutError) as error:
        print(f"dashboard-pictures: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
