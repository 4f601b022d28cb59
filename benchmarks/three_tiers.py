"""Three tiers at run time: an emulated device with a held link, little host memory, and the disk of this machine below.

Whole programs at 2 and 4 times their device budget, with host memory for a half, or a seventh, of what the device does
not hold; the rest lies on the disk. "Predicted" is what was said of a step before it began, of both levels together,
with the speed that the disk had shown so far; "simulated" gives each steady step its own times of functions. Both are
over the step's time without planning.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.fragmentation import reason
from benchmarks.mapping import predictions, ratios, waiting
from benchmarks.runs import ROOT, RunFailed, run, torch_threads
from benchmarks.step_time import IN_CORE, median
from benchmarks.workloads import CHUNK_BYTES, EXAMPLES, WORKLOADS, Workload

NAME = "three_tiers"
GPT = Workload(
    "gpt",
    EXAMPLES / "gpt.py",
    tuple("--batch-size 8 --width 512 --layers 6 --text-bytes 2000000 --sample-bytes 1".split()),
    WORKLOADS[1].quick_arguments,
)
PROGRAMS = {"resnet50": (WORKLOADS[0], 1e9), "gpt": (GPT, 2e9)}  # with the bytes per second of the link, each way
OVERSUBSCRIPTIONS = (2.0, 4.0)
SHARES = (0.5, 0.15)  # host memory, over what the device does not hold


def measure(target: Path, *, quick: bool, steps: int, say: Callable[[str], None]) -> None:
    """Runs everything and writes the raw data. Raises RunFailed if an in-core run fails."""
    results.clear(target, NAME)
    shared: dict[str, Any] = {"quick": quick, "threads": torch_threads(), "chunk_bytes": 4 * CHUNK_BYTES}
    (ROOT / "out").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tier-", dir=ROOT / "out") as disk:
        for name, (workload, link) in PROGRAMS.items():
            first = run(workload, steps, **shared) | {"mode": IN_CORE}
            results.save(target, NAME, f"{name}-{IN_CORE}", first)
            live = int(first["summary"]["live_peak_bytes"])
            for x in OVERSUBSCRIPTIONS[: 1 if quick else None]:
                for share in SHARES[: 1 if quick else None]:
                    budget = int(live / x)
                    frame = {
                        "workload": name,
                        "mode": NAME,
                        "oversubscription": x,
                        "share": share,
                        "link_bytes_per_second": link,
                        "budget_bytes": budget,
                        "host_budget_bytes": int((live - budget) * share),
                    }
                    limits = {key: frame[key] for key in ("budget_bytes", "host_budget_bytes")}
                    try:
                        record = run(workload, steps, bytes_per_second=link, disk=Path(disk), **limits, **shared)
                        record["environment"].pop("OOC_DISK")  # where a checkout is says nothing to others
                        record |= frame
                        said = f"step {median(record):.3f} s, predicted {statistics.median(predictions([record])):.3f}"
                        said += f", simulated {statistics.median(ratios([record], 'simulated_seconds')):.3f} of it"
                    except RunFailed as failure:
                        record = frame | {"failed": reason(str(failure)), "machine": machine.describe()}
                        said = str(record["failed"])
                    results.save(target, NAME, f"{name}-{x:g}x-{share:g}", record)
                    say(f"{name} {x:g}x, host memory for {share:g}: {said}")


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    in_core = {record["workload"]: record for record in records if record["mode"] == IN_CORE}
    rows = []
    for record in records:
        if record["mode"] == IN_CORE:
            continue
        first = in_core[record["workload"]]
        title = f"{record['workload']} {record['oversubscription']:g}x, host memory for {record['share']:g}"
        if "failed" in record:
            rows.append([title, record["failed"], *[""] * 8])
            continue
        said, steps = record["summary"], len(record["steps"])
        moved = [results.mib(said[f"disk_{way}_bytes"] / steps) for way in ("read", "written")]
        rows.append(
            [
                title,
                f"{median(record):.3f}",
                f"{median(record) / median(first):.2f}",
                f"{statistics.median(predictions([record])):.3f}",
                f"{statistics.median(ratios([record], 'simulated_seconds')):.3f}",
                results.mib(said["host_peak_bytes"]),
                *moved,
                f"{waiting(record):.0%}",
                "yes" if record["digest"] == first["digest"] else "NO",
            ]
        )
    if not rows:
        return ""
    header = "case|step s|/ in-core|predicted/step|simulated/step|host MiB|read MiB a step|written|waiting|identical"
    words = machine.words(records[0]["machine"])
    return f"{words}; the device and its link are emulated, the disk is real.\n\n" + results.markdown(
        header.split("|"), rows
    )
