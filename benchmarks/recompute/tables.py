"""Tables of the raw data: models, cases with every arm, and how often each target was reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import machine, results
from benchmarks.recompute.cases import (
    ARMS,
    CHECKPOINT,
    CHECKPOINT_IN_CORE,
    COMPARED,
    IN_CORE,
    OURS,
    PLAIN,
    SWAP_ONLY,
    TIMED,
    TRACED,
)

Record = dict[str, Any]
Key = tuple[str, float, float]  # model, oversubscription, slowdown

LAST = 3  # steps of a run that never was steady that are shown
SWAP_ONLY_BOUND, BOUND = "swap_only_bound_seconds", "bound_seconds"
SWAP_ONLY_TARGET, BOUND_TARGET = 0.80, 1.15  # ours over our swap-only step, and over the new bound


def counted(record: Record) -> list[Record]:
    """The steps that count: those of turns once steps were steady, or a few of the last."""
    steps: list[Record] = record["steps"]
    return [steps[place] for place in record["counted"]] or steps[-LAST:]


def step_seconds(records: Record | list[Record]) -> float:
    """The median of all steps that count, without planning, which another process does where nothing is measured."""
    rounds = records if isinstance(records, list) else [records]
    steps = [step for record in rounds for step in counted(record)]
    return float(statistics.median(step["seconds"] - step.get("planning_seconds", 0.0) for step in steps))


def middle(records: list[Record], name: str) -> float:
    """The median of another figure of these steps; 0 where it was not noted."""
    return float(statistics.median(step.get(name, 0) for record in records for step in counted(record)))


def bits(record: Record, plain: Record) -> str:
    """Whether the state at the run's end is the one that PyTorch without us has after as many steps."""
    if not record["digests"]:
        return ""
    ((step, mine),) = record["digests"].items()
    known = plain["digests"].get(step)
    if known is None or mine["trained"] != known["trained"]:
        return "NO"
    return "yes" if mine["statistics"] == known["statistics"] else "all but running statistics"


def in_budget(record: Record) -> bool:
    summary = record["summary"]
    return bool(summary["device_peak_bytes"] <= min(summary["budget_bytes"], record["budget_bytes"]))


def grouped(records: Iterable[Record]) -> dict[Key, dict[str, list[Record]]]:
    """The records of each case's arms, the rounds of each in a list."""
    found: dict[Key, dict[str, list[Record]]] = {}
    for record in records:
        if record["arm"] in ARMS:
            key = (record["model"], record["oversubscription"], record["slowdown"])
            found.setdefault(key, {}).setdefault(record["arm"], []).append(record)
    return dict(sorted(found.items()))


def ran(arms: dict[str, list[Record]], arm: str) -> list[Record]:
    """An arm's records; none if a round of it failed."""
    records = arms.get(arm, [])
    return [] if any("failed" in record for record in records) else records


def bound_seconds(arms: dict[str, list[Record]], name: str) -> float:
    """One of a case's bounds, by the functions' times beside it; the middle one of several rounds."""
    return float(statistics.median(record[name] for record in arms[TIMED]))


def _rows(key: Key, arms: dict[str, list[Record]], plain: Record) -> list[list[str]]:
    model, x, slowdown = key
    label = f"{model} {x:g}x, link {slowdown:g}"
    core = step_seconds(arms[IN_CORE])
    alone = ran(arms, SWAP_ONLY)
    bounds = bound_seconds(arms, SWAP_ONLY_BOUND), bound_seconds(arms, BOUND)
    rows = []
    for arm in COMPARED:
        if not arms.get(arm):
            continue
        records = ran(arms, arm)
        if not records:
            failed = next(record["failed"] for record in arms[arm] if "failed" in record)
            rows.append([label, arm, failed, *[""] * 11])
            continue
        step = step_seconds(records)
        rows.append(
            [
                label,
                arm,
                f"{step:.3f}",
                f"{step / core:.2f}",
                f"{step / step_seconds(alone):.2f}" if alone else "",
                *(f"{bound / core:.2f}" for bound in bounds),
                *(f"{step / bound:.2f}" for bound in bounds),
                f"{middle(records, 'recompute_seconds') / core:.2f}",
                results.mib(middle(records, "swap_out_bytes")),
                results.mib(middle(records, "swap_in_bytes")),
                "/".join(str(r["counted"][0] - 1) if r["counted"] else "never" for r in records),
                "yes" if all(map(in_budget, records)) else "NO",
                "/".join(sorted({bits(record, plain) for record in records})),
            ]
        )
    return rows


def _cases(found: dict[Key, dict[str, list[Record]]], plain: dict[str, Record]) -> str:
    header = (
        "case|arm|step s|/ in-core|/ swap only|swap-only bound|new bound|step / swap-only bound|step / new bound|"
        "computed again|out MiB|in MiB|warm-up|in budget|bits"
    )
    rows = [row for key, arms in found.items() for row in _rows(key, arms, plain[key[0]])]
    return results.markdown(header.split("|"), rows)


def _models(records: list[Record]) -> str:
    rows = []
    for model in sorted({record["model"] for record in records}):
        of = {record["arm"]: record for record in records if record["model"] == model}
        traced, again = of[TRACED], of[CHECKPOINT_IN_CORE]
        cores, timed = ([r for r in records if r["model"] == model and r["arm"] == arm] for arm in (IN_CORE, TIMED))
        least = int(again["summary"]["live_peak_bytes"])
        fits = sorted({c["oversubscription"] for c in traced["cases"] if least <= c["budget_bytes"]})
        medians, sums = [step_seconds(r) for r in cores], [r["compute_seconds"] for r in timed]
        rows.append(
            [
                model,
                f"{step_seconds(cores):.3f}" if cores else "",
                f"{min(medians):.3f} to {max(medians):.3f}" if cores else "",
                f"{min(sums):.3f} to {max(sums):.3f}" if sums else "",
                results.mib(traced["summary"]["live_peak_bytes"]),
                ", ".join(sorted({f"{c['oversubscription']:g}x" for c in traced["cases"]})),
                f"{step_seconds(again):.3f}",
                results.mib(least),
                ", ".join(f"{x:g}x" for x in fits) or "none",
            ]
        )
    header = (
        "model|in-core step s|of the cases|functions s|live peak MiB|feasible|checkpointed step s|"
        "checkpointed live peak MiB|fits without moving"
    )
    return results.markdown(header.split("|"), rows)


def _reached(found: dict[Key, dict[str, list[Record]]], plain: dict[str, Record]) -> str:
    """How often ours reached each target."""
    both = {key: arms for key, arms in found.items() if ran(arms, OURS) and ran(arms, SWAP_ONLY)}
    if not both:
        return ""

    def over(divisor: Callable[[dict[str, list[Record]]], float]) -> dict[Key, float]:
        return {key: step_seconds(arms[OURS]) / divisor(arms) for key, arms in both.items()}

    def most(ratios: dict[Key, float], limit: float) -> str:
        reached = sum(ratio <= limit for ratio in ratios.values())
        return f"{reached} of {len(ratios)} cases; {min(ratios.values()):.2f} to {max(ratios.values()):.2f}"

    below = over(lambda arms: bound_seconds(arms, SWAP_ONLY_BOUND))
    models = sorted({key[0] for key in below})
    always = [m for m in models if all(ratio < 1 for key, ratio in below.items() if key[0] == m)]
    lines = [
        f"- at most {SWAP_ONLY_TARGET:.2f} of our swap-only step: "
        + most(over(lambda arms: step_seconds(arms[SWAP_ONLY])), SWAP_ONLY_TARGET),
        f"- below the bound of swapping alone: {most(below, 1.0)}; in every case of {', '.join(always) or 'no model'}",
        f"- at most {BOUND_TARGET:.2f} of the bound of swapping and recomputing: "
        + most(over(lambda arms: bound_seconds(arms, BOUND)), BOUND_TARGET),
    ]
    ours = [(record, plain[key[0]]) for key, arms in both.items() for record in arms[OURS]]
    same = sum(bits(record, known) == "yes" for record, known in ours)
    lines.append(f"- identical bits, running statistics included: {same} of {len(ours)} runs")
    idle = sum(not record["steps"][-1].get("recompute_function_count") for record, _ in ours)
    lines.append(f"- nothing computed again in the last step: {idle} of {len(ours)} runs")
    lines.append(f"- peak within the budget: {sum(in_budget(record) for record, _ in ours)} of {len(ours)} runs")
    handmade = {key: arms for key, arms in both.items() if ran(arms, CHECKPOINT)}
    if handmade:
        ratios = {key: step_seconds(a[OURS]) / step_seconds(a[CHECKPOINT]) for key, a in handmade.items()}
        lines.append(f"- no slower than checkpointing written by hand: {most(ratios, 1.0)}")
    return "Ours:\n\n" + "\n".join(lines) + "\n"


def _machines(records: list[Record]) -> str:
    """The machine; of several, what was measured on each."""
    models: dict[str, set[str]] = {}
    for record in records:
        models.setdefault(machine.words(record["machine"]), set()).add(record["model"])
    if len(models) == 1:
        return next(iter(models))
    return "; ".join(f"{', '.join(sorted(found))}: {words}" for words, found in models.items())


def table(records: list[Record]) -> str:
    """Markdown; empty without records."""
    plain = {record["model"]: record for record in records if record["arm"] == PLAIN}
    records = [record for record in records if record["model"] in plain]  # a model whose run was broken off has none
    if not records:
        return ""
    found = grouped(records)
    return (
        f"{_machines(records)}; PyTorch uses {next(iter(plain.values()))['threads']} thread(s).\n\n"
        f"{_models(records)}\n{_reached(found, plain)}\n"
        "Bounds and what is computed again are in times of the in-core step; bounds are of the functions' times in a "
        "run with all the memory it wants, whose steps take turns with those of the case's others; *link 2* is one "
        "on which swapping alone takes at least twice the in-core step, as measured before the case (before all "
        "cases of a model whose raw data has one `in-core-alone` in all). *Warm-up* is the number of steps before "
        "the turns that count. Planning, which the program waits for here and another process does by default, is "
        "not in the steps. Checkpointing by hand runs batch norms twice, which update their running statistics "
        "twice: these bits differ from the program's.\n\n"
        f"{_cases(found, plain)}"
    )
