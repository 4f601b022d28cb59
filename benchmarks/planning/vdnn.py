"""vDNN's figures 11, 12, 14 and 15: what its policies hold, offload and cost on a Titan X with 12 GB.

The base is the same trace with nothing offloaded, on a device with all the memory that it needs. Memory is that of a
device where the policy's plan runs unhindered; whether it fits into the 12 GB follows from its maximum. Times are in
vDNN's own order of events (`layer_seconds`) and, beside that, as the simulator runs the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning.cases import origin, planned, problem_facts, trace_of
from swapd.devices.roofline import GIB, get_device
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies.published.vdnn import offloading_plan, vdnn
from swapd.simulation.simulator import simulate

NAME = "vdnn"
DEVICE = "titanx-pcie3"
# Model here, batch, name there. Its VGG-16 has sixteen convolutions. No momentum: its programs run no optimizer.
NETWORKS = (
    ("alexnet", 128, "AlexNet (128)"),
    ("overfeat", 128, "OverFeat (128)"),
    ("googlenet", 128, "GoogLeNet (128)"),
    ("vgg19", 64, "VGG-16 (64)"),
    ("vgg19", 128, "VGG-16 (128)"),
    ("vgg19", 256, "VGG-16 (256)"),
    ("vgg19", 32, "VGG-16 (32)"),
    ("vgg116", 32, "VGG-116 (32)"),
    ("vgg216", 32, "VGG-216 (32)"),
    ("vgg316", 32, "VGG-316 (32)"),
    ("vgg416", 32, "VGG-416 (32)"),
)
QUICK = ("AlexNet (128)", "VGG-16 (256)")
POLICIES = ("all", "conv", "dyn")

# What the paper's text says of single networks; (m), (p): with memory-optimal, performance-optimal algorithms. Bars
# without a number in the text are not here.
PUBLISHED: dict[str, str] = {
    "AlexNet (128)": "average memory down by up to 89%",
    "OverFeat (128)": "average memory down by up to 91%",
    "GoogLeNet (128)": "average memory down by up to 95%",
    "VGG-16 (128)": "base (p) 15 GB; all (m) at most 4.8 GB at 39% of the speed",
    "VGG-16 (256)": "base (p) 28 GB; average down by 90%; 16 GB offloaded by all; dyn at 82% of the speed",
    "VGG-16 (32)": "base 4.9 GB",
    "VGG-416 (32)": "base 67.1 GB; dyn at most 4.2 GB, no noticeable loss; 81% to 92% on the host for VGG-116 to 416",
}
# Means over the six networks of figures 11 and 14: reduction of maximum and of average memory, speed kept.
PUBLISHED_MEANS: dict[str, str] = {
    "all": "73% and 93% (m), 64% and 90% (p); speed 42% (m)",
    "conv": "52% and 76% (p); speed 45% (m)",
    "dyn": "49% and 69%; speed 97%, 82% at the worst",
}


def problem_of(model: str, batch: int) -> Problem:
    """The problem on the device as it is."""
    return Problem.from_trace(trace_of(model, batch, DEVICE, momentum=0.0), get_device(DEVICE).memory_bytes)


def unhindered(problem: Problem) -> Problem:
    """The same with all the memory that it needs."""
    chunks = problem.live_peak_chunks
    budget = (chunks + problem.slab_chunks) * problem.chunk_bytes
    return replace(problem, capacity_chunks=chunks, budget_bytes=budget)


def _plan(problem: Problem, free: Problem, policy: str) -> tuple[str, Plan]:
    """What the policy offloads ("all", "conv", "nothing"), and the plan of it."""
    chosen = policy
    if policy == "dyn":
        chosen = "nothing"
        if not problem.fits:
            dynamic = vdnn(problem, "vdnn_dyn")
            chosen = "conv" if dynamic.outs == _outs_of_conv(problem) else "all"
    return chosen, Plan() if chosen == "nothing" else offloading_plan(free, f"vdnn_{chosen}")


def _outs_of_conv(problem: Problem) -> Any:
    try:
        return vdnn(problem, "vdnn_conv").outs
    except InfeasibleError:
        return None


def layer_seconds(problem: Problem, plan: Plan) -> float:
    """The time of an iteration in vDNN's order of events: each function waits for the move that started with it.

    An offload runs beside the last function that reads its X, and holds the next function back until it is done. A
    prefetch does the same beside the function that it starts with (section III-B, figure 9). Moves that start with the
    same function follow each other.
    """
    machine = problem.machine
    busy = [0.0] * (problem.functions + 1)
    times: list[float] = problem.seconds.tolist()
    for out in plan.outs:
        size = out.chunk_count * problem.chunk_bytes
        busy[out.after_function] += machine.latency_seconds + size / machine.out_bytes_per_second
    for move in plan.ins:
        size = move.chunk_count * problem.chunk_bytes
        busy[move.after_function + 1] += machine.latency_seconds + size / machine.in_bytes_per_second
    return sum(max(seconds, wait) for seconds, wait in zip(times, busy))


def figures(problem: Problem, policy: str) -> dict[str, Any]:
    """A policy on a network: bytes and seconds."""
    free = unhindered(problem)
    try:
        chosen, plan = _plan(problem, free, policy)
    except InfeasibleError as error:
        return {"policy": policy, "refused": str(error)}
    timeline = simulate(free, plan)
    chunk = problem.chunk_bytes
    return {
        "policy": policy,
        "offloads": chosen,
        "average_bytes": round(timeline.average_chunks + problem.slab_chunks) * chunk,
        "maximum_bytes": (timeline.peak_chunks + problem.slab_chunks) * chunk,
        "offloaded_bytes": sum(out.chunk_count for out in plan.outs) * chunk,
        "layer_seconds": layer_seconds(free, plan),
        "simulated_seconds": timeline.seconds,
    }


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data of every network, a file each."""
    results.clear(target, NAME)
    for place, (model, batch, name) in enumerate(NETWORKS):
        if quick and name not in QUICK:
            continue
        problem = problem_of(model, batch)
        rows = [figures(problem, policy) for policy in POLICIES]
        record = {"network": name, "model": model, "batch": batch} | problem_facts(problem)
        record |= {"policies": rows, "ours": planned(problem, "auto")}
        results.save(target, NAME, f"{place:02d}-{model}-{batch}", record | origin(DEVICE))
        say(f"{name}: " + ", ".join(f"{row['policy']} {_speed(record, row):.0%}" for row in rows))


# ---- tables ----------------------------------------------------------------------------------------------------------


def _speed(record: dict[str, Any], row: dict[str, Any]) -> float:
    return record["compute_seconds"] / row["layer_seconds"] if "layer_seconds" in row else 0.0


def saved(record: dict[str, Any], row: dict[str, Any], which: str) -> float:
    """The part of the base's live peak that a policy does without."""
    return float(1 - row[f"{which}_bytes"] / record["live_peak_bytes"])


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    if not records:
        return ""
    rows: list[list[Any]] = []
    for record in records:
        for row in record["policies"]:
            label = [record["network"] if row["policy"] == "all" else "", row["policy"]]
            if "refused" in row:
                rows.append([*label, "no plan", *[""] * 7])
                continue
            fits = "yes" if row["maximum_bytes"] <= record["budget_bytes"] else "no"
            sizes = [f"{row[name] / GIB:.2f}" for name in ("average_bytes", "maximum_bytes", "offloaded_bytes")]
            down = [f"{saved(record, row, which):.0%}" for which in ("average", "maximum")]
            speeds = [f"{_speed(record, row):.0%}", f"{record['compute_seconds'] / row['simulated_seconds']:.0%}"]
            rows.append([*label, row["offloads"], *sizes, *down, fits, *speeds])
    header = ["network", "policy", "offloads", "average GiB", "maximum GiB", "offloaded GiB"]
    header += ["average saved", "maximum saved", "fits 12 GiB", "speed", "speed, simulator"]
    text = (
        f"Simulated: {records[0]['device']['name']}, float32, one algorithm for each convolution. Savings are of the "
        "base's live peak, speed is of the base with enough memory: in vDNN's order of events, and as the simulator "
        "runs the same moves.\n\n"
    ) + results.markdown(header, rows)
    base = []
    for r in records:
        ours = r["compute_seconds"] / r["ours"]["seconds"]
        published = PUBLISHED.get(r["network"], "-")
        base.append([r["network"], f"{r['live_peak_bytes'] / GIB:.1f}", f"{ours:.0%}", published])
    text += "\n" + results.markdown(["network", "base GiB, here", "`auto` in 12 GiB, speed", "the paper's text"], base)
    six = [record for record in records if record["batch"] != 32]
    return text + "\n" + results.markdown(["policy", "means here, six networks", "the paper's"], _means(six))


def _means(records: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for policy in POLICIES:
        found = [(r, row) for r in records for row in r["policies"] if row["policy"] == policy and "refused" not in row]
        if not found:
            continue
        values = [
            sum(f(r, row) for r, row in found) / len(found)
            for f in (lambda r, w: saved(r, w, "maximum"), lambda r, w: saved(r, w, "average"), _speed)
        ]
        here = "{:.0%} and {:.0%}; speed {:.0%}".format(*values)
        rows.append([policy, here, PUBLISHED_MEANS[policy]])
    return rows
