"""The report, made of the raw records alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, results
from benchmarks.gpu.cases import ARMS, IN_CORE, MODELS
from swapd.devices.profile import Profile
from swapd.planning.lower_bound import Bound
from swapd.trace.trace import Machine

NAME = "gpu"
GIB = 2**30


def in_core_of(records: Sequence[dict[str, Any]], model: str) -> dict[str, Any] | None:
    """The reference of a model, if it was measured."""
    found = [r for r in steps(records) if r["arm"] == IN_CORE and r["model"]["name"] == model and r["outcome"] == "ok"]
    return found[0] if found else None


def steps(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training cases, in the order of the table."""
    names = [model.name for model in MODELS]
    found = [record for record in records if record["kind"] == "step"]
    return sorted(
        found,
        key=lambda r: (
            names.index(r["model"]["name"]) if r["model"]["name"] in names else len(names),
            r["oversubscription"],
            ARMS.index(r["arm"]),
            r["chunk_bytes"],
        ),
    )


def link_of(records: Sequence[dict[str, Any]]) -> Machine | None:
    """Link speeds as the probe measured them in this run."""
    for record in records:
        if record["kind"] == "probe" and record["outcome"] == "ok":
            return Profile.from_json(json.dumps(record["profile"])).machine()
    return None


def bound_of(reference: dict[str, Any], budget_bytes: int, link: Machine) -> Bound:
    """The two-phase bound (`planning.lower_bound`) of the in-core run: its forward pass, and the rest of the step."""
    forward = statistics.median(reference["forward_seconds"])
    spill = max(0, reference["live_peak_bytes"] - budget_bytes)
    return Bound(
        forward_seconds=forward,
        backward_seconds=statistics.median(reference["seconds"]) - forward,
        spill_bytes=spill,
        out_seconds=spill / link.out_bytes_per_second,
        in_seconds=spill / link.in_bytes_per_second,
    )


def figures(
    record: dict[str, Any], reference: dict[str, Any] | None, link: Machine | None
) -> dict[str, float | bool | None]:
    """What a row shows, in seconds and ratios; None where it is not known."""
    step = statistics.median(record["seconds"])
    budget = record["budget_bytes"]
    known = reference is not None and link is not None and budget is not None
    bound = bound_of(reference, budget, link).seconds if reference and link and known else None
    return {
        "step_seconds": step,
        "bound_seconds": bound,
        "of_bound": bound / step if bound else None,
        "slowdown": step / statistics.median(reference["seconds"]) if reference else None,
        "identical": record["digest"] == reference["digest"] if reference else None,
    }


def _row(record: dict[str, Any], reference: dict[str, Any] | None, link: Machine | None) -> list[str]:
    def gib(value: float | None) -> str:
        return "" if value is None else f"{value / GIB:.2f}"

    name = f"{record['oversubscription']:g}x {record['arm']}"
    if record["chunk_bytes"] != 2 << 20:
        name += f", chunks of {results.size(record['chunk_bytes'])}"
    if record["outcome"] != "ok":
        return [name, gib(record["budget_bytes"]), "", record["outcome"], *[""] * 7]
    shown = figures(record, reference, link)
    moved = record["per_step"]
    stall = moved.get("stall_seconds")
    return [
        name,
        gib(record["budget_bytes"]),
        gib(record["device_peak_bytes"]),
        f"{shown['step_seconds']:.3f}",
        f"{min(record['seconds']):.3f} to {max(record['seconds']):.3f}",
        "" if shown["of_bound"] is None else f"{shown['of_bound']:.0%}",
        "" if shown["slowdown"] is None else f"{shown['slowdown']:.2f}",
        gib(moved.get("out_bytes")),
        gib(moved.get("in_bytes")),
        "" if stall is None else f"{stall:.3f}",
        {True: "yes", False: "no", None: ""}[shown["identical"]],  # type: ignore[index]
    ]


_HEADER = (
    "arm|budget GiB|device peak GiB|step s|steps|of the bound|x in-core|out GiB|in GiB|stalls s|same bits"
).split("|")


def step_tables(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one table a model."""
    text = ""
    link = link_of(records)
    for model in dict.fromkeys(record["model"]["name"] for record in steps(records)):
        mine = [record for record in steps(records) if record["model"]["name"] == model]
        reference = in_core_of(records, model)
        about = ", ".join(f"{key} {value}" for key, value in mine[0]["model"].items() if key not in ("name", "kind"))
        text += f"\n## {model} ({about})\n\n"
        if reference is not None:
            text += f"Live peak in-core {reference['live_peak_bytes'] / GIB:.2f} GiB.\n\n"
        text += results.markdown(_HEADER, [_row(record, reference, link) for record in mine])
    return text


def probe_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: the link and the memory calls."""
    for record in records:
        if record["kind"] == "probe" and record["outcome"] == "ok":
            profile = Profile.from_json(json.dumps(record["profile"]))
            link = profile.machine()
            rows = [
                [
                    f"{cost.chunks} x {results.size(cost.chunk_bytes)}",
                    *(f"{1e6 * value:.1f}" for value in (cost.create_seconds, cost.map_seconds, cost.release_seconds)),
                    *(f"{1e6 * value:.1f}" for value in (cost.set_access_seconds, cost.unmap_seconds)),
                ]
                for cost in profile.memory
            ]
            return (
                f"\n## Probe\n\nBoth directions at once: {link.out_bytes_per_second / 1e9:.1f} GB/s out, "
                f"{link.in_bytes_per_second / 1e9:.1f} GB/s in, latency {1e6 * link.latency_seconds:.0f} us. "
                "Microseconds a call: create, map and release a chunk, set access and unmap the range.\n\n"
                + results.markdown(["range", "create", "map", "release", "set access", "unmap"], rows)
            )
    return ""


def allocation_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: nanoseconds of a malloc and free pair."""
    mine = [record for record in records if record["kind"] == "allocation" and record["outcome"] == "ok"]
    if not mine:
        return ""
    sizes = list(mine[0]["nanoseconds"])
    names = {IN_CORE: "PyTorch's caching allocator", "ours": "ours"}
    rows = [[names[r["arm"]], *(f"{statistics.median(r['nanoseconds'][size]):.0f}" for size in sizes)] for r in mine]
    return (
        "\n## malloc and free\n\nNanoseconds a pair through `torch.cuda.caching_allocator_alloc` and `_delete`, calls "
        "from Python included.\n\n" + results.markdown(["allocator", *sizes], rows)
    )


def report(records: Sequence[dict[str, Any]], left_out: Sequence[str], gpu: str) -> str:
    """The whole of `tables.md`."""
    if not records:
        return f"# {gpu}\n\nNothing was measured.\n"
    text = (
        f"# {gpu}\n\nMade from the raw data in this folder by `python -m benchmarks.gpu --tables`. "
        f"{machine.words(records[0]['machine'])}.\n\n"
        "Every arm is a process of its own. What a budget leaves of the device is held by another process, but for "
        "512 MiB for modules that the driver loads late; PyTorch's allocator is limited to exactly the budget. "
        "'Of the bound' is `planning.lower_bound.bound`, with the in-core run's phases and the probed link, over the "
        "step: 100% is the best that moving what does not fit once out and once in can do. Arms that compute again or "
        "keep state on the host may pass it. Empty: not counted, or not known.\n"
    )
    text += step_tables(records) + probe_table(records) + allocation_table(records)
    if left_out:
        text += "\n## Left out\n\n" + "".join(f"- {line}\n" for line in left_out)
    return text
