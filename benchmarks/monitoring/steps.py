"""Times training steps of the GPT example in this process, with what the settings turn on.

    python -m benchmarks.monitoring.steps OUTPUT.json STEPS SCRAPES SETTINGS [ARGUMENT ...]

SETTINGS is a JSON object of keywords for `enable`. Where it has `metrics_port`, another process scrapes once a second
while the steps run, and SCRAPES times in a row afterwards, to know what one costs: the processor time of this process,
less that of as long a pause. A step's time is that of this process's processors, and the clock's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ooc
from benchmarks.gpt_step import make_step
from ooc.prometheus.exporting import served_at

WARM_STEPS = 6  # set-up, recording, two plannings

# Reads how many scrapes to make, and how far apart; answers with the bytes of the last page.
SCRAPER = """
import sys, time, urllib.request
address, count, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
made = 0
while made < count or count == 0:
    with urllib.request.urlopen(address) as answer:
        size = len(answer.read())
    made += 1
    if count == 0:
        print(size, flush=True)
    time.sleep(pause)
print(size, flush=True)
"""


def scraper(count: int, pause: float) -> subprocess.Popen[str]:
    """A process that scrapes this one; `count` 0: until it is ended."""
    address = served_at()
    assert address is not None
    command = [sys.executable, "-c", SCRAPER, address, str(count), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def processor_seconds(work: Any) -> tuple[float, float]:
    """Of this process while `work` runs, and the clock's."""
    began, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - began, time.perf_counter() - clock


def cost_of_a_scrape(count: int) -> dict[str, Any]:
    """Of many in a row, while the program waits."""
    warm = scraper(5, 0.0)
    warm.communicate()
    running = scraper(count, 0.0)
    used, clock = processor_seconds(running.wait)
    assert running.stdout is not None
    size = int(running.stdout.read())
    idle, _ = processor_seconds(lambda: time.sleep(clock))
    return {"scrapes": count, "processor_seconds": used, "idle_processor_seconds": idle, "page_bytes": size}


def main() -> None:
    output, steps, scrapes, settings, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    ooc.enable(alloc="emulated", chunk_size="128KiB", small_limit="64KiB", **json.loads(settings))
    step = make_step(arguments)
    for _ in range(WARM_STEPS):
        step()
    watching = scraper(0, 1.0) if served_at() is not None else None
    if watching is not None and watching.stdout is not None:
        watching.stdout.readline()  # it has begun
    times = [processor_seconds(step) for _ in range(int(steps))]
    record: dict[str, Any] = {
        "processor_seconds": [used for used, _ in times],
        "seconds": [clock for _, clock in times],
        "scraped": 0,
    }
    if watching is not None:
        watching.kill()
        record["scraped"] = 1 + len(watching.communicate()[0].split())
        record["burst"] = cost_of_a_scrape(int(scrapes))
    Path(output).write_text(json.dumps(record | {"summary": ooc.summary()}), encoding="utf-8")


if __name__ == "__main__":
    main()
