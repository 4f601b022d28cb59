"""Memory at equal speed: the largest batch that is at most a fifth slower than it would be in-core.

Each device has its own memory as the budget, and its own link. A batch that does not fit takes its computation in-core.
Weights and the optimizer's state are the same for all batches, so the ratio of two batches is that of the memory of
their activations, which is what published figures are given in. Searches go by
bisection over batches that are 5% apart, and take it that no batch is fast enough beyond one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning import table1
from benchmarks.planning.cases import SIMULATED, device_facts, machine, trace_of
from swapd.devices.roofline import GIB, get_device
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.recompute.choice import Choice, choose

NAME = "memory"
DEVICES = ("v100-nvlink2", "a100-pcie4", "h100-pcie5")
MODELS = {"resnet50": 64, "densenet121": 64, "gpt2_medium": 2, "llama_1b": 1}  # and a batch that the search begins at
QUICK = {"resnet50": 64}
SLOWER = 1.2  # times the step in-core
APART = 1.05  # batches that are tried
MOST = 16.0  # times the largest batch in-core
ARMS = ("swap only", "with recomputation")

# What others published. Machines, programs and what counts as in-core differ, so these are no measures of each other.
PUBLISHED = (
    (
        "POFO: Beaumont, Eyraud-Dubois, Shilova, NeurIPS 2021, abstract",
        "activations in a quarter to a sixth of their memory, less than 20% slower",
        "4 to 6",
        "swapping and recomputing, of chains that are known ahead; only activations count, and nothing else moves",
    ),
    (
        "DTR: Kirisame et al., ICLR 2021; the authors' page (marisa.moe/dtr.html)",
        "3 times the memory saved for 20% more computation",
        "3",
        "recomputing alone, without a plan",
    ),
    (
        "DTR in RAF, the same page",
        "GPT2: batch 24 instead of 8, at 93.2% of the throughput",
        "3",
        "recomputing alone; the device is not named there, and it is 7% slower, not 20%",
    ),
    (
        "DTR in RAF, the same page",
        "BERT base: batch 32 instead of 16, at 94.3%; large: 16 instead of 8, at 96.5%",
        "2",
        "recomputing alone; as above, and models that are not here",
    ),
)


def _make_problem(device: str) -> Callable[..., Problem]:
    return partial(Problem.from_trace, budget_bytes=get_device(device).memory_bytes)


@lru_cache(maxsize=64)
def problem_of(model: str, batch: int, device: str) -> Problem:
    return _make_problem(device)(trace_of(model, batch, device))


@lru_cache(maxsize=64)
def swapped(model: str, batch: int, device: str) -> Plan | None:
    """The plan of swapping alone; None if a function alone does not fit."""
    try:
        return make_plan(problem_of(model, batch, device))
    except InfeasibleError:
        return None


@lru_cache(maxsize=64)
def chosen(model: str, batch: int, device: str) -> Choice | None:
    """What is recomputed, and the plan for the rest. Normalisations by batch run again without their statistics."""
    alone = swapped(model, batch, device)
    if alone is None:
        return None
    trace = trace_of(model, batch, device)
    return choose(trace, _make_problem(device), swap_only=alone, without_statistics=True)


def point(model: str, batch: int, device: str, arm: str) -> dict[str, Any] | None:
    """The figures of a batch; None if a function alone does not fit."""
    computing = problem_of(model, batch, device).compute_seconds
    if arm == ARMS[0]:
        plan = swapped(model, batch, device)
        return plan and {"batch": batch, "seconds": plan.predicted_seconds, "compute_seconds": computing}
    choice = chosen(model, batch, device)
    if choice is None:
        return None
    again = choice.rewritten.repeated_seconds if choice.rewritten is not None else 0.0
    return {"batch": batch, "seconds": choice.seconds, "compute_seconds": computing, "repeated_seconds": again}


def fits(model: str, batch: int, device: str) -> bool:
    """Whether every function fits by itself; no schedule passes that."""
    problem = problem_of(model, batch, device)
    return problem.min_budget_bytes <= problem.budget_bytes


def fast_enough(found: dict[str, Any] | None) -> bool:
    return found is not None and found["seconds"] <= SLOWER * found["compute_seconds"]


def in_core(model: str, device: str, begin: int) -> int:
    """The largest batch for which nothing has to move; 0 if there is none."""

    def needed(batch: int) -> int:
        return problem_of(model, batch, device).fit_budget_bytes

    memory = get_device(device).memory_bytes
    each = (needed(2 * begin) - needed(begin)) / begin  # memory grows in proportion, nearly
    batch = max(1, begin + int((memory - needed(begin)) / each))
    while batch and needed(batch) > memory:
        batch -= 1
    while needed(batch + 1) <= memory:
        batch += 1
    return batch


def largest(batches: Sequence[int], enough: Callable[[int], bool]) -> int:
    """The last of the batches for which that is so, by bisection; 0 if it is so for none."""
    low, high = 0, len(batches)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if enough(batches[middle - 1]) else (low, middle - 1)
    return batches[low - 1] if low else 0


def tried(first: int) -> list[int]:
    """Batches from the largest one in-core on."""
    batches, size = [max(1, first)], float(max(1, first))
    while size < MOST * batches[0]:
        size *= APART
        if round(size) > batches[-1]:
            batches.append(round(size))
    return batches


def case(model: str, device: str, begin: int) -> dict[str, Any]:
    """The largest batches of a model on a device."""

    def enough(arm: str, batch: int) -> bool:
        return fast_enough(point(model, batch, device, arm))

    gpu = get_device(device)
    facts: dict[str, Any] = {"device": device_facts(gpu), "budget_bytes": gpu.memory_bytes}
    facts["in_core_batch"] = in_core(model, device, begin)
    batches = tried(facts["in_core_batch"])
    for arm in ARMS:
        batch = largest(batches, partial(enough, arm))
        facts[arm] = point(model, batch, device, arm) if batch else None
        following = next((other for other in batches if other > batch), None)
        facts[f"{arm}, next fits"] = following is not None and fits(model, following, device)
        if batch:
            batches = batches[batches.index(batch) :]
    for cache in (problem_of, swapped, chosen, trace_of):
        cache.cache_clear()
    return facts


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data of every model, a file each."""
    results.clear(target, NAME)
    for model, begin in (QUICK if quick else MODELS).items():
        cases = []
        for device in DEVICES[: 1 if quick else None]:
            cases.append(case(model, device, begin))
            say(f"{model} on {device}: in-core {cases[-1]['in_core_batch']}, " + ", ".join(_found(cases[-1])))
            record = {"model": model, "kind": SIMULATED, "planned_on": machine.describe(), "cases": cases}
            results.save(target, NAME, model, record)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _found(made: dict[str, Any]) -> list[str]:
    return [f"{arm} {made[arm]['batch'] if made[arm] else '-'}" for arm in ARMS]


def _times(made: dict[str, Any], arm: str) -> str:
    if not made[arm]:
        return "-"
    batch, first = made[arm]["batch"], made["in_core_batch"]
    ratio = f" ({batch / first:.2f})" if first else ""
    return f"{batch}{ratio}" + ("" if made[f"{arm}, next fits"] else " *")


def seed_paper() -> list[list[str]]:
    """Its largest batches in table 1 that keep enough of the throughput in-core, as far as the table has them."""
    rows = []
    for name, measured in table1.PUBLISHED.items():
        kept = [batch for batch, value in measured.items() if value >= table1.IN_CORE[name] / SLOWER]
        least = min((batch for batch in measured if batch not in kept and batch > max(kept, default=0)), default=0)
        found = f"{max(kept)}; {least} is too slow" if kept else "none, as it is slower at every batch"
        rows.append([name, found])
    return rows


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    if not records:
        return ""
    rows = []
    for record in records:
        label = record["model"]
        for made in record["cases"]:
            cells = [made["device"]["name"], f"{made['budget_bytes'] / GIB:.0f}", made["in_core_batch"] or "none"]
            cells += [_times(made, arm) for arm in ARMS]
            last = made[ARMS[1]]
            cells += [
                f"{last[key] / last['compute_seconds']:.2f}" if last else "-" for key in ("seconds", "repeated_seconds")
            ]
            rows.append([label, *cells])
            label = ""
    header = ["model", "device", "GiB", "in-core", *ARMS, "step", "computed again"]
    return (
        f"Simulated, planned on {machine.words(records[0]['planned_on'])}; no GPU was measured. Largest batches at no "
        f"more than {SLOWER:g} times the step in-core (of a batch that does not fit: its computation), and in brackets "
        "over the largest batch in-core. Batches are 5% apart; \\*: a function of the next one takes more than the "
        "memory by itself. *step* and *computed again* are of the last batch, in times of its computation. "
        "Normalisations by batch run again without their running statistics.\n\n"
        + results.markdown(header, rows)
        + "\nThe seed paper's table 1, ResNet-50 in 16 GB, measured: the largest batch that keeps "
        f"{1 / SLOWER:.0%} of its best throughput in-core (LMS: as Le et al. measured it on a P100).\n\n"
        + results.markdown(["way", "batch"], seed_paper())
        + "\nPublished, on other machines and for other programs; a ratio is of batches or of the memory of "
        "activations.\n\n" + results.markdown(["source", "what it says", "ratio", "what differs"], PUBLISHED)
    )
