"""Prometheus's own tool reads a live scrape and finds nothing to complain about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from live import program

ROOT = Path(__file__).resolve().parents[2]

SCRAPED_WHILE_IT_RUNS = """
import sys, urllib.request
import numpy as np
import ooc.numpy as ooc
from ooc.prometheus import exporting

settings = {"budget": "1MiB", "chunk_size": "64KiB", "small_limit": "4KiB", "emulated_bandwidth": "1GiB/s"}
with ooc.Device(metrics_port=0, **settings) as device:
    arrays = [device.zeros(1 << 15) for _ in range(8)]

    @device.function(writes=("target",))
    def increase(target):
        np.add(target, 1, out=target)

    for _ in range(5):
        for array in arrays:
            increase(array)
        device.step()
    sys.stdout.buffer.write(urllib.request.urlopen(exporting.served_at()).read())
"""


def complaints(page: bytes) -> tuple[int, str]:
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=page, capture_output=True, check=False)
    return checked.returncode, (checked.stdout + checked.stderr).decode()


def test_promtool_accepts_a_live_scrape() -> None:
    answer = subprocess.run([sys.executable, "-c", SCRAPED_WHILE_IT_RUNS], cwd=ROOT, capture_output=True, check=False)
    assert answer.returncode == 0, answer.stderr.decode()
    assert answer.stdout.count(b"# TYPE ooc_") > 50
    assert b"ooc_predicted_step_seconds{" in answer.stdout  # a plan was made: nothing is left out
    assert complaints(answer.stdout) == (0, "")


def test_promtool_would_complain() -> None:
    """It is no check that cannot fail."""
    assert complaints(b"# HELP ooc_steps x\n# TYPE ooc_steps counter\nooc_steps 1\n")[0] != 0
    assert complaints(b"ooc_x 1\nooc_x 2\n")[0] != 0
