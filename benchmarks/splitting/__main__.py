"""Solves the workspace division of three networks; writes the raw data and a table.

python -m benchmarks.splitting [--quick] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import ROOT
from benchmarks.splitting.networks import alexnet, resnet, tables
from swapd.splitting.configurations import KernelTable
from swapd.splitting.division import divide_workspace, fronts_of

NAME = "solving"
MIB = 1 << 20
NETWORKS = {
    "AlexNet": (alexnet(), 256),
    "ResNet-50": (resnet("ResNet-50"), 32),
    "ResNet-152": (resnet("ResNet-152"), 128),
}
PER_KERNEL_MIB = (1, 8, 16, 32)  # micro-cuDNN has 8 for AlexNet, 16 and 32 for ResNet-50
POLICIES = ("powerOfTwo", "all")
REPETITIONS = 5


def median_seconds(call: Any, repetitions: int) -> tuple[float, Any]:
    """Wall-clock seconds of a call, and its last result."""
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), result


def point(
    name: str, measured: list[KernelTable], batch: int, policy: str, mib: int, repetitions: int
) -> dict[str, Any]:
    """One network, policy and limit."""
    limit = mib * len(measured) * MIB
    front_seconds, fronts = median_seconds(lambda: fronts_of(measured, limit), 1)
    made = {
        "network": name,
        "batch": batch,
        "policy": policy,
        "limit_bytes": limit,
        "kernels": len(measured),
        "different_kernels": len({table.rows for table in measured}),
        "variables": sum(map(len, fronts.values())),
        "front_seconds": front_seconds,
    }
    seconds, found = median_seconds(lambda: divide_workspace(fronts, limit), repetitions)
    return made | {
        "solving_seconds": seconds,
        "modelled_seconds": sum(chosen.seconds for chosen in found.values()),
        "workspace_bytes": sum(chosen.workspace_bytes for chosen in found.values()),
    }


def table(record: dict[str, Any]) -> str:
    rows = [
        [
            p["network"],
            p["policy"],
            f"{p['limit_bytes'] // MIB:,}",
            f"{p['kernels']} ({p['different_kernels']})",
            f"{p['variables']:,}",
            f"{1e3 * p['front_seconds']:.0f}",
            f"{1e3 * p['solving_seconds']:.1f}",
            f"{1e3 * p['modelled_seconds']:.3f}",
        ]
        for p in record["points"]
    ]
    header = ["network", "policy", "limit MiB", "kernels (different)", "variables"]
    header += ["fronts ms", "solving ms", "kernels ms"]
    load = record["machine"]["load_average"][0]
    return (
        "# Workspace division: how long it takes to solve\n\n"
        "Made by `python -m benchmarks.splitting`; the raw data are in `solving/`. Times of kernels are modelled, "
        f"those of the solver measured: medians of {record['repetitions']}. {machine.words(record['machine'])}; "
        f"load {load}: a busy machine makes them longer.\n\n"
    ) + results.markdown(header, rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.splitting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one limit and policy: shows that it works")
    parser.add_argument("--output", type=Path, help="folder (default results/simulated/splitting; out/ with --quick)")
    options = parser.parse_args(arguments)
    kept = results.folder("simulated") / "splitting"
    target = options.output or (ROOT / "out" / "splitting" if options.quick else kept)
    record = {"machine": machine.describe(), "repetitions": 1 if options.quick else REPETITIONS, "points": []}
    results.clear(target, NAME)
    for name, (layers, batch) in NETWORKS.items():
        for policy in POLICIES[:1] if options.quick else POLICIES:
            measured = tables(layers, batch, policy)
            for mib in PER_KERNEL_MIB[1:2] if options.quick else PER_KERNEL_MIB:
                record["points"].append(point(name, measured, batch, policy, mib, record["repetitions"]))
                p = record["points"][-1]
                print(f"{name} {policy} {mib} MiB a kernel: {p['variables']} variables", flush=True)
                results.save(target, NAME, "networks", record)
    (target / "tables.md").write_text(table(record), encoding="utf-8")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
