"""Three tiers in simulation: an H100 on PCIe 5 over 64 GiB of host memory over an NVMe drive.

GPT in float32 and Llama in bfloat16, trained with AdamW, whose weights, gradients and optimizer state are about two and
four times the host memory; activations come on top. Arms:

    auto            both levels planned; the first level's plan is chosen by what both make of it
    no second plan  the same first level; when room is needed, the blocks whose next use is furthest go to the disk
    demand          no plan on either level
    zero_infinity   ZeRO-Infinity's streaming on both levels (`swapd.policies.published.zero_infinity`); with `_tuned`
                    only the optimizer's state streams where that is faster
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning.cases import origin, trace_of
from benchmarks.planning.validator import validate
from swapd.devices.roofline import GB, GIB
from swapd.observing.analysis import tier_facts
from swapd.planning.lower_bound import lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.tiers.three_tiers import DISK_LATENCY_SECONDS, LowerTiers, ThreeTiers, plan_tiers, run_tiers
from swapd.trace.trace import Machine

NAME = "tiers"
DEVICE = "h100-pcie5"
DEVICE_BYTES, HOST_BYTES = 80 * GIB, 64 * GIB
DISK = Machine(7 * GB, 7 * GB, DISK_LATENCY_SECONDS)  # sequential reads of a PCIe 4 NVMe drive; few write as fast
LOWER = LowerTiers(HOST_BYTES, DISK)
ARMS = ("auto", "no second plan", "demand", "zero_infinity", "zero_infinity_tuned")


@dataclass(frozen=True)
class Workload:
    """A model with so many layers; its state is about `times` the host memory."""

    model: str
    layers: int
    times: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.times}x"


WORKLOADS = (
    Workload("gpt2_5120", 27, 2, 4),
    Workload("gpt2_5120", 54, 4, 4),
    Workload("llama_6656", 32, 2, 2),
    Workload("llama_6656", 64, 4, 2),
)
QUICK = WORKLOADS[:1]


def problem_of(workload: Workload) -> Problem:
    """The workload in the device's memory."""
    return Problem.from_trace(trace_of(workload.model, workload.batch, DEVICE, layers=workload.layers), DEVICE_BYTES)


def state_bytes(problem: Problem) -> int:
    """Bytes of weights, optimizer state and gradients; these are as large as the weights, a third of what survives."""
    kept = int(problem.chunks[problem.successor >= 0].sum()) * problem.chunk_bytes
    return kept * 4 // 3


def arm(problem: Problem, name: str, ours: ThreeTiers) -> dict[str, Any]:
    """One arm. `ours` has the first level that `auto` chose.

    Raises:
        RuntimeError: a plan is unsound, so its figures would mean nothing.
    """
    began = time.perf_counter()
    try:
        if name == "no second plan":
            tiers = run_tiers(ours.level.problem, ours.level.plan, LOWER, None)
        elif name == "demand":
            tiers = run_tiers(problem, Plan(), LOWER, None)
        else:
            tiers = plan_tiers(problem, LOWER, name)
    except InfeasibleError as error:
        return {"arm": name, "refused": str(error)}
    spent = time.perf_counter() - began
    return {"arm": name, "plan_seconds": round(spent, 3)} | figures(tiers, check=name == "auto")


def figures(tiers: ThreeTiers, check: bool) -> dict[str, Any]:
    """Both levels in figures; `check` asks the naive validator, which takes a minute. Raises RuntimeError, as `arm`."""
    first, second = tiers.level.timeline, tiers.result.second
    for level, timeline, plan in ((tiers.level.problem, first, tiers.level.plan), (tiers.blocks, second, tiers.plan)):
        defects: list[Any] = ["it exceeds the budget"] if timeline.peak_chunks > level.capacity_chunks else []
        if plan:
            moved = timeline.demand_in_count or timeline.demand_out_count
            defects += ["something had to move that it does not move"] if moved else []
            defects += validate(level, plan) if check else []
        if defects:
            raise RuntimeError(f"the plan of {plan.policy} is unsound: {defects[:3]}")
    return {
        "seconds": tiers.seconds,
        "two_tier_seconds": tiers.level.seconds,
        "exclusive": tiers.is_exclusive,
        "second_level": {"functions": tiers.blocks.functions, "variables": tiers.blocks.variables},
        "link_out_bytes": first.out_bytes,
        "link_in_bytes": first.in_bytes,
        **tier_facts(tiers),
    }


def case(problem: Problem) -> dict[str, Any]:
    """All arms on one problem, beside the bounds of each link alone and of both."""
    ours = plan_tiers(problem, LOWER)
    return {
        "functions": problem.functions,
        "budget_bytes": problem.budget_bytes,
        "live_peak_bytes": problem.live_peak_chunks * problem.chunk_bytes,
        "state_bytes": state_bytes(problem),
        "compute_seconds": problem.compute_seconds,
        "lower_bound_seconds": LOWER.bound(problem),
        "first_link_bound_seconds": lower_bound(problem),
        "arms": [arm(problem, name, ours) for name in ARMS],
    }


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data of every workload, a file each."""
    results.clear(target, NAME)
    for workload in QUICK if quick else WORKLOADS:
        made = case(problem_of(workload))
        facts = {"model": workload.model, "layers": workload.layers, "times": workload.times, "batch": workload.batch}
        results.save(target, NAME, workload.name, facts | made | origin(DEVICE))
        ratios = (f"{row['arm']} {_ratio(made, row)}" for row in made["arms"])
        say(f"{workload.name}: {', '.join(ratios)}")


# ---- tables ----------------------------------------------------------------------------------------------------------


def _ratio(made: dict[str, Any], row: dict[str, Any]) -> str:
    return f"{row['seconds'] / made['lower_bound_seconds']:.3f}" if "seconds" in row else "no plan"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    rows = []
    for record in records:
        sizes = f"{record['state_bytes'] / GIB:.0f} GiB state, {record['live_peak_bytes'] / GIB:.0f} GiB live"
        label = f"{record['model']}, {record['layers']} layers, {sizes}"
        for row in record["arms"]:
            bound = f"{record['lower_bound_seconds']:.2f}"
            if "refused" in row:
                rows.append([label, row["arm"], "no plan", bound, *["-"] * 8])
                continue
            waits = [f"{row[f'{link}_stall_seconds']:.2f}" for link in ("link", "disk")]
            moved = [f"{row[f'{way}_bytes'] / GIB:.1f}" for way in ("link_out", "link_in", "disk_write", "disk_read")]
            seconds = [f"{row['seconds']:.2f}", bound, _ratio(record, row)]
            rows.append([label, row["arm"], *seconds, *waits, *moved, f"{row['plan_seconds']:.2f}"])
            label = ""
    if not rows:
        return ""
    first, disk = records[0], records[0]["arms"][0]
    speeds = [f"{disk[f'disk_{way}_bytes_per_second'] / GB:g} GB/s" for way in ("read", "write")]
    columns = ["step s", "bound s", "step / bound", "waits for link s", "for disk s"]
    columns += ["link out GiB", "link in", "disk written", "disk read", "planning s"]
    return (
        f"Simulated: {first['device']['name']} with {first['budget_bytes'] / GIB:.0f} GiB over "
        f"{disk['host_budget_bytes'] / GIB:.0f} GiB of host memory over a disk that reads {speeds[0]} and writes "
        f"{speeds[1]}. The bound is that of both links; waiting for the disk is what a step takes longer than with "
        f"host memory for everything. Seconds of planning include the simulations.\n\n"
    ) + results.markdown(["case", "arm", *columns], rows)
