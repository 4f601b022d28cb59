"""The summary of a run (`OOC_SUMMARY`): a stable JSON interface, made from the core's counters and the planner's."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ooc_alloc import Core, OocError
from swapd.files import write_whole
from swapd.host_limits import peak_rss_bytes
from swapd.planner import Planner

VERSION = 1


_COPIED = """
    budget_bytes live_peak_bytes fit_budget_bytes device_peak_bytes host_peak_bytes
    swap_out_bytes swap_in_bytes swap_out_count swap_in_count
    demand_swap_in_count clean_drop_count divergence_count plan_count functions
    stall_seconds min_budget_bytes chunk_bytes clean_drop_bytes demand_swap_in_bytes demand_swap_out_bytes
    planned_iteration_count plan_switch_count driver_failure_count stall_swap_in_seconds stall_room_seconds
    cancelled_swap_out_count write_back_bytes external_pin_count allocations copy_out_seconds copy_in_seconds
    host_backed_function_count disk_budget_bytes disk_peak_bytes disk_read_bytes disk_written_bytes disk_failure_count
    host_budget_bytes stall_disk_seconds
""".split()


# Keys of functions that ran in parts; `split_layers` has an object for each kind of call.
NOTHING_SPLIT: dict[str, Any] = {
    "split": "off",
    "split_function_count": 0,
    "split_part_count": 0,
    "split_layers": [],
}

_AUDIT_ATTEMPTS = 3
_AUDIT_PAUSE_SECONDS = 0.002


def audit_agrees(core: Core) -> bool:
    """Whether a recount of every chunk agrees with the counters.

    The recount can disagree for a moment while another thread's chunk is handed over, so it is made again.
    """
    for attempt in range(_AUDIT_ATTEMPTS):
        if attempt:
            time.sleep(_AUDIT_PAUSE_SECONDS)
        with contextlib.suppress(OocError):
            core.audit()
            return True
    return False


def external_fragmentation_bytes(stats: Mapping[str, int | float], agrees: bool) -> int:
    """Device memory that is neither free nor in use, at most the budget; all of it if the audit did not agree."""
    budget = int(stats["budget_bytes"])
    return min(int(stats["chunks_lost"] * stats["chunk_bytes"]), budget) if agrees else budget


def derived_figures(stats: Mapping[str, int | float], agrees: bool) -> dict[str, float]:
    """Ratios of the counters; `agrees` is what :func:`audit_agrees` said."""
    live_peak = stats["live_peak_bytes"]
    return {
        "oversubscription": live_peak / stats["budget_bytes"],
        "internal_fragmentation_ratio": stats["waste_at_live_peak_bytes"] / live_peak if live_peak else 0.0,
        "external_fragmentation_ratio": external_fragmentation_bytes(stats, agrees) / stats["budget_bytes"],
    }


def make_summary(
    planner: Planner,
    final: bool,
    stats: Mapping[str, int | float],
    agrees: bool,
    split: Mapping[str, Any] | None = None,
    *,
    budget_ranks: int = 1,
) -> dict[str, Any]:
    """Returns the summary's keys and figures: bytes, seconds, counts and ratios.

    `external_fragmentation_ratio` is the share of the budget's chunks that are neither free nor in use by anything:
    0 by construction, and recounted here by walking every structure.

    `main_step_count` iterations had the sequence that took the most time in all, usually `main_step_seconds` each: None
    where there was but one, with all that the program did before it.

    Args:
        planner: the planner whose figures are shown.
        final: whether the program is about to end.
        stats: counters of one moment, as `Core.stats` gives them.
        agrees: what :func:`audit_agrees` said.
        budget_ranks: the processes among which a share of the device was divided.
        split: the figures whose keys start with `split`, or None if nothing can be split.
    """
    alike, usual = planner.steps.main()
    return {
        "version": VERSION,
        "final": final,
        "pid": os.getpid(),
        "device": planner.core.device_name,
        "peak_rss_bytes": peak_rss_bytes(),
        **{name: stats[name] for name in _COPIED},
        "budget_rank_count": budget_ranks,
        "steps": planner.steps.histogram.count,
        "step_seconds": [round(step.seconds, 6) for step in planner.steps.kept],
        "main_step_count": alike,
        "main_step_seconds": round(usual, 6) if usual is not None else None,
        **planner.figures(),
        "no_plan_reason": planner.no_plan_reason(stats["swap_out_bytes"] + stats["clean_drop_bytes"]),
        **derived_figures(stats, agrees),
        **(NOTHING_SPLIT if split is None else split),
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes the summary whole or not at all, so that a reader never sees half a file. Raises OSError."""
    write_whole(path, (json.dumps(summary, indent=1) + "\n").encode())
