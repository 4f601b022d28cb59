"""The catalogue: every metric, as data. The collector, docs/metrics.md and the dashboards are made from it.

Conventions are Prometheus's: one prefix, base units (seconds, bytes, ratios), `_total` for counters, `_info` for texts,
and only labels with few values. Every sample has the labels of `COMMON_LABELS` beside its own.

A source is the name of a figure: most are fields of `ooc_stats` (`ooc_alloc/csrc/ooc_alloc.h`), the others are made in
`figures.py`. A figure that is not known yet (no plan so far, a link that was never probed) has no sample; the metric's
HELP and TYPE lines are there all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from swapd.step_times import BUCKETS as STEP_BUCKETS

__all__ = ["CATALOGUE", "COMMON_LABELS", "DRIVER_CALLS", "STEP_BUCKETS", "Kind", "Metric"]

COMMON_LABELS = ("rank",)  # the label's value is `swapd.ranks.rank()`

Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """One metric family."""

    name: str  # as in a query; a histogram's has no _bucket, _sum or _count
    type: Kind
    unit: str  # "seconds", "bytes", "bytes_per_second", "ratio"; "" for counts and texts
    help: str
    labels: tuple[str, ...] = ()  # its own, beside COMMON_LABELS
    # Label values -> name of the figure. For an info metric: (label,) -> name of the figure that is its text.
    sources: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    group: str = ""  # heading in the documentation


def _gauge(name: str, unit: str, text: str, source: str) -> Metric:
    return Metric(name, "gauge", unit, text, (), {(): source})


def _counter(name: str, unit: str, text: str, source: str) -> Metric:
    return Metric(name, "counter", unit, text, (), {(): source})


def _info(name: str, text: str, sources: Mapping[str, str]) -> Metric:
    return Metric(name, "info", "", text, tuple(sources), {(label,): source for label, source in sources.items()})


def _by(label: str, sources: Mapping[str, str], metric: Metric) -> Metric:
    """The same family with one sample for each value of a label."""
    return replace(metric, labels=(label,), sources={(value,): source for value, source in sources.items()})


_MEMORY = (
    _gauge("ooc_budget_bytes", "bytes", "Device memory that the program may use.", "budget_bytes"),
    _gauge("ooc_device_capacity_bytes", "bytes", "Memory of the device.", "device_total_bytes"),
    _gauge("ooc_host_budget_bytes", "bytes", "Host memory that swapped data may take.", "host_budget_bytes"),
    _gauge("ooc_chunk_size_bytes", "bytes", "Size of a physical chunk.", "chunk_bytes"),
    _by(
        "size",
        {"region": "region_live_bytes", "small": "small_live_bytes"},
        _gauge(
            "ooc_requested_bytes",
            "bytes",
            "Bytes that the program has allocated, on the device or not. region: can be swapped; small: in slabs.",
            "",
        ),
    ),
    _gauge(
        "ooc_live_peak_bytes", "bytes", "Most bytes allocated at once since the start: what it would need in-core.",
        "live_peak_bytes",
    ),
    _gauge(
        "ooc_oversubscription_ratio", "ratio", "Live peak over the budget: above 1 something has to be swapped.",
        "oversubscription",
    ),
    _by(
        "state",
        {
            "resident": "bytes_resident",
            "leaving": "bytes_leaving",
            "arriving": "bytes_arriving",
            "cached": "bytes_cached",
            "free": "bytes_free",
            "slab": "bytes_slab",
            "slab_empty": "bytes_slab_empty",
            "lost": "bytes_lost",
        },
        _gauge(
            "ooc_device_bytes",
            "bytes",
            "Physical device memory held, by what it is held for; the states add up. leaving and arriving: under way. "
            "cached: of freed variables, for new ones. slab: small allocations. lost: the driver would not unmap it.",
            "",
        ),
    ),
    _by(
        "state",
        {
            state: f"chunks_{state}"
            for state in ("resident", "leaving", "arriving", "cached", "free", "slab", "slab_empty", "lost")
        },
        _gauge("ooc_chunks", "", "Physical chunks, by state as in ooc_device_bytes.", ""),
    ),
    _gauge(
        "ooc_device_peak_bytes", "bytes", "Most physical device memory held since the start.", "device_peak_bytes"
    ),
    _gauge(
        "ooc_pinned_bytes", "bytes", "Memory that must stay on the device now: running functions and users hold it.",
        "pinned_bytes",
    ),
    _gauge(
        "ooc_min_budget_bytes", "bytes", "Smallest budget that would have done so far: the largest function and slabs.",
        "min_budget_bytes",
    ),
    _by(
        "state",
        {"used": "host_used_bytes", "free": "host_free_bytes"},
        _gauge("ooc_host_bytes", "bytes", "Host memory taken for swapped data; the states add up.", ""),
    ),
    _gauge("ooc_host_peak_bytes", "bytes", "Most host memory taken for swapped data.", "host_peak_bytes"),
    _gauge(
        "ooc_host_unpinned_bytes", "bytes", "Host memory that the driver would not pin: its copies are slower.",
        "host_unpinned_bytes",
    ),
)  # fmt: skip

_FRAGMENTATION = (
    _by(
        "at",
        {"now": "waste_bytes", "live_peak": "waste_at_live_peak_bytes"},
        _gauge(
            "ooc_internal_fragmentation_bytes", "bytes",
            "Rounding to whole chunks and holes in slabs, now and when most was allocated.", "",
        ),
    ),
    _by(
        "at",
        {"now": "internal_fragmentation_now_ratio", "live_peak": "internal_fragmentation_ratio"},
        _gauge("ooc_internal_fragmentation_ratio", "ratio", "The same over the bytes allocated.", ""),
    ),
    _gauge(
        "ooc_external_fragmentation_bytes", "bytes",
        "Device memory held that is neither free nor in use. 0 by construction; recounted every minute.",
        "external_fragmentation_bytes",
    ),
    _gauge(
        "ooc_external_fragmentation_ratio", "ratio", "The same over the budget.", "external_fragmentation_ratio"
    ),
)  # fmt: skip

_OUT_IN = ("out", "in")  # device to host, host to device

_TRANSFERS = (
    _by(
        "direction",
        {way: f"swap_{way}_bytes" for way in _OUT_IN},
        _counter(
            "ooc_swap_bytes_total", "bytes",
            "Bytes copied. direction out: device to host; in: host to device. Clean drops copy nothing.", "",
        ),
    ),
    _by(
        "direction",
        {way: f"swap_{way}_count" for way in _OUT_IN},
        _counter("ooc_swap_operations_total", "", "Swap-outs and swap-ins of one piece of a variable.", ""),
    ),
    _by(
        "direction",
        {way: f"copy_{way}_seconds" for way in _OUT_IN},
        _counter("ooc_swap_seconds_total", "seconds", "Time during which copies were under way.", ""),
    ),
    _by(
        "direction",
        {way: f"link_achieved_{way}" for way in _OUT_IN},
        _gauge(
            "ooc_link_achieved_bytes_per_second", "bytes_per_second",
            "Speed of the program's own copies since the start.", "",
        ),
    ),
    _by(
        "direction",
        {way: f"link_probed_{way}" for way in _OUT_IN},
        _gauge(
            "ooc_link_probed_bytes_per_second", "bytes_per_second",
            "Speed that `swapd probe` measured, or that the emulated link is held to. Absent if neither is known.", "",
        ),
    ),
    _counter(
        "ooc_clean_drops_total", "", "Pieces that left without a copy, because the host copy was still valid.",
        "clean_drop_count",
    ),
    _counter("ooc_clean_drop_bytes_total", "bytes", "Their bytes.", "clean_drop_bytes"),
    _counter(
        "ooc_write_back_bytes_total", "bytes",
        "Of the bytes copied out: ahead of time, while the variable stayed on the device, to leave at once later.",
        "write_back_bytes",
    ),
    _counter(
        "ooc_cancelled_swap_outs_total", "", "Swap-outs that a write overtook: the copy was for nothing.",
        "cancelled_swap_out_count",
    ),
)  # fmt: skip

_STALLS = (
    _by(
        "cause",
        {"swap_in": "stall_swap_in_seconds", "room": "stall_room_seconds"},
        _counter(
            "ooc_stall_seconds_total", "seconds",
            "Time that the program waited. swap_in: for data to arrive; room: for memory to become free.", "",
        ),
    ),
    _counter(
        "ooc_demand_swap_ins_total", "", "Swap-ins that a function had to wait for: no plan had brought the data.",
        "demand_swap_in_count",
    ),
    _by(
        "direction",
        {way: f"demand_swap_{way}_bytes" for way in _OUT_IN},
        _counter("ooc_demand_swap_bytes_total", "bytes", "Bytes moved on demand; part of ooc_swap_bytes_total.", ""),
    ),
    _counter(
        "ooc_divergences_total", "", "Iterations that departed from the plan that was under way (mispredictions).",
        "divergence_count",
    ),
    _counter("ooc_plan_switches_total", "", "Departures after which another plan took over.", "plan_switch_count"),
)  # fmt: skip

_PLANNER = (
    _info("ooc_policy_info", "The policy asked for, and that of the last plan.", {
        "configured": "configured_policy", "policy": "policy",
    }),
    _gauge("ooc_window_bytes", "bytes", "Schedule window of the last plan; 0: its policy has none.", "window_bytes"),
    _counter("ooc_plans_total", "", "Plans made and installed.", "plan_count"),
    _counter("ooc_planning_seconds_total", "seconds", "Time spent planning, between iterations.", "planning_seconds"),
    _counter(
        "ooc_unplannable_sequences_total", "", "Sequences for which the policy found no plan; they run on demand.",
        "unplannable_sequences",
    ),
    _gauge(
        "ooc_predicted_step_seconds", "seconds", "Step time that the last plan predicts. Absent before the first plan.",
        "predicted_step_seconds",
    ),
    _gauge(
        "ooc_bound_step_seconds", "seconds",
        "Step time that no schedule beats, for the last plan's sequence. Absent before.",
        "bound_step_seconds",
    ),
)  # fmt: skip

_STEPS = (
    Metric(
        "ooc_step_seconds", "histogram", "seconds", "Time of an iteration, from boundary to boundary.", (),
        {(): "step_seconds"},
    ),
    _gauge("ooc_last_step_seconds", "seconds", "Time of the last iteration.", "last_step_seconds"),
    _gauge(
        "ooc_step_over_bound_ratio", "ratio",
        "Last iteration that ran under the last plan, over ooc_bound_step_seconds. Absent before the first one.",
        "step_over_bound",
    ),
    _counter(
        "ooc_planned_steps_total", "", "Iterations that ran under a plan until their end.", "planned_iteration_count"
    ),
    _counter("ooc_functions_total", "", "Functions (operators) that began.", "functions"),
    _counter(
        "ooc_host_backed_functions_total", "", "Of these, those that fit no budget, and used host memory in its place.",
        "host_backed_function_count",
    ),
    _counter("ooc_allocations_total", "", "Allocations.", "allocations"),
    _counter("ooc_frees_total", "", "Frees.", "frees"),
    _counter(
        "ooc_cache_hits_total", "", "Allocations served from a freed region, with no call of the driver.", "cache_hits"
    ),
    _counter("ooc_pins_total", "", "Pins by users, not functions (NumPy, DLPack, data_ptr).", "external_pin_count"),
)  # fmt: skip

# Label values are the driver's own names, so that they can be looked up in CUDA's documentation.
DRIVER_CALLS = {
    "cuMemCreate": "mem_create",
    "cuMemMap": "mem_map",
    "cuMemSetAccess": "mem_set_access",
    "cuMemUnmap": "mem_unmap",
    "cuMemcpyDtoHAsync": "copy_out",
    "cuMemcpyHtoDAsync": "copy_in",
    "cuMemHostRegister": "host_register",
    "cuEventCreate": "event_create",
    "cuEventRecord": "event_record",
    "cuEventSynchronize": "event_synchronize",
    "cuStreamSynchronize": "stream_synchronize",
    "cuStreamWaitEvent": "stream_wait_event",
}

_DRIVER = (
    _by(
        "call",
        {call: f"driver_failures_{name}" for call, name in DRIVER_CALLS.items()},
        _counter("ooc_driver_errors_total", "", "Failed attempts to call the driver; most are retried.", ""),
    ),
    _by(
        "call",
        {
            "cuMemCreate": "driver_calls_create",
            "cuMemMap": "driver_calls_map",
            "cuMemSetAccess": "driver_calls_set_access",
            "cuMemUnmap": "driver_calls_unmap",
        },
        _counter("ooc_driver_calls_total", "", "Calls of the driver for memory. In a steady state few are needed.", ""),
    ),
    _counter("ooc_stream_events_total", "", "Events made to order streams; they are pooled.", "event_create_count"),
    _info("ooc_build_info", "Version of the package and of its native interface.", {
        "version": "package_version", "abi": "abi_version",
    }),
    _info("ooc_device_info", "The device. kind: emulated or cuda.", {
        "device": "device_name", "kind": "device_kind", "ordinal": "device_ordinal",
    }),
    _gauge("ooc_start_time_seconds", "seconds", "When the allocator was turned on, Unix time.", "start_time_seconds"),
)  # fmt: skip

_GROUPS = {
    "Memory": _MEMORY,
    "Fragmentation": _FRAGMENTATION,
    "Transfers": _TRANSFERS,
    "Stalls and departures": _STALLS,
    "Planner": _PLANNER,
    "Steps": _STEPS,
    "Driver, build, device": _DRIVER,
}

CATALOGUE: tuple[Metric, ...] = tuple(
    replace(metric, group=group) for group, metrics in _GROUPS.items() for metric in metrics
)
