"""Recomputation beside swapping, in simulation: links on which swapping alone takes two and four times the computation.

Arms: `auto`, which swaps alone; what `swapd.recompute.choice` chooses, with and without normalisations by batch (which
the program has to call without their running statistics then); Capuchin's swap-then-recompute; and checkpointing of
segments, with the number of segments that is fastest. All of them swap what they do not drop, planned by `auto`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning.cases import origin, trace_of
from benchmarks.planning.suite import Workload
from swapd.planning.lower_bound import lower_bound
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.recompute.bound import recompute_bound
from swapd.recompute.candidates import Drop, find_candidates
from swapd.recompute.choice import choose
from swapd.recompute.history import History
from swapd.recompute.published import checkpointed, swap_then_recompute
from swapd.recompute.rewriting import rewrite
from swapd.trace.trace import Machine, Trace

NAME = "recompute"
OVERSUBSCRIPTIONS = (2.0, 4.0, 8.0)
SLOWDOWNS = (2.0, 4.0)  # how many times the computation swapping alone takes at least
SEGMENTS = (2, 4, 8, 16, 32, 64)
LATENCY_SECONDS = 10e-6
WORKLOADS = (
    Workload("resnet50", 240),
    Workload("densenet121", 160),
    Workload("gpt2_small", 8, "a100-pcie4"),
    Workload("gpt2_medium", 4, "a100-pcie4"),
    Workload("llama_1b", 8, "a100-pcie4"),
)
QUICK = WORKLOADS[:1]


def held_link(trace: Trace, budget_bytes: int, seconds: float) -> Machine:
    """A link on which the lower bound of swapping alone is `seconds`."""
    low, high = 1e7, 1e13
    while high > 1.002 * low:
        rate = (low * high) ** 0.5
        problem = Problem.from_trace(trace, budget_bytes, machine=Machine(rate, rate, LATENCY_SECONDS))
        if lower_bound(problem, 128) > seconds:
            low = rate
        else:
            high = rate
    return Machine(high, high, LATENCY_SECONDS)


def dropped(history: History, drops: Sequence[Drop], make_problem: Callable[[Trace], Problem]) -> dict[str, Any]:
    """The figures of drops that another way chose; `refused` if a function does not fit."""
    rewritten = rewrite(history, drops)
    try:
        plan = make_plan(make_problem(rewritten.trace))
    except InfeasibleError as error:
        return {"refused": str(error)}
    return {
        "seconds": plan.predicted_seconds,
        "drops": len(set(drops)),
        "repeated_seconds": rewritten.repeated_seconds,
    }


def case(trace: Trace, oversubscription: float, slowdown: float) -> dict[str, Any] | None:
    """All arms; None if a function alone needs more than the budget."""
    whole = Problem.from_trace(trace, 0)
    budget = int((whole.live_peak_chunks + whole.slab_chunks) / oversubscription) * whole.chunk_bytes
    if whole.min_budget_bytes > budget:
        return None
    machine = held_link(trace, budget, slowdown * whole.compute_seconds)
    make_problem = partial(Problem.from_trace, budget_bytes=budget, machine=machine)
    problem = make_problem(trace)
    began = time.process_time()
    alone = make_plan(problem)
    spent = time.process_time() - began
    arms: list[dict[str, Any]] = [{"arm": "swap only", "seconds": alone.predicted_seconds, "planning_seconds": spent}]
    for without in (False, True):
        history = History(trace, without_statistics=without)
        both = History.beside(problem, trace, without_statistics=without)
        if without and not any("batch_norm" in name for name in trace.function_names):
            break
        label = ", statistics left out" if without else ""
        began = time.process_time()
        choice = choose(trace, make_problem, swap_only=alone, without_statistics=without)
        again = choice.rewritten.repeated_seconds if choice.rewritten is not None else 0.0
        arms.append(
            {
                "arm": f"recompute{label}",
                "seconds": choice.seconds,
                "drops": len(choice.drops),
                "repeated_seconds": again,
                "planning_seconds": time.process_time() - began + spent,
                "bound_seconds": recompute_bound(problem, both, find_candidates(both, final=True)),
            }
        )
        over = problem.live > problem.capacity_chunks
        found = find_candidates(history, least_bytes=problem.chunk_bytes, during=over)
        capuchin = dropped(history, swap_then_recompute(problem, found), make_problem)
        arms.append({"arm": f"swap, then recompute{label}", **capuchin})
        tried = [dropped(history, checkpointed(problem, found, count), make_problem) for count in SEGMENTS]
        arms.append({"arm": f"checkpointed{label}", **min(tried, key=lambda row: row.get("seconds", float("inf")))})
    return {
        "oversubscription": oversubscription,
        "slowdown": slowdown,
        "budget_bytes": budget,
        "link_bytes_per_second": machine.in_bytes_per_second,
        "compute_seconds": problem.compute_seconds,
        "swap_only_bound_seconds": lower_bound(problem),
        "functions": problem.functions,
        "arms": arms,
    }


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data of every workload, a file each."""
    results.clear(target, NAME)
    for workload in QUICK if quick else WORKLOADS:
        trace = trace_of(workload.model, workload.batch, workload.device)
        made = [case(trace, x, slowdown) for x in OVERSUBSCRIPTIONS for slowdown in SLOWDOWNS]
        cases = [one for one in made if one is not None]
        record = {"workload": workload.name, "batch": workload.batch, "cases": cases}
        results.save(target, NAME, workload.name, record | origin(workload.device))
        for one in cases:
            times = (f"{row['arm']} {_times(one, row)}" for row in one["arms"])
            say(f"{workload.name} at {one['oversubscription']:g}x, {one['slowdown']:g}: {'; '.join(times)}")


# ---- tables ----------------------------------------------------------------------------------------------------------


def _times(made: dict[str, Any], row: dict[str, Any], key: str = "seconds") -> str:
    return f"{row[key] / made['compute_seconds']:.2f}" if key in row else "-"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    rows = []
    for record in records:
        for made in record["cases"]:
            swap_only = made["arms"][0]["seconds"]
            label = (
                f"{record['workload']}, {made['oversubscription']:g}x, {made['link_bytes_per_second'] / 1e9:.1f} GB/s"
            )
            for row in made["arms"]:
                bound = {"bound_seconds": made["swap_only_bound_seconds"], **row} if row is made["arms"][0] else row
                share = f"{row['seconds'] / swap_only:.2f}" if "seconds" in row else "-"
                spent = f"{row['planning_seconds']:.2f}" if "planning_seconds" in row else "-"
                times = [_times(made, bound, key) for key in ("seconds", "bound_seconds", "repeated_seconds")]
                rows.append([label, row["arm"], times[0], share, times[1], times[2], spent])
                label = ""
    if not rows:
        return ""
    header = ["case", "arm", "step", "of swap only", "bound", "computed again", "planning s"]
    return (
        "Step, bound and what is computed again in times of the computation. The links are such that swapping alone "
        "takes at least two and four times that. Seconds of planning are of the processor, swapping included.\n\n"
    ) + results.markdown(header, rows)
