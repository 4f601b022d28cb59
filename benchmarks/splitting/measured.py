"""Measures convolutions, divides them under limits of workspace, and runs the divisions beside the undivided ones.

python -m benchmarks.splitting.measured [--quick] [--networks NAME ...] [--rounds N] [--tables] [--output FOLDER]

Everything of a network happens in one process, which has its memory from the emulated device with room to spare. Each
kernel is one of BackwardFilter, BackwardData and Forward of a layer. WR gives each kernel a limit of its own, WD gives
all of them together as much as that times their number, as in micro-cuDNN (section IV-B2).

A division is only kept where it is faster than the whole kernel when both run in turns. Then whole passes over all
kernels are timed, one plan after the other, round by round, so that each round has every plan and the undivided ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ooc
from benchmarks import machine, results
from benchmarks.runs import ROOT
from benchmarks.splitting import convolutions, plans, tables
from benchmarks.splitting.convolutions import Layer
from benchmarks.splitting.plans import MIB, Plan
from ooc.pytorch.splitting.kernels import CPU, KINDS, Kernel
from ooc.pytorch.splitting.measure import Effort, Measurer, live_during, measured_sizes
from swapd.splitting.configurations import Configuration, MicroConfiguration
from swapd.splitting.store import Store

NAME = "measured"
# Batches so small that all of it takes some minutes on two cores; a policy `all` measures every size up to them.
NETWORKS: dict[str, tuple[Callable[[], list[Layer]], int, int]] = {  # layers, batch, rounds
    "AlexNet": (convolutions.alexnet, 8, 7),
    "ResNet-18": (convolutions.resnet18, 4, 7),
    "ResNet-50": (convolutions.resnet50, 4, 5),
    "DenseNet-40": (convolutions.densenet40, 8, 7),
    "DeepBench": (convolutions.deepbench, 2, 3),
}
LIMITS_MIB = (8, 64, 512)
TURNS = 7  # and a division has to be faster in all of them but one: by chance that is so in 6% of cases
BUDGET = "6GiB"


Work = tuple[Layer, str]  # a kernel of a layer


class Operands:
    """Views of three buffers, as large as the largest kernel needs: values do not change how long it takes."""

    def __init__(self, layers: Sequence[Layer], batch: int) -> None:
        shapes = [layer.shapes(batch) for layer in set(layers)]
        generator = torch.Generator().manual_seed(1)
        self.batch = batch
        self.buffers = [torch.randn(max(map(math.prod, each)), generator=generator) for each in zip(*shapes)]

    def of(self, work: Work) -> Kernel:
        layer, kind = work
        pairs = zip(self.buffers, layer.shapes(self.batch))
        return layer.kernel(kind, [buffer[: math.prod(shape)].view(shape) for buffer, shape in pairs])


def execute(kernel: Kernel, chosen: Configuration) -> Sequence[Any]:
    return kernel.run([(part.batch, CPU[part.algorithm]) for part in chosen.parts])


def confirm(kernel: Kernel, divided: Configuration, whole: Configuration) -> bool:
    """Whether a division is faster than the whole kernel, both in turns."""

    def seconds(chosen: Configuration) -> float:
        began = time.perf_counter()
        execute(kernel, chosen)
        return time.perf_counter() - began

    turns = [(seconds(divided), seconds(whole)) for _ in range(TURNS + 1)]
    return plans.clearly_faster(turns[1:])  # the first is the warm-up


def executed_workspace(kernel: Kernel, chosen: Configuration) -> int:
    """Bytes that lived at once in a run of a configuration, beyond operands and result."""
    return live_during(lambda: execute(kernel, chosen))


def timed_pass(kernels: Sequence[Kernel], plan: Plan) -> float:
    """Seconds of all kernels, one after the other."""
    began = time.perf_counter()
    for kernel, chosen in zip(kernels, plan.configurations):
        execute(kernel, chosen)
    return time.perf_counter() - began


def measure_network(
    name: str, layers: list[Layer], batch: int, rounds: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The record of one network."""
    began = time.monotonic()
    works = [(layer, kind) for layer in layers for kind in KINDS]
    operands = Operands(layers, batch)
    made_of = {work: operands.of(work) for work in dict.fromkeys(works)}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "measurements.sqlite")
        measurer = Measurer(store, LIMITS_MIB[-1] * MIB, Effort(3, 0.05, 9))
        known = {work: measurer.table(kernel) for work, kernel in made_of.items()}
        again = Measurer(store, LIMITS_MIB[-1] * MIB)
        for kernel in made_of.values():
            again.table(kernel)
    say(
        f"{name}: {measurer.measurements} measurements in {time.monotonic() - began:.0f} s; again: {again.measurements}"
    )
    noise = noise_of([row for table in known.values() for row in table.rows])
    confirmed: dict[tuple[Work, Configuration, Configuration], bool] = {}

    def is_faster(work: Work, divided: Configuration, whole: Configuration) -> bool:
        key = (work, divided, whole)
        if key not in confirmed:
            confirmed[key] = confirm(made_of[work], divided, whole)
        return confirmed[key]

    made = plans.make_plans(
        [known[work] for work in works], works, LIMITS_MIB, float(noise["median"]), is_faster
    )
    different = list(dict.fromkeys(plan.configurations for plan in made))
    say(f"{name}: {len(made)} plans, {len(different)} of them different; {sum(confirmed.values())} divisions confirmed "
        f"of {len(confirmed)}")  # fmt: skip
    workspaces = {
        pair: executed_workspace(made_of[pair[0]], pair[1])
        for pair in dict.fromkeys(pair for chosen in different for pair in zip(works, chosen))
    }
    by_plan = {chosen: next(plan for plan in made if plan.configurations == chosen) for chosen in different}
    seconds: dict[tuple[Configuration, ...], list[float]] = {chosen: [] for chosen in different}
    kernels = [made_of[work] for work in works]
    timed_pass(kernels, made[0])
    for turn in range(rounds):
        turned = different[turn % len(different) :] + different[: turn % len(different)]
        for chosen in turned:
            seconds[chosen].append(timed_pass(kernels, by_plan[chosen]))
    say(f"{name}: done after {time.monotonic() - began:.0f} s")
    return {
        "network": name,
        "batch": batch,
        "layers": len(layers),
        "kernels": len(works),
        "different_kernels": len(known),
        "sizes": measured_sizes("all", batch),
        "threads": torch.get_num_threads(),
        "noise": noise,
        "measurements": measurer.measurements,
        "measurements_of_a_second_run": again.measurements,
        "confirmed": sum(confirmed.values()),
        "not_confirmed": len(confirmed) - sum(confirmed.values()),
        "costs": {str(table.name): [dataclasses.astuple(row) for row in table.rows] for table in known.values()},
        "plans": [_plan_record(plan, works, workspaces, different) for plan in made],
        "executed_seconds": list(seconds.values()),
        "stolen_seconds": machine.stolen_seconds(),
        "seconds_in_all": time.monotonic() - began,
        "machine": machine.describe(),
    }


def _plan_record(
    plan: Plan, works: list[Work], workspaces: dict[Any, int], different: list[tuple[Configuration, ...]]
) -> dict[str, Any]:
    executed = [workspaces[work, chosen] for work, chosen in zip(works, plan.configurations)]
    return {
        "mode": plan.mode,
        "policy": plan.policy,
        "limit_mib": plan.limit_mib,
        "limit_bytes": plan.limit_bytes,
        "over_limit": plan.over_limit,
        "divided": sum(len(chosen.parts) > 1 for chosen in plan.configurations),
        "predicted_seconds": sum(chosen.seconds for chosen in plan.configurations),
        "workspace_bytes": [chosen.workspace_bytes for chosen in plan.configurations],
        "executed_workspace_bytes": executed,
        "parts": [[(part.batch, part.algorithm) for part in chosen.parts] for chosen in plan.configurations],
        "executed": different.index(plan.configurations),
    }


def noise_of(rows: Sequence[MicroConfiguration]) -> dict[str, float | int]:
    """How far repetitions were apart: the interquartile range of each measurement, relative to its median.

    Of these the median and the 90th percentile; 0 where nothing is known.
    """
    relative = [row.spread_seconds / row.seconds for row in rows if row.seconds > 0 and row.spread_seconds > 0]
    median, ninth_decile = np.quantile(relative or [0.0], (0.5, 0.9))
    return {"measurements": len(relative), "median": float(median), "ninth_decile": float(ninth_decile)}


def quick_layers(layers: list[Layer]) -> list[Layer]:
    """The two smallest: they show that it works."""
    return sorted(layers, key=convolutions.operations)[:2]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.splitting.measured", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="two small layers of each: shows that it works")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, help="passes over each plan (default: 3 to 7, by network)")
    parser.add_argument("--tables", action="store_true", help="measure nothing: tables and the picture of the raw data")
    parser.add_argument("--output", type=Path, help="folder (default results/emulated/splitting; out/ with --quick)")
    options = parser.parse_args(arguments)
    kept = results.folder() / "splitting"
    target = options.output or (ROOT / "out" / "splitting-measured" if options.quick else kept)

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)

    if not options.tables:
        load = machine.load()[0]
        if load > 0.5:
            say(f"the load average is {load}: other work disturbs the figures")
        ooc.enable(alloc="emulated", budget=BUDGET, policy="demand", split="off")
        for name in options.networks:
            make, batch, rounds = NETWORKS[name]
            layers = quick_layers(make()) if options.quick else make()
            rounds = options.rounds or (1 if options.quick else rounds)
            record = measure_network(name, layers, min(batch, 3) if options.quick else batch, rounds, say)
            results.save(target, NAME, name, record)
    records = results.load(target, NAME)
    target.mkdir(parents=True, exist_ok=True)
    (target / "measured.md").write_text(tables.text(records), encoding="utf-8")
    print(tables.text(records))
    try:
        say(f"drawn: {tables.draw(records, target / 'measured.png')}")
    except ImportError:
        say("no picture: matplotlib is not installed (the extra `report`)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
