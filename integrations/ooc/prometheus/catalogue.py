"""The catalogue: every metric, as data. The collector, docs/metrics.md and the dashboards are made from it.

Conventions are Prometheus's: one prefix, base units (seconds, bytes, ratios), `_total` for counters, `_info` for texts,
and only labels with few values. So a name tells its metric's type and unit. Every sample has the labels of
`COMMON_LABELS` beside its own.

A source is the name of a figure: most are fields of `ooc_stats` (`ooc_alloc/csrc/ooc_alloc.h`), the others are made in
`figures.py`. A figure that is not known yet (no plan so far, a link that was never probed) has no sample; the metric's
HELP and TYPE lines are there all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from swapd.step_times import BUCKETS as STEP_BUCKETS

__all__ = ["CATALOGUE", "CHUNK_STATES", "COMMON_LABELS", "STEP_BUCKETS", "Kind", "Metric"]

COMMON_LABELS = ("rank",)  # the label's value is `swapd.ranks.rank()`
CHUNK_STATES = ("resident", "leaving", "arriving", "cached", "free", "slab", "slab_empty", "lost")
_OUT_IN = ("out", "in")  # from the device to the host or the disk, and back

_UNITS = ("bytes_per_second", "seconds", "bytes", "ratio")

Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """One metric family."""

    name: str  # as in a query; a histogram's has no _bucket, _sum or _count
    figures: str | Mapping[str, str]  # one; or by values of `label`; or, for texts, by labels
    help: str
    label: str = ""  # its own, beside COMMON_LABELS
    group: str = ""  # heading in the documentation

    @cached_property
    def type(self) -> Kind:
        if self.name == "ooc_step_seconds":
            return "histogram"
        return "counter" if self.name.endswith("_total") else "info" if self.name.endswith("_info") else "gauge"

    @cached_property
    def unit(self) -> str:
        """The unit at the end of its name; "" for counts and texts."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in _UNITS if stem.endswith(f"_{unit}")), "")

    @cached_property
    def labels(self) -> tuple[str, ...]:
        if self.type == "info":
            return tuple(self.figures)
        return (self.label,) if self.label else ()

    @cached_property
    def sources(self) -> Mapping[tuple[str, ...], str]:
        """Label values -> name of the figure. For an info metric: (label,) -> name of the figure that is its text."""
        if isinstance(self.figures, str):
            return {(): self.figures}
        return {(value,): figure for value, figure in self.figures.items()}


def _each(values: Iterable[str], figure: str) -> Mapping[str, str]:
    """The figure's name for each value of a label."""
    return {value: figure.format(value) for value in values}


_GROUPS = {
    "Memory": (
        Metric("ooc_budget_bytes", "budget_bytes", "Device memory that the program may use."),
        Metric("ooc_device_capacity_bytes", "device_total_bytes", "Memory of the device."),
        Metric("ooc_host_budget_bytes", "host_budget_bytes", "Host memory that swapped data may take."),
        Metric("ooc_chunk_size_bytes", "chunk_bytes", "Size of a physical chunk."),
        Metric("ooc_requested_bytes", {"region": "region_live_bytes", "small": "small_live_bytes"},
               "Bytes that the program has allocated, on the device or not. region: can be swapped; "
               "small: in slabs.", label="size"),
        Metric("ooc_live_peak_bytes", "live_peak_bytes",
               "Most bytes allocated at once since the start, as asked for: not rounded to chunks."),
        Metric("ooc_oversubscription_ratio", "oversubscription",
               "Live peak over the budget: above 1 something has to be swapped."),
        Metric("ooc_device_bytes", _each(CHUNK_STATES, "bytes_{}"),
               "Physical device memory held, by what it is held for; the states add up. leaving and "
               "arriving: under way. cached: of freed variables, for new ones. slab: small "
               "allocations. lost: the driver would not unmap it.", label="state"),
        Metric("ooc_chunks", _each(CHUNK_STATES, "chunks_{}"),
               "Physical chunks, by state as in ooc_device_bytes.", label="state"),
        Metric("ooc_device_peak_bytes", "device_peak_bytes", "Most physical device memory held since the start."),
        Metric("ooc_pinned_bytes", "pinned_bytes",
               "Memory that must stay on the device now: running functions and users hold it."),
        Metric("ooc_min_budget_bytes", "min_budget_bytes",
               "Smallest budget that would have done so far: the largest function and slabs, or twice the slabs."),
        Metric("ooc_host_bytes", {"used": "host_used_bytes", "free": "host_free_bytes"},
               "Host memory taken for swapped data; the states add up.", label="state"),
        Metric("ooc_host_peak_bytes", "host_peak_bytes", "Most host memory taken for swapped data."),
        Metric("ooc_host_unpinned_bytes", "host_unpinned_bytes",
               "Host memory that the driver would not pin: its copies are slower."),
        Metric("ooc_process_peak_resident_bytes", "peak_rss_bytes",
               "Most memory of the machine that the process has had, with all that is not ours."),
    ),
    "Disk": (
        Metric("ooc_disk_budget_bytes", "disk_budget_bytes",
               "Disk space that swapped data may take. Like all metrics of the disk, 0 without one (OOC_DISK)."),
        Metric("ooc_disk_bytes", {"used": "disk_used_bytes", "free": "disk_free_bytes"},
               "Disk space taken for swapped data; the states add up.", label="state"),
        Metric("ooc_disk_peak_bytes", "disk_peak_bytes", "Most disk space taken for swapped data."),
        Metric("ooc_disk_read_bytes_total", "disk_read_bytes", "Bytes read from the disk."),
        Metric("ooc_disk_written_bytes_total", "disk_written_bytes", "Bytes written to the disk."),
        Metric("ooc_disk_seconds_total", {"read": "disk_read_seconds", "write": "disk_write_seconds"},
               "Time during which host copies came up from a disk below host memory and went down to it.",
               label="direction"),
        Metric("ooc_disk_stall_seconds_total", "stall_disk_seconds",
               "Of the stalls: time that functions waited for host copies to come up from such a disk."),
        Metric("ooc_disk_failures_total", "disk_failure_count",
               "Attempts to read, to write or to reserve space that failed or came short; most are made again."),
    ),
    "Fragmentation": (
        Metric("ooc_internal_fragmentation_bytes", {"now": "waste_bytes", "live_peak": "waste_at_live_peak_bytes"},
               "Rounding to whole chunks and holes in slabs, now and when most was allocated.", label="at"),
        Metric("ooc_internal_fragmentation_ratio", {
            "now": "internal_fragmentation_now_ratio",
            "live_peak": "internal_fragmentation_ratio",
        }, "The same over the bytes allocated.", label="at"),
        Metric("ooc_external_fragmentation_bytes", "external_fragmentation_bytes",
               "Device memory held that is neither free nor in use. 0 by construction; recounted every minute."),
        Metric("ooc_external_fragmentation_ratio", "external_fragmentation_ratio", "The same over the budget."),
    ),
    "Transfers": (
        Metric("ooc_swap_bytes_total", _each(_OUT_IN, "swap_{}_bytes"),
               "Bytes copied. direction out: from the device to the host, or to the disk where one is "
               "in use; in: back. Clean drops copy nothing.", label="direction"),
        Metric("ooc_swap_operations_total", _each(_OUT_IN, "swap_{}_count"),
               "Swap-outs and swap-ins of one piece of a variable.", label="direction"),
        Metric("ooc_swap_seconds_total", _each(_OUT_IN, "copy_{}_seconds"),
               "Time during which copies were under way.", label="direction"),
        Metric("ooc_link_achieved_bytes_per_second", _each(_OUT_IN, "link_achieved_{}"),
               "Speed of the program's own copies since the start.", label="direction"),
        Metric("ooc_link_probed_bytes_per_second", _each(_OUT_IN, "link_probed_{}"),
               "Speed that `swapd probe` measured, of the disk where one is in use, or that the emulated "
               "link is held to. Absent if neither is known.", label="direction"),
        Metric("ooc_clean_drops_total", "clean_drop_count",
               "Pieces that left without a copy, because the host copy was still valid."),
        Metric("ooc_clean_drop_bytes_total", "clean_drop_bytes", "Their bytes."),
        Metric("ooc_write_back_bytes_total", "write_back_bytes",
               "Of the bytes copied out: ahead of time, while the variable stayed on the device, to "
               "leave at once later."),
        Metric("ooc_cancelled_swap_outs_total", "cancelled_swap_out_count",
               "Swap-outs that a write overtook: the copy was for nothing."),
    ),
    "Stalls and departures": (
        Metric("ooc_stall_seconds_total", {"swap_in": "stall_swap_in_seconds", "room": "stall_room_seconds"},
               "Time that the program waited. swap_in: for data to arrive; room: for memory to become "
               "free.", label="cause"),
        Metric("ooc_demand_swap_ins_total", "demand_swap_in_count",
               "Swap-ins that a function had to wait for: no plan had brought the data."),
        Metric("ooc_demand_swap_bytes_total", _each(_OUT_IN, "demand_swap_{}_bytes"),
               "Bytes moved on demand; part of ooc_swap_bytes_total.", label="direction"),
        Metric("ooc_divergences_total", "divergence_count",
               "Iterations that departed from the plan that was under way (mispredictions)."),
        Metric("ooc_plan_switches_total", "plan_switch_count", "Departures after which another plan took over."),
    ),
    "Planner": (
        Metric("ooc_policy_info", {"configured": "configured_policy", "policy": "policy"},
               "The policy asked for, and that of the last plan."),
        Metric("ooc_window_bytes", "window_bytes", "Schedule window of the last plan; 0: its policy has none."),
        Metric("ooc_plans_total", "plan_count", "Plans made and installed."),
        Metric("ooc_planning_seconds_total", "planning_seconds", "Time spent planning, as a rule by another process."),
        Metric("ooc_unplannable_sequences_total", "unplannable_sequences",
               "Sequences for which the policy found no plan; they run on demand."),
        Metric("ooc_predicted_step_seconds", "predicted_step_seconds",
               "Step time that the last plan predicts. Absent before the first plan."),
        Metric("ooc_bound_step_seconds", "bound_step_seconds",
               "Step time that no schedule beats, for the last plan's sequence; where it recomputes, no schedule "
               "of swapping and recomputing. Absent before."),
    ),
    "Recomputation": (
        Metric("ooc_recompute_drops_total", "recompute_drop_count",
               "Variables whose bytes were given up without a copy, to be computed again (OOC_RECOMPUTE)."),
        Metric("ooc_recompute_drop_bytes_total", "recompute_drop_bytes", "Their bytes."),
        Metric("ooc_recompute_functions_total", "recompute_function_count",
               "Functions that ran again to make such bytes. They count in ooc_functions_total, too."),
        Metric("ooc_recompute_seconds_total", "recompute_seconds", "Time that these took."),
        Metric("ooc_recompute_refused_drops_total", "recompute_refused_count",
               "Drops that were planned and never carried out: their trial did not give the same bits, or there was "
               "none."),
    ),
    "Steps": (
        Metric("ooc_step_seconds", "step_seconds", "Time of an iteration, from boundary to boundary."),
        Metric("ooc_last_step_seconds", "last_step_seconds", "Time of the last iteration."),
        Metric("ooc_step_over_bound_ratio", "step_over_bound",
               "Last iteration that ran under the last plan, over ooc_bound_step_seconds. Absent "
               "before the first one."),
        Metric("ooc_planned_steps_total", "planned_iteration_count",
               "Iterations that ran under a plan until their end."),
        Metric("ooc_functions_total", "functions", "Functions (operators) that began."),
        Metric("ooc_host_backed_functions_total", "host_backed_function_count",
               "Of these, those that fit no budget, and used host memory in its place."),
        Metric("ooc_allocations_total", "allocations", "Allocations."),
        Metric("ooc_frees_total", "frees", "Frees."),
        Metric("ooc_cache_hits_total", "cache_hits",
               "Allocations served from a freed region, with no call of the driver."),
        Metric("ooc_pins_total", "external_pin_count", "Pins by users, not functions (NumPy, DLPack, data_ptr)."),
    ),
    "Driver, build, device": (
        Metric("ooc_driver_errors_total", {
            "cuMemCreate": "driver_failures_mem_create",
            "cuMemMap": "driver_failures_mem_map",
            "cuMemSetAccess": "driver_failures_mem_set_access",
            "cuMemUnmap": "driver_failures_mem_unmap",
            "cuMemcpyDtoHAsync": "driver_failures_copy_out",
            "cuMemcpyHtoDAsync": "driver_failures_copy_in",
            "cuMemHostRegister": "driver_failures_host_register",
            "cuEventCreate": "driver_failures_event_create",
            "cuEventRecord": "driver_failures_event_record",
            "cuEventSynchronize": "driver_failures_event_synchronize",
            "cuStreamSynchronize": "driver_failures_stream_synchronize",
            "cuStreamWaitEvent": "driver_failures_stream_wait_event",
        }, "Failed attempts to call the driver; most are retried.", label="call"),
        Metric("ooc_driver_calls_total", {
            "cuMemCreate": "driver_calls_create",
            "cuMemMap": "driver_calls_map",
            "cuMemSetAccess": "driver_calls_set_access",
            "cuMemUnmap": "driver_calls_unmap",
        }, "Calls of the driver for memory. In a steady state few are needed.", label="call"),
        Metric("ooc_stream_events_total", "event_create_count", "Events made to order streams; they are pooled."),
        Metric("ooc_build_info", {"version": "package_version", "abi": "abi_version"},
               "Version of the package and of its native interface."),
        Metric("ooc_device_info", {"device": "device_name", "kind": "device_kind", "ordinal": "device_ordinal"},
               "The device. kind: emulated or cuda."),
        Metric("ooc_start_time_seconds", "start_time_seconds", "When the allocator was turned on, Unix time."),
    ),
}  # fmt: skip

CATALOGUE: tuple[Metric, ...] = tuple(
    replace(metric, group=group) for group, metrics in _GROUPS.items() for metric in metrics
)
