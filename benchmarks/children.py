"""Starts a module of this package in a fresh process: the allocator can be turned on only once in each."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.runs import start


def measure_in_child(module: str, *arguments: str, turns: tuple[int, ...] = (), **variables: str) -> dict[str, Any]:
    """Runs ``python -m benchmarks.MODULE OUTPUT ARGUMENT...`` and returns what it wrote, with the machine.

    `variables` are set in its environment; `turns` are pipes, where its steps wait for those of others
    (`benchmarks.runs.in_turns`).

    Raises:
        RunFailed: it ended with an error or hung.
    """
    description, stolen = machine.describe(), machine.stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
        output = Path(folder) / "child.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", str(output), *arguments]
        start(command, {"OMP_NUM_THREADS": "1"} | variables, turns)
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    stolen = machine.stolen_seconds() - stolen
    return {"machine": description, "load_average_after": machine.load(), "stolen_seconds": stolen, **result}
