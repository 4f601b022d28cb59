"""Starts a module of this package in a fresh process: the allocator can be turned on only once in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.runs import ROOT, TIMEOUT_SECONDS, RunFailed


def measure_in_child(module: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Runs ``python -m benchmarks.MODULE OUTPUT ARGUMENT...`` and returns what it wrote, with the machine.

    `variables` are set in its environment.

    Raises:
        RunFailed: it ended with an error or hung.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    description, stolen = machine.describe(), machine.stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
        output = Path(folder) / "child.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", str(output), *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment | {"OMP_NUM_THREADS": "1"} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            raise RunFailed(f"no end after {TIMEOUT_SECONDS} s: {' '.join(command)}") from expired
        if done.returncode != 0:
            raise RunFailed(f"status {done.returncode}: {' '.join(command)}\n{done.stdout[-3000:]}")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    stolen = machine.stolen_seconds() - stolen
    return {"machine": description, "load_average_after": machine.load(), "stolen_seconds": stolen, **result}
