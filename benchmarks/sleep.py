"""Sleep and wake around training steps: how long they take, beside the bytes moved over the speed of the link.

    python -m benchmarks.sleep OUTPUT.json ROUNDS      measures in this process, which the environment gave an allocator

A program with a device of its own size is the case of two engines that take turns on one device. Bytes that are clean
on the host leave without a copy. The device is emulated, its link held.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.children import measure_in_child
from benchmarks.runs import RunFailed, torch_threads

NAME = "sleep"
LINKS = (1e9, 4e9)  # bytes per second, each way
BUDGET = 512 << 20


def measure(target: Path, *, rounds: int, say: Callable[[str], None]) -> None:
    """Runs it and writes the raw data. Raises RunFailed."""
    results.clear(target, NAME)
    for link in LINKS:
        variables = {
            "OOC_ALLOC": "emulated",
            "OOC_BUDGET": str(BUDGET),
            "OOC_EMULATED_BANDWIDTH": f"{link:.0f}B/s",
            "OMP_NUM_THREADS": str(torch_threads()),
        }
        record = measure_in_child("sleep", str(rounds), **variables) | {"link_bytes_per_second": link}
        if any(row["device_bytes"] for row in record["rounds"]):
            raise RunFailed("something stayed on the device")
        results.save(target, NAME, f"{link / 1e9:g}", record)
        say(f"{link / 1e9:g} GB/s: wake takes {over_the_link(record, 'wake'):.2f} times its bytes over the link")


def over_the_link(record: dict[str, Any], what: str) -> float:
    """The median of the rounds' seconds over bytes moved by the link's speed."""
    link = record["link_bytes_per_second"]
    return statistics.median(row[f"{what}_seconds"] * link / row[f"{what}_bytes"] for row in record["rounds"])


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, one line a link; empty without records."""
    rows = []
    for record in records:
        middle = {key: statistics.median(row[key] for row in record["rounds"]) for key in record["rounds"][0]}
        rows.append(
            [
                f"{record['link_bytes_per_second'] / 1e9:g} GB/s",
                *(results.mib(middle[f"{what}_bytes"]) for what in ("sleep", "wake")),
                *(f"{middle[f'{what}_seconds']:.3f}" for what in ("sleep", "wake")),
                *(f"{over_the_link(record, what):.2f}" for what in ("sleep", "wake")),
                f"{middle['device_bytes']:.0f}",
            ]
        )
    if not rows:
        return ""
    header = "link|out MiB|back MiB|sleep s|wake s|sleep / (bytes over link)|wake / (bytes over link)|bytes asleep"
    words = machine.words(records[0]["machine"])
    return f"{words}; the device is emulated. Medians.\n\n" + results.markdown(header.split("|"), rows)


def main() -> None:
    """Measures rounds of a training step, sleep and wake."""
    import torch
    from torch import nn

    import ooc
    from ooc_alloc import device_memory, library_path

    driver = str(library_path("libooc_emulated_cuda.so"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(64, 1536)
    rounds = []
    for index in range(int(sys.argv[2]) + 3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        before, began = ooc.summary(), time.perf_counter()
        ooc.sleep()
        slept = time.perf_counter() - began
        total, free = device_memory(driver)
        asleep, began = ooc.summary(), time.perf_counter()
        back = ooc.wake()
        row = {
            "sleep_seconds": slept,
            "sleep_bytes": asleep["swap_out_bytes"] - before["swap_out_bytes"],
            "wake_seconds": time.perf_counter() - began,
            "wake_bytes": back,
            "device_bytes": total - free,
        }
        if index >= 3:  # host memory is taken, and touched for the first time, before
            rounds.append(row)
    record = {"rounds": rounds, "threads": torch.get_num_threads()}
    Path(sys.argv[1]).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
