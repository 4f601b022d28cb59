"""Figures of a session, by the names that the catalogue's sources have: numbers, texts, and one histogram."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Union

from ooc.prometheus.catalogue import CHUNK_STATES
from ooc_alloc import ABI_VERSION
from swapd.host_limits import peak_rss_bytes
from swapd.session import Session, Snapshot
from swapd.step_times import Histogram
from swapd.summary import derived_figures, external_fragmentation_bytes

# None if it is not known yet. (`Union`, because Python 3.10 evaluates this line, in which a class of ours stands.)
Figure = Union[int, float, str, Histogram, None]  # noqa: UP007


def figures(session: Session, snapshot: Snapshot | None = None) -> dict[str, Figure]:
    """All figures, as of `snapshot`, or as of now if none is given. Sizes are in bytes, times in seconds.

    Any thread may call it while the session's core exists. It takes the core's lock once, for a microsecond or so, and
    walks no structure.
    """
    snapshot = session.snapshot() if snapshot is None else snapshot
    stats = snapshot.stats
    found: dict[str, Figure] = dict(stats)
    for state in CHUNK_STATES:
        found[f"bytes_{state}"] = stats[f"chunks_{state}"] * stats["chunk_bytes"]
    found["host_free_bytes"] = stats["host_bytes"] - stats["host_used_bytes"]
    found["disk_free_bytes"] = stats["disk_bytes"] - stats["disk_used_bytes"]
    found["peak_rss_bytes"] = peak_rss_bytes()
    live = stats["live_bytes"]
    found["internal_fragmentation_now_ratio"] = stats["waste_bytes"] / live if live else 0.0
    found["external_fragmentation_bytes"] = external_fragmentation_bytes(stats, snapshot.audit_agrees)
    found.update(derived_figures(stats, snapshot.audit_agrees))
    for way in ("out", "in"):
        busy = stats[f"copy_{way}_seconds"]
        found[f"link_achieved_{way}"] = stats[f"swap_{way}_bytes"] / busy if busy > 0 else None
        link = session.expected_link
        found[f"link_probed_{way}"] = getattr(link, f"{way}_bytes_per_second") if link is not None else None
    planner = session.planner
    planned = planner.figures()
    bound, seconds = planned["bound_step_seconds"], planner.planned_step_seconds
    return {
        **found,
        **planned,
        "configured_policy": session.config.policy,
        "window_bytes": planned["window_bytes"] or 0,
        "unplannable_sequences": planner.unplannable_sequences,
        "step_over_bound": seconds / bound if seconds is not None and bound else None,
        "step_seconds": planner.steps.histogram,
        "last_step_seconds": planner.steps.last,
        "package_version": package_version(),
        "abi_version": str(ABI_VERSION),
        "device_name": session.device_name,
        "device_kind": "emulated" if session.emulated else "cuda",
        "device_ordinal": str(session.device_ordinal),
        "start_time_seconds": session.start_time,
    }


@functools.cache
def package_version() -> str:
    """The version of the installed package; "unknown" in a checkout that was not installed."""
    try:
        return importlib.metadata.version("ooc-alloc")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
