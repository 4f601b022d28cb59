"""Memory and fragmentation: where the bytes are, how close to the limits, and what rounding costs."""

from __future__ import annotations

from grafana.frame import Row, dashboard
from grafana.metrics import rate, series
from grafana.panels import Query, Steps, figure, time_series

TIMES = "suffix: ×"


def _total(name: str, legend: str, **labels: str) -> Query:
    return Query(f"sum({series(name, **labels)})", legend)


def _figures() -> Row:
    host_used = f"{series('ooc_host_bytes', state='used')} / ignoring (state) {series('ooc_host_budget_bytes')}"
    return Row(
        "Now",
        [
            figure("Budget", "Of all ranks chosen together.", Query(f"sum({series('ooc_budget_bytes')})")),
            figure("Needed in-core", "Of all ranks chosen together.", Query(f"sum({series('ooc_live_peak_bytes')})")),
            figure(
                "Peak over the budget",
                "Most device memory ever held, over the budget; the fullest rank. It is above 1 only where the "
                "program has lowered the budget since.",
                Query(f"max({series('ooc_device_peak_bytes')} / {series('ooc_budget_bytes')})"),
                "percentunit",
                Steps(((1.0001, "red"),)),
                1,
            ),
            figure(
                "Budget / smallest",
                "Budget over the smallest one that works, of the tightest rank.",
                Query(f"min({series('ooc_budget_bytes')} / {series('ooc_min_budget_bytes')})"),
                TIMES,
                Steps(((1.05, "yellow"), (1.2, "green")), "red"),
                2,
            ),
            figure(
                "Host memory used",
                "Swapped data over what it may take, of the fullest rank.",
                Query(f"max({host_used})"),
                "percentunit",
                Steps(((0.8, "yellow"), (0.9, "red"))),
                1,
            ),
            figure(
                "External fragmentation",
                "Memory that is neither free nor in use: 0 by construction, recounted on every scrape.",
                Query(f"max({series('ooc_external_fragmentation_ratio')})"),
                "percentunit",
                Steps(((0.000001, "red"),)),
            ),
        ],
    )


def _device() -> Row:
    return Row(
        "Device memory",
        [
            time_series(
                "By what it is held for",
                "All ranks chosen together.",
                Query(f"sum by (state) ({series('ooc_device_bytes')})", "{{state}}"),
                _total("ooc_budget_bytes", "budget"),
                stacked=True,
            ),
            time_series(
                "What the program has allocated",
                "On the device or in host memory; the budget is what may be on the device.",
                _total("ooc_requested_bytes", "can be swapped", size="region"),
                _total("ooc_requested_bytes", "small, in slabs", size="small"),
                _total("ooc_budget_bytes", "budget"),
                stacked=True,
            ),
            time_series(
                "Pinned",
                "What must be on the device now; it cannot be more than the budget.",
                Query(f"max({series('ooc_pinned_bytes')} / {series('ooc_budget_bytes')})", "fullest rank"),
                unit="percentunit",
                most=1,
            ),
            time_series(
                "Chunks",
                "All ranks chosen together.",
                Query(f"sum by (state) ({series('ooc_chunks')})", "{{state}}"),
                stacked=True,
            ),
        ],
    )


def _host() -> Row:
    return Row(
        "Host memory",
        [
            time_series(
                "For swapped data",
                "All ranks chosen together; free is kept for the next swap-out. It may grow to the host budget.",
                Query(f"sum by (state) ({series('ooc_host_bytes')})", "{{state}}"),
                _total("ooc_host_peak_bytes", "peak"),
                stacked=True,
            ),
            time_series(
                "Not pinned",
                "Its copies are slower. The driver pins what it can.",
                _total("ooc_host_unpinned_bytes", "not pinned"),
                soft_most=1024**2,
            ),
        ],
    )


def _fragmentation() -> Row:
    hits = f"sum({rate('ooc_cache_hits_total')}) / (sum({rate('ooc_allocations_total')}) > 0) or vector(0)"
    return Row(
        "Fragmentation and allocation",
        [
            time_series(
                "Internal fragmentation",
                "Rounding to whole chunks and holes in slabs, over the bytes allocated; worst rank. "
                "Smaller chunks make it less.",
                Query(f"max by (at) ({series('ooc_internal_fragmentation_ratio')})", "{{at}}"),
                soft_most=0.1,
                size=(8, 8),
            ),
            time_series(
                "Fragmentation in bytes",
                "All ranks chosen together.",
                Query(f"sum by (at) ({series('ooc_internal_fragmentation_bytes')})", "internal, {{at}}"),
                Query(f"sum({series('ooc_external_fragmentation_bytes')})", "external"),
                size=(8, 8),
            ),
            time_series(
                "Allocations",
                "A second, all ranks chosen together.",
                Query(f"sum({rate('ooc_allocations_total')})", "allocations"),
                Query(f"sum({rate('ooc_frees_total')})", "frees"),
                size=(8, 8),
            ),
            time_series(
                "Allocations from the address cache",
                "Share that needed no call of the driver.",
                Query(hits, "from the cache"),
                unit="percentunit",
                most=1,
                size=(12, 6),
            ),
            time_series(
                "Held by users",
                "Pins a second: memory that NumPy, DLPack or data_ptr reached, and that stays on the device.",
                Query(f"sum({rate('ooc_pins_total')})", "pins"),
                size=(12, 6),
                soft_most=1,
            ),
        ],
    )


def make() -> str:
    """The dashboard's JSON."""
    says = "Where the bytes are, how close to the limits, and what rounding costs."
    return dashboard("Out-of-core: memory", "ooc-memory", says, [_figures(), _device(), _host(), _fragmentation()])
