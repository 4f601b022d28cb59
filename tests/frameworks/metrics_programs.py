"""Programs whose metrics are looked at: NumPy on the emulated device, in processes of their own."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from processes import EMULATED, Ended, code, environment, run_source, write_script
from prometheus_client.parser import text_string_to_metric_families

HANG_SECONDS = 60.0
BUDGET = str(1 << 20)

# Eight arrays of 256 KiB in a budget of 1 MiB. Every function is in a whole iteration, and all iterations are equal.
PROGRAM = """
    import json, os, signal, sys, time
    import numpy as np
    import ooc.numpy as ooc
    from ooc.prometheus import exporting

    device = ooc.Device()
    arrays = [device.empty(1 << 15) for _ in range(8)]

    @device.function(writes=("target",))
    def fill(target):
        target[...] = 1

    @device.function(writes=("target",), reads=("source",))
    def add(target, source):
        np.add(target, source, out=target)

    def step():
        for array in arrays:
            fill(array)
        for target, source in zip(arrays, arrays[1:]):
            add(target, source)
        device.step()
"""
NUMPY = {"OOC_SMALL_LIMIT": "4KiB", "OOC_BUDGET": BUDGET, "OOC_EMULATED_BANDWIDTH": "4GiB/s"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def run_numpy(folder: Path, source: str, **variables: str) -> Ended:
    """Without PyTorch, which would be a second user of the same settings."""
    return run_source(folder, code(PROGRAM, source), options=("-s",), **{**NUMPY, **variables})


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, rank: str = "0", **labels: str) -> float:
    return found[f"ooc_{name}", frozenset({"rank": rank, **labels}.items())]


def start(folder: Path, *source: str, **variables: str) -> subprocess.Popen[str]:
    script = write_script(folder, code(*source))
    wanted = environment({**EMULATED, **NUMPY, "OOC_SUMMARY": str(folder / "summary.json"), **variables})
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(script)], env=wanted, stdout=pipe, stderr=pipe, text=True)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now; the system chooses it, so that two callers differ."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)
    raise AssertionError("no free ports")
