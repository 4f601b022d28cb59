"""Runs a model for `swapd split`, and writes down how the functions of an iteration ran.

It is started as a program of its own, `python -m ooc.pytorch.split_run JSON`, in the session that its variables
turn on. Iterations are run until two that follow each other ran alike, with every comparison of parts done.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ooc import pytorch
from ooc.pytorch.fake import find
from ooc.pytorch.fake_mode import FakeError, iteration
from ooc.pytorch.session import TorchSession

LEAST_ITERATIONS, MOST_ITERATIONS = 4, 20  # after the first two, mmCNN's numbers are known
COUNTED = ("functions", "swap_in_bytes", "swap_out_bytes")


def run(make: Any, batch: int, arguments: dict[str, Any], session: TorchSession) -> dict[str, Any]:
    """What the last iteration did: rows as the summary's `split_layers`, and its figures.

    Raises:
        FakeError: the model cannot be built.
    """
    try:
        step = iteration(make, batch, arguments)
    except (TypeError, ValueError) as error:
        raise FakeError(f"it cannot be built: {error}") from error
    pytorch.step()
    rows: list[dict[str, Any]] = []
    rows_before = rows
    number = 0
    while number < LEAST_ITERATIONS or (rows != rows_before and number < MOST_ITERATIONS):
        number += 1
        before, rows_before, counted = session.split_rows(), rows, session.core.stats()
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        pytorch.step()
        rows = _since(before, session.split_rows())
    now = session.core.stats()
    return {
        "iterations": number,
        "seconds": seconds,
        "budget_bytes": now["budget_bytes"],
        "device_peak_bytes": now["device_peak_bytes"],
        "policy": session.planner.policy,
        **{name: now[name] - counted[name] for name in COUNTED},
        "layers": rows,
    }


def _since(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of calls that were made in between."""
    earlier = [row["calls"] for row in before] + [0] * (len(after) - len(before))
    made = [row | {"calls": row["calls"] - calls} for row, calls in zip(after, earlier)]
    return [row for row in made if row["calls"] > 0]


def main(text: str) -> int:
    """Does what the JSON object `text` asks for; its keys are those that `swapd/cli/split.py` writes."""
    wanted = json.loads(text)
    try:
        session = pytorch._active()
        arguments = dict(wanted["arguments"])
        if ":" not in wanted["program"]:
            arguments.setdefault("mode", "inference")  # models that have names take this argument
        try:
            found = run(find(wanted["program"]), wanted["batch"], arguments, session)
        except torch.OutOfMemoryError as error:
            raise FakeError(str(error)) from error
        Path(wanted["output"]).write_text(json.dumps(found), encoding="utf-8")
    except (FakeError, OSError) as error:
        print(f"swapd: {wanted['program']}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
