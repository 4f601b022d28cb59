"""Memory and fragmentation: where the bytes are, how close to the limits, and what rounding costs."""

from __future__ import annotations

from grafana.dashboards import MARGIN, MARGIN_COLORS
from grafana.frame import Row, dashboard
from grafana.metrics import by, rate, ratio, series
from grafana.panels import TIMES, figure, time_series

BUDGET = f"sum({series('ooc_budget_bytes')})"


def _used(tier: str) -> str:
    """The share of a tier's budget that is taken, of the fullest rank; 0 where the tier is not in use."""
    budget = f"clamp_min({series(f'ooc_{tier}_budget_bytes')}, 1)"
    return f"max({series(f'ooc_{tier}_bytes', state='used')} / ignoring (state) {budget})"


NOW = Row(
    "Now",
    [
        figure("Budget", "Of all ranks chosen together.", BUDGET),
        figure("Live peak", "Of all ranks chosen together.", f"sum({series('ooc_live_peak_bytes')})"),
        figure(
            "Peak over the budget",
            "Most device memory ever held, over the budget; the fullest rank. It is above 1 only where the "
            "program has lowered the budget since.",
            f"max({series('ooc_device_peak_bytes')} / {series('ooc_budget_bytes')})",
            "percentunit",
            {1.0001: "red"},
            1,
        ),
        figure(
            "Budget / smallest",
            "Budget over the smallest one that works, of the tightest rank.",
            MARGIN,
            TIMES,
            MARGIN_COLORS,
            2,
        ),
        figure(
            "Host memory used",
            "Swapped data over what it may take, of the fullest rank. 0 where a disk is in its place.",
            _used("host"),
            "percentunit",
            {0.8: "yellow", 0.9: "red"},
            1,
        ),
        figure(
            "External fragmentation",
            "Memory that is neither free nor in use: 0 by construction, recounted on every scrape.",
            f"max({series('ooc_external_fragmentation_ratio')})",
            "percentunit",
            {0.000001: "red"},
        ),
    ],
)

DEVICE = Row(
    "Device memory",
    [
        time_series(
            "By what it is held for",
            "All ranks chosen together.",
            {**by("state", series("ooc_device_bytes")), "budget": BUDGET},
            stacked=True,
        ),
        time_series(
            "What the program has allocated",
            "On the device or in host memory; the budget is what may be on the device.",
            {
                "can be swapped": f"sum({series('ooc_requested_bytes', size='region')})",
                "small, in slabs": f"sum({series('ooc_requested_bytes', size='small')})",
                "budget": BUDGET,
            },
            stacked=True,
        ),
    ],
    [
        time_series(
            "Pinned",
            "What must be on the device now; it cannot be more than the budget.",
            {"fullest rank": f"max({series('ooc_pinned_bytes')} / {series('ooc_budget_bytes')})"},
            unit="percentunit",
            most=1,
        ),
        time_series("Chunks", "All ranks chosen together.", by("state", series("ooc_chunks")), stacked=True),
    ],
)

HOST = Row(
    "Host memory",
    [
        time_series(
            "For swapped data",
            "All ranks chosen together; free is kept for the next swap-out. It may grow to the host budget.",
            {**by("state", series("ooc_host_bytes")), "peak": f"sum({series('ooc_host_peak_bytes')})"},
            stacked=True,
        ),
        time_series(
            "Not pinned",
            "Its copies are slower. The driver pins what it can.",
            {"not pinned": f"sum({series('ooc_host_unpinned_bytes')})"},
            soft_most=1024**2,
        ),
    ],
)

DISK = Row(
    "Disk",
    [
        figure(
            "Disk space used",
            "Swapped data over what it may take, of the fullest rank. 0 without a disk (OOC_DISK).",
            _used("disk"),
            "percentunit",
            {0.8: "yellow", 0.9: "red"},
            1,
        ),
        figure(
            "Most memory of a process",
            "With all that is not ours: with a disk, the budget and what Python and the libraries take.",
            f"max({series('ooc_process_peak_resident_bytes')})",
        ),
        figure(
            "Failures of the disk",
            "Since the start, all ranks chosen together.",
            f"sum({series('ooc_disk_failures_total')})",
            "short",
            {1: "red"},
            0,
        ),
    ],
    [
        time_series(
            "On the disk",
            "All ranks chosen together; free is kept for the next swap-out. It may grow to the budget.",
            {
                **by("state", series("ooc_disk_bytes")),
                "budget": f"sum({series('ooc_disk_budget_bytes')})",
                "peak": f"sum({series('ooc_disk_peak_bytes')})",
            },
            stacked=True,
        ),
        time_series(
            "Read and written",
            "Bytes a second, all ranks chosen together.",
            {
                "read": f"sum({rate('ooc_disk_read_bytes_total')})",
                "written": f"sum({rate('ooc_disk_written_bytes_total')})",
            },
        ),
        time_series(
            "Below host memory",
            "The share of the time in which host copies came up and went down, and in which functions waited for them; "
            "mean of the ranks.",
            {
                **by("direction", rate("ooc_disk_seconds_total"), "avg"),
                "waiting": f"avg({rate('ooc_disk_stall_seconds_total')})",
            },
        ),
        time_series(
            "Failures",
            "A second, all ranks chosen together. Most are made again, and nothing is lost.",
            {"failures": f"sum({rate('ooc_disk_failures_total')})"},
            soft_most=1,
        ),
    ],
)

FRAGMENTATION = Row(
    "Fragmentation and allocation",
    [
        time_series(
            "Internal fragmentation",
            "Rounding to whole chunks and holes in slabs, over the bytes allocated; worst rank. "
            "Smaller chunks make it less.",
            by("at", series("ooc_internal_fragmentation_ratio"), "max"),
            soft_most=0.1,
        ),
        time_series(
            "Fragmentation in bytes",
            "All ranks chosen together.",
            {
                "internal, {{at}}": f"sum by (at) ({series('ooc_internal_fragmentation_bytes')})",
                "external": f"sum({series('ooc_external_fragmentation_bytes')})",
            },
        ),
        time_series(
            "Allocations",
            "A second, all ranks chosen together.",
            {
                "allocations": f"sum({rate('ooc_allocations_total')})",
                "frees": f"sum({rate('ooc_frees_total')})",
            },
        ),
    ],
    [
        time_series(
            "Allocations from the address cache",
            "Share that needed no call of the driver.",
            {"from the cache": ratio(rate("ooc_cache_hits_total"), rate("ooc_allocations_total"))},
            unit="percentunit",
            most=1,
            height=6,
        ),
        time_series(
            "Held by users",
            "Pins a second: memory that NumPy, DLPack or data_ptr reached, and that stays on the device.",
            {"pins": f"sum({rate('ooc_pins_total')})"},
            soft_most=1,
            height=6,
        ),
    ],
)

DASHBOARD = dashboard(
    "Out-of-core: memory",
    "ooc-memory",
    "Where the bytes are, how close to the limits, and what rounding costs.",
    NOW,
    DEVICE,
    HOST,
    DISK,
    FRAGMENTATION,
)
