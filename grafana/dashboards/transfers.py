"""Transfers and stalls: how busy the links are, how fast against what they can do, and who waits for what."""

from __future__ import annotations

from grafana.dashboards import DEMAND, WAITING
from grafana.frame import Row, dashboard
from grafana.metrics import by, rate, series
from grafana.panels import figure, time_series

MOVED = f"sum by (direction) ({rate('ooc_swap_bytes_total')})"
OPERATIONS = f"sum by (direction) ({rate('ooc_swap_operations_total')})"


def _link(way: str, says: str) -> list[object]:
    return [
        figure(f"Moved {way}", says, f"sum({rate('ooc_swap_bytes_total', direction=way)})"),
        figure(
            f"Link {way} busy",
            "Share of the clock, of the busiest rank.",
            f"max({rate('ooc_swap_seconds_total', direction=way)})",
            colors={0.7: "yellow", 0.9: "red"},
            decimals=1,
        ),
    ]


NOW = Row(
    "Now",
    [
        *_link("in", "Host to device."),
        *_link("out", "Device to host."),
        figure(
            "Waiting",
            "Share of the clock, of the rank that waits most.",
            f"max({WAITING})",
            "percentunit",
            {0.2: "yellow", 0.5: "red"},
            1,
        ),
        figure(
            "Brought in on demand",
            "Share of the bytes brought in: no plan had asked for them in time.",
            DEMAND,
            "percentunit",
            {0.1: "yellow", 0.5: "red"},
            1,
        ),
    ],
)

LINKS = Row(
    "Links",
    [
        time_series("Moved", "Bytes a second, all ranks chosen together.", {"{{direction}}": MOVED}),
        time_series(
            "Speed while copying",
            "Of the slowest rank, beside what the link can do. "
            "Much less than probed: pieces are small, host memory is not pinned, or somebody else uses the link.",
            {
                **by("direction", series("ooc_link_achieved_bytes_per_second"), "min"),
                "probed {{direction}}": f"min by (direction) ({series('ooc_link_probed_bytes_per_second')})",
            },
        ),
    ],
    [
        time_series(
            "Busy",
            "Share of the clock in which copies are under way, of the busiest rank.",
            by("direction", rate("ooc_swap_seconds_total"), "max"),
            most=1,
        ),
        time_series("Operations", "Swaps a second, all ranks chosen together.", {"{{direction}}": OPERATIONS}),
        time_series(
            "Bytes of a swap",
            "Mean. Small ones cost latency.",
            {"{{direction}}": f"{MOVED} / ({OPERATIONS} > 0)"},
            unit="bytes",
        ),
    ],
)

STALLS = Row(
    "Stalls",
    [
        time_series(
            "Waiting, by cause",
            "Share of the clock, mean of all ranks chosen.",
            {
                "waiting for data": f"avg({rate('ooc_stall_seconds_total', cause='swap_in')})",
                "waiting for room": f"avg({rate('ooc_stall_seconds_total', cause='room')})",
            },
            stacked=True,
            soft_most=0.1,
        ),
        time_series(
            "On demand",
            "Bytes a second that a function had to wait for, all ranks chosen together.",
            by("direction", rate("ooc_demand_swap_bytes_total")),
        ),
    ],
    [
        time_series(
            "Swap-ins on demand",
            "A second, all ranks chosen together.",
            {
                "on demand": f"sum({rate('ooc_demand_swap_ins_total')})",
                "all": f"sum({rate('ooc_swap_operations_total', direction='in')})",
            },
        ),
        time_series(
            "Copied ahead, and dropped clean",
            "Bytes a second, all ranks together: copied out before they had to leave, and left without a copy.",
            {
                "copied ahead": f"sum({rate('ooc_write_back_bytes_total')})",
                "dropped clean": f"sum({rate('ooc_clean_drop_bytes_total')})",
            },
        ),
        time_series(
            "Clean drops, and copies for nothing",
            "A second: what left without a copy, and copies that a write overtook.",
            {
                "dropped clean": f"sum({rate('ooc_clean_drops_total')})",
                "for nothing": f"sum({rate('ooc_cancelled_swap_outs_total')})",
            },
        ),
    ],
)

DRIVER = Row(
    "Driver",
    [
        time_series(
            "Calls for memory",
            "A second, all ranks chosen together.",
            by("call", rate("ooc_driver_calls_total")),
        ),
        time_series(
            "Events made",
            "A second, all ranks chosen together. They are pooled.",
            {"events": f"sum({rate('ooc_stream_events_total')})"},
            soft_most=1,
        ),
    ],
    [
        time_series(
            "Failed calls",
            "A second, all ranks chosen together. Most are retried.",
            by("call", rate("ooc_driver_errors_total")),
            soft_most=1,
            height=7,
        ),
    ],
)

DASHBOARD = dashboard(
    "Out-of-core: transfers and stalls",
    "ooc-transfers",
    "How busy the links are, how fast against what they can do, and who waits for what.",
    NOW,
    LINKS,
    STALLS,
    DRIVER,
)
