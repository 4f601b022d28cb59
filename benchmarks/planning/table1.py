"""The seed paper's table 1: ResNet-50 at growing batches in 16 GB, and the largest batch of each policy.

Two searches: the batch at which the largest function alone fills the memory (which no schedule passes), to one image;
and the largest batch of each policy below it, in steps of `STEP`, by bisection, which takes it that a policy that finds
no plan for a batch finds none for a larger one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning.cases import origin, planned, problem_facts, trace_of
from swapd.devices.roofline import GIB
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import get

NAME = "table1"
MODEL, DEVICE, BUDGET_BYTES = "resnet50", "v100-nvlink2", 16 * GIB
POLICIES = ("lms", "lms_best_fit", "window_best_fit", "window", "nnabla", "auto")
BATCHES = (64, 128, 190, 256, 512, 928, 1120, 1248, 1440)
QUICK_BATCHES = (64, 928)
STEP = 16

# Table 1 of the paper, images per second; LMS was measured on a P100 by Le et al., the rest on a V100. The percentages
# of the paper's text are of the best throughput in-core, 258 and 581.
PUBLISHED: dict[str, dict[int, int]] = {
    "LMS": {64: 235, 128: 255, 190: 241, 256: 236, 512: 209, 928: 137},
    "schedule": {64: 320, 128: 439, 190: 533, 256: 559, 512: 457, 928: 400},
    "schedule + VA": {
        64: 304, 128: 389, 190: 415, 256: 424, 512: 446, 928: 409, 1120: 398, 1248: 347, 1440: 321,
    },
}  # fmt: skip
IN_CORE = {"LMS": 258, "schedule": 581, "schedule + VA": 581}
COUNTERPART = {"LMS": "lms_best_fit", "schedule": "window_best_fit", "schedule + VA": "window"}


def problem_of(batch: int) -> Problem:
    return Problem.from_trace(trace_of(MODEL, batch, DEVICE), BUDGET_BYTES)


def plans(batch: int, policy: str) -> bool:
    """Whether the policy finds a plan."""
    try:
        get(policy)(problem_of(batch), None)
    except InfeasibleError:
        return False
    return True


def limit() -> int:
    """The largest batch whose every function fits by itself."""

    def fits(batch: int) -> bool:
        problem = problem_of(batch)
        return problem.min_budget_bytes <= problem.budget_bytes

    known = BATCHES[-1]
    batch = known * BUDGET_BYTES // problem_of(known).min_budget_bytes  # functions grow in proportion, roughly
    while not fits(batch):
        batch -= 1
    while fits(batch + 1):
        batch += 1
    return batch


def largest(policy: str, highest: int) -> int:
    """The largest multiple of `STEP` up to `highest` that the policy finds a plan for, by bisection."""
    low, high = 0, highest // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plans(middle * STEP, policy) else (low, middle - 1)
    return low * STEP


def row(batch: int, check: bool = True) -> dict[str, Any]:
    """All policies at one batch; `check` asks the validator, which takes seconds."""
    problem = problem_of(batch)
    made = [planned(problem, name, check) for name in POLICIES]
    return {"batch": batch} | problem_facts(problem) | {"policies": made}


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data: one row a batch, and the largest batches."""
    results.clear(target, NAME)
    rows = []
    highest = None if quick else limit()
    for batch in QUICK_BATCHES if quick else (*BATCHES, highest):
        assert batch is not None
        rows.append(row(batch))
        say(f"{MODEL} at batch {batch}: " + ", ".join(f"{name} {kept(rows[-1], name):.0%}" for name in POLICIES))
    found = {}
    if highest is not None:
        for policy in POLICIES:
            found[policy] = largest(policy, highest)
            say(f"largest batch of {policy}: {found[policy]}")
    record = {"model": MODEL, "rows": rows, "limit_batch": highest, "largest_batch": found, "step": STEP}
    results.save(target, NAME, MODEL, record | origin(DEVICE))


# ---- tables ----------------------------------------------------------------------------------------------------------


def kept(made: dict[str, Any], policy: str) -> float:
    """The share of the in-core throughput that a policy keeps; 0 where it has no plan."""
    found = next((entry for entry in made["policies"] if entry["policy"] == policy), {})
    return made["compute_seconds"] / found["seconds"] if "seconds" in found else 0.0


def published(name: str, batch: int) -> str:
    """The share that the paper reports, or -."""
    value = PUBLISHED[name].get(batch)
    return "-" if value is None else f"{value / IN_CORE[name]:.0%}"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    return "".join(_table(record) for record in records)


def _table(record: dict[str, Any]) -> str:
    header = ["batch", "live peak GiB", "largest function GiB"]
    header += [f"{policy}" for policy in POLICIES] + [f"paper: {name}" for name in PUBLISHED]
    rows = []
    for made in record["rows"]:
        sizes = [f"{made[name] / GIB:.1f}" for name in ("live_peak_bytes", "min_budget_bytes")]
        ours = [f"{kept(made, policy):.0%}" if kept(made, policy) else "-" for policy in POLICIES]
        rows.append([made["batch"], *sizes, *ours, *(published(name, made["batch"]) for name in PUBLISHED)])
    text = (
        f"Simulated: {record['model']}, 224x224, float32, {record['device']['name']}, 16 GiB. Throughput kept: the "
        "in-core throughput of the same roofline at the same batch is 100%. The paper's percentages are of its best "
        "throughput in-core (LMS: as Le et al. measured it on a P100). - no plan, or not reported.\n\n"
    ) + results.markdown(header, rows)
    if record["largest_batch"]:
        highest = record["limit_batch"]
        worst = record["rows"][-1]["largest_function"]
        text += (
            f"\nLargest batch, in steps of {record['step']}; at {highest} the largest single function ({worst}, or "
            "another one of that size) fills the memory, and no schedule passes that.\n\n"
        )
        paper = {COUNTERPART[name]: max(values) for name, values in PUBLISHED.items()}
        text += results.markdown(
            ["policy", "largest batch", "of the limit", "paper"],
            [[p, b, f"{b / highest:.1%}", paper.get(p, "-")] for p, b in record["largest_batch"].items()],
        )
    return text
