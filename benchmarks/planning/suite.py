"""Every policy beside the lower bound: nine models, training and inference, at 1.25 to 8 times the budget.

The budget is the live peak, slabs included, divided by the oversubscription: a share of the device's memory, as a
program gets it that is not alone there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning.cases import demand, origin, planned, problem_facts, trace_of
from swapd.planning.problem import Problem
from swapd.policies import available

NAME = "suite"
OVERSUBSCRIPTIONS = (1.25, 2.0, 4.0, 8.0)
NEAR, FAR = 1.05, 1.15  # of the lower bound: what most cases and what all cases are to be within
SHARE = 0.8  # of the cases that are to be near
TOLERANCE = 1.005  # `auto` keeps the plan that moves least among those so close to the fastest


@dataclass(frozen=True)
class Workload:
    """A model, the batch that it runs at, and the device whose roofline gives the times."""

    model: str
    batch: int
    device: str = "v100-nvlink2"
    mode: str = "training"
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.mode}"


# Training batches are such that a live peak is 1.25 times the device's memory at most, and, where single functions
# allow it, that eight times less is enough for the largest one. Inference is of one image or one text.
WORKLOADS = (
    Workload("resnet50", 240),
    Workload("densenet121", 160),
    Workload("vgg16", 240),
    Workload("pix2pixhd", 5),
    Workload("deeplabv3plus", 27),
    Workload("unet", 20),
    Workload("gpt2_medium", 2, "a100-pcie4"),
    Workload("llama_1b", 1, "a100-pcie4"),
    Workload("lstm", 32),
    Workload("resnet50", 1, mode="inference"),
    Workload("densenet121", 1, mode="inference"),
    Workload("vgg16", 1, mode="inference"),
    Workload("pix2pixhd", 1, mode="inference"),
    Workload("deeplabv3plus", 1, mode="inference"),
    Workload("unet", 1, mode="inference"),
    Workload("gpt2_medium", 1, "a100-pcie4", "inference", {"length": 128}),
    Workload("llama_1b", 1, "a100-pcie4", "inference", {"length": 128}),
    Workload("lstm", 20, mode="inference"),
)
QUICK = ("vgg16-training", "unet-training", "lstm-inference")


def problem_of(workload: Workload, oversubscription: float) -> Problem:
    """The problem of running the workload in that part of its live peak."""
    trace = trace_of(workload.model, workload.batch, workload.device, workload.mode, **workload.arguments)
    whole = Problem.from_trace(trace, 0)
    peak = whole.live_peak_chunks + whole.slab_chunks
    return Problem.from_trace(trace, int(peak / oversubscription) * whole.chunk_bytes)


def case(problem: Problem, oversubscription: float) -> dict[str, Any]:
    """All policies on one problem."""
    facts = {"oversubscription": oversubscription} | problem_facts(problem)
    if problem.min_budget_bytes > problem.budget_bytes:
        return facts | {"policies": []}
    return facts | {
        "policies": [planned(problem, name, check=name == "auto") for name in available()] + [demand(problem)]
    }


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data of every workload, a file each."""
    results.clear(target, NAME)
    for workload in WORKLOADS:
        if quick and workload.name not in QUICK:
            continue
        cases = []
        for x in OVERSUBSCRIPTIONS:
            made = case(problem_of(workload, x), x)
            cases.append(made)
            say(f"{workload.name} at {x:g}x: {verdict(made)}")
        record = {"workload": workload.name, "batch": workload.batch, "arguments": workload.arguments}
        results.save(target, NAME, workload.name, record | {"cases": cases} | origin(workload.device))


# ---- tables ----------------------------------------------------------------------------------------------------------


def ratio(made: dict[str, Any], policy: str) -> float | None:
    """A policy's time over the lower bound; None where it has no plan."""
    found = next((row for row in made["policies"] if row["policy"] == policy), {})
    return found["seconds"] / made["lower_bound_seconds"] if "seconds" in found else None


def best_other(made: dict[str, Any]) -> tuple[str, float]:
    """The fastest policy but for ours, and its time over the lower bound."""
    others = [row["policy"] for row in made["policies"] if row["policy"] not in ("auto", "demand")]
    pairs = [(value, name) for name in others if (value := ratio(made, name)) is not None]
    value, name = min(pairs)
    return name, value


def verdict(made: dict[str, Any]) -> str:
    """A few words for who watches."""
    ours = ratio(made, "auto")
    if ours is None:
        return f"{made['largest_function']} alone needs {results.mib(made['min_budget_bytes'])} MiB"
    name, other = best_other(made)
    return f"auto {ours:.3f}, {name} {other:.3f}"


def feasible(records: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The cases in which each function fits by itself, with their workload's name."""
    return [(record["workload"], made) for record in records for made in record["cases"] if made["policies"]]


def summary(records: list[dict[str, Any]]) -> str:
    """How many cases are as near to the bound as they should be, and where ours is not the fastest."""
    cases = feasible(records)
    ratios = {(name, made["oversubscription"]): ratio(made, "auto") or 0.0 for name, made in cases}
    near = sum(value <= NEAR for value in ratios.values())
    lines = [
        f"{len(cases)} cases are feasible. `auto` is within {NEAR - 1:.0%} of the lower bound on {near} of them "
        f"({near / max(1, len(cases)):.0%}), within {FAR - 1:.0%} on {sum(v <= FAR for v in ratios.values())}."
    ]
    far = [f"{name} at {x:g}x ({value:.3f})" for (name, x), value in ratios.items() if value > FAR]
    if far:
        lines.append(f"Further away: {', '.join(far)}.")
    behind, strictly = [], 0
    for name, made in cases:
        other, best = best_other(made)
        ours = ratio(made, "auto") or 0.0
        strictly += ours > best * (1 + 1e-9)
        if ours > TOLERANCE * best:
            behind.append(f"{name} at {made['oversubscription']:g}x ({other} takes {best / ours:.3f} of its time)")
    lines.append(
        f"Another policy is faster on {strictly} cases, by more than the {TOLERANCE - 1:.1%} that `auto` gives up for "
        f"fewer transfers on {len(behind)}{': ' + '; '.join(behind) if behind else ''}."
    )
    return "\n".join(lines) + "\n"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    if not records:
        return ""
    names = sorted({row["policy"] for _, made in feasible(records) for row in made["policies"]} - {"auto"})
    rows = []
    for record in records:
        for made in record["cases"]:
            label = f"{record['workload']} {made['oversubscription']:g}x"
            budget = results.mib(made["budget_bytes"])
            if not made["policies"]:
                need = f"{made['largest_function']} alone needs {results.mib(made['min_budget_bytes'])} MiB"
                rows.append([label, budget, need] + [""] * (len(names) + 1))
                continue
            phases = made["lower_bound_seconds"] / made["compute_seconds"]
            values = [ratio(made, name) for name in ("auto", *names)]
            rows.append([label, budget, f"{phases:.2f}"] + ["-" if v is None else f"{v:.3f}" for v in values])
    workloads = ", ".join(f"{r['workload']} {r['batch']} on {r['device']['name']}" for r in records)
    return (
        f"Simulated. A policy's time over the lower bound; - where it finds no plan. Batches: {workloads}.\n\n"
        + summary(records)
        + "\n"
        + results.markdown(["case", "budget MiB", "bound / compute", "auto", *names], rows)
    )
