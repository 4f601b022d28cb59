"""What planning benchmarks share: record a model with fake tensors, plan with a policy, simulate, keep the figures."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from benchmarks import machine
from benchmarks.models import NAMED
from benchmarks.planning.validator import validate
from swapd.devices.roofline import GIB, Device, get_device
from swapd.planning.lower_bound import bound, lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import get
from swapd.simulation.simulator import SimulationResult, simulate
from swapd.trace.trace import Trace

SIMULATED = "simulated: fake tensors, roofline times; no GPU was measured"


@lru_cache(maxsize=64)
def trace_of(model: str, batch: int, device: str, mode: str = "training", **arguments: Any) -> Trace:
    """The trace of `benchmarks.models.NAMED[model]` with the roofline times of a device, recorded once a process."""
    from ooc.pytorch.fake import record

    if mode != "training":
        arguments = {"mode": mode, **arguments}
    return record(NAMED[model], batch, get_device(device), **arguments)


def origin(device: str) -> dict[str, Any]:
    """What a record says of where its figures come from."""
    return {"kind": SIMULATED, "planned_on": machine.describe(), "device": device_facts(get_device(device))}


def device_facts(device: Device) -> dict[str, Any]:
    """What the simulation takes for the device."""
    link = device.link
    return {
        "name": device.name,
        "memory_gib": round(device.memory_bytes / GIB, 2),
        "link_gb_per_second": [link.out_bytes_per_second / 1e9, link.in_bytes_per_second / 1e9],
        "latency_seconds": link.latency_seconds,
    }


def problem_facts(problem: Problem) -> dict[str, Any]:
    """The problem in figures: sizes in bytes, times in seconds."""
    worst = int(problem.pinned.argmax()) if problem.functions else 0
    facts: dict[str, Any] = {
        "functions": problem.functions,
        "budget_bytes": problem.budget_bytes,
        "live_peak_bytes": (problem.live_peak_chunks + problem.slab_chunks) * problem.chunk_bytes,
        "largest_function": problem.names[worst],
        "min_budget_bytes": problem.min_budget_bytes,
        "compute_seconds": problem.compute_seconds,
    }
    if problem.min_budget_bytes <= problem.budget_bytes:
        facts["lower_bound_seconds"] = lower_bound(problem)
        facts["two_phase_bound_seconds"] = bound(problem).seconds
    return facts


def planned(problem: Problem, policy: str, check: bool = False) -> dict[str, Any]:
    """Plan and simulate. `refused` says why there is no plan; `check` asks the naive validator, which takes seconds.

    Raises:
        RuntimeError: the plan is unsound, so its figures would mean nothing.
    """
    began = time.perf_counter()
    try:
        plan = get(policy)(problem, None)
    except InfeasibleError as error:
        return {"policy": policy, "refused": str(error)}
    spent = time.perf_counter() - began
    timeline = simulate(problem, plan)
    defects: list[Any] = list(validate(problem, plan)) if check else []
    if timeline.peak_chunks > problem.capacity_chunks:
        defects.append("it exceeds the budget")
    if timeline.demand_in_count or timeline.demand_out_count:
        defects.append("something had to move that it does not move")
    if defects:
        raise RuntimeError(f"the plan of {policy} is unsound: {defects[:3]}")
    return {"policy": policy, "plan_seconds": round(spent, 3), "window_bytes": plan.window_bytes} | figures(
        problem, timeline
    )


def demand(problem: Problem) -> dict[str, Any]:
    """What happens without a plan."""
    return {"policy": "demand"} | figures(problem, simulate(problem, Plan()))


def figures(problem: Problem, timeline: SimulationResult) -> dict[str, Any]:
    """A timeline in figures."""
    return {
        "seconds": timeline.seconds,
        "stall_seconds": timeline.stall_seconds,
        "out_bytes": timeline.out_bytes,
        "in_bytes": timeline.in_bytes,
        "dropped_bytes": timeline.dropped_bytes,
        "write_back_bytes": timeline.write_back_bytes,
        "average_bytes": round(timeline.average_chunks * problem.chunk_bytes),
        "peak_bytes": timeline.peak_chunks * problem.chunk_bytes,
    }
