"""A run's summary as a table that people can read."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from swapd.cli.output import pairs_table
from swapd.tiers import store
from swapd.units import format_bytes, format_duration


def summary_table(summary: dict[str, Any]) -> Table:
    """The table of a summary (`swapd/summary.py`). Rows that have nothing to show are left out."""
    rows: list[tuple[str, str | Text]] = [
        ("device", str(summary.get("device", "?"))),
        ("memory", _memory(summary)),
        ("disk", disk(summary)),
        ("moved", moved(summary)),
        ("recomputed", recomputed(summary)),
        ("steps", _steps(summary)),
        ("stalls", _stalls(summary)),
        ("plan", plan(summary)),
        ("fragmentation", _fragmentation(summary)),
    ]
    rows += [("attention", text) for text in _attention(summary)]
    return pairs_table("out-of-core run", [row for row in rows if row[1]])


def _bytes(summary: dict[str, Any], key: str) -> str:
    return format_bytes(float(summary.get(key) or 0))


def _memory(summary: dict[str, Any]) -> str:
    budget, peak = summary.get("budget_bytes") or 0, summary.get("live_peak_bytes") or 0
    times = f"{peak / budget:.2f} times the budget" if budget else "no budget"
    ranks = summary.get("budget_rank_count") or 1
    among = f" (one of {ranks} ranks' shares)" if ranks > 1 else ""
    return (
        f"live peak {format_bytes(peak)}, {times} of {format_bytes(budget)}{among}; device peak "
        f"{_bytes(summary, 'device_peak_bytes')}{_beyond(summary)}"
    )


def _beyond(summary: dict[str, Any]) -> str:
    """The peak of host memory or of the disk, and that of the whole process where it is known."""
    tier = store(summary)
    process = f", process peak {_bytes(summary, 'peak_rss_bytes')}" if summary.get("peak_rss_bytes") else ""
    return f", {tier} peak {_bytes(summary, f'{tier}_peak_bytes')}{process}"


def disk(counters: dict[str, Any]) -> str:
    """What a disk did, by the counters of a summary or of a process that runs; nothing without one."""
    if not counters.get("disk_budget_bytes"):
        return ""
    most = counters.get("disk_used_bytes", counters.get("disk_peak_bytes"))
    return (
        f"{format_bytes(float(most or 0))} of {_bytes(counters, 'disk_budget_bytes')} taken; "
        f"written {_bytes(counters, 'disk_written_bytes')}, read {_bytes(counters, 'disk_read_bytes')}"
    )


def moved(counters: dict[str, Any]) -> str:
    """What was moved, by the counters of a summary or of a process that runs."""
    return (
        f"out {_bytes(counters, 'swap_out_bytes')} in {counters.get('swap_out_count', 0)}, "
        f"in {_bytes(counters, 'swap_in_bytes')} in {counters.get('swap_in_count', 0)} "
        f"({_bytes(counters, 'demand_swap_in_bytes')} on demand), {_bytes(counters, 'clean_drop_bytes')} dropped clean"
    )


def recomputed(facts: dict[str, Any]) -> str:
    """What was computed again instead of moved, by a summary or by what a process says that runs; "" if nothing."""
    refused = facts.get("recompute_refused_count")
    refusals = f"{refused} drops refused by their trials" if refused else ""
    if not facts.get("recompute_drop_count"):
        return refusals
    text = (
        f"{_bytes(facts, 'recompute_drop_bytes')} dropped in {facts['recompute_drop_count']} variables, "
        f"{facts.get('recompute_function_count', 0)} functions run again in "
        f"{format_duration(float(facts.get('recompute_seconds') or 0))}"
    )
    return f"{text}; {refusals}" if refusals else text


def _steps(summary: dict[str, Any]) -> str:
    seconds = [float(value) for value in summary.get("step_seconds") or []]
    if not seconds:
        return "none found"
    text = f"{len(seconds)}, with the program's start"
    if summary.get("main_step_seconds") is not None:
        text = f"{len(seconds)}, of which {summary['main_step_count']} alike took the most time, "
        text += f"each {format_duration(summary['main_step_seconds'])}"
    return f"{text}; {summary.get('functions', 0)} functions in all"


def _stalls(summary: dict[str, Any]) -> str:
    stall = float(summary.get("stall_seconds") or 0)
    total = sum(float(value) for value in summary.get("step_seconds") or [])
    disk = float(summary.get("stall_disk_seconds") or 0)
    for_disk = f", {format_duration(disk)} of it for the disk" if disk else ""
    return format_duration(stall) + (f", {stall / total:.1%} of the steps" if total > 0 else "") + for_disk


def plan(facts: dict[str, Any]) -> str:
    """What plans there are, by a summary or by what a process says that runs."""
    text = f"policy {facts.get('policy', '?')}, {facts.get('plan_count', 0)} plans"
    text += f", {facts.get('planned_iteration_count', 0)} steps under one"
    if facts.get("window_bytes"):
        text += f", window {_bytes(facts, 'window_bytes')}"
    if facts.get("predicted_step_seconds"):
        text += f", a step predicted {format_duration(facts['predicted_step_seconds'])}"
    if facts.get("bound_step_seconds"):
        text += f", bound {format_duration(facts['bound_step_seconds'])}"
    if facts.get("divergence_count"):
        text += f", left {facts['divergence_count']} times"
    if facts.get("no_plan_reason"):
        text += f"; {facts['no_plan_reason']}"
    return text


def _fragmentation(summary: dict[str, Any]) -> str:
    internal = float(summary.get("internal_fragmentation_ratio") or 0)
    external = float(summary.get("external_fragmentation_ratio") or 0)
    return f"internal {internal:.2%}, external {external:.2%}"


def _attention(summary: dict[str, Any]) -> list[Text]:
    """Sentences about what should not have happened."""
    texts = []
    if divergences := summary.get("divergence_count"):
        texts.append(Text(f"the program left its recorded sequence {divergences} times", style="yellow"))
    if failures := summary.get("driver_failure_count"):
        texts.append(Text(f"{failures} driver calls failed and were made up for", style="yellow"))
    if failures := summary.get("disk_failure_count"):
        texts.append(Text(f"{failures} reads or writes of the disk failed: look into dmesg", style="yellow"))
    return texts
