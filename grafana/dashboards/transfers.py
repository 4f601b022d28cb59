"""Transfers and stalls: how busy the links are, how fast against what they can do, and who waits for what."""

from __future__ import annotations

from grafana.frame import Row, dashboard
from grafana.metrics import rate, series
from grafana.panels import Query, Steps, figure, time_series

BUSY = Steps(((0.7, "yellow"), (0.9, "red")))
WAITING = f"sum without (cause) ({rate('ooc_stall_seconds_total')})"


def share(part: str, whole: str) -> str:
    """An expression for `part` over `whole`, which is 0 if there is nothing of `whole`."""
    return f"sum({part}) / (sum({whole}) > 0) or vector(0)"


def _figures() -> Row:
    def link(way: str, says: str) -> list[object]:
        return [
            figure(f"Moved {way}", says, Query(f"sum({rate('ooc_swap_bytes_total', direction=way)})")),
            figure(
                f"Link {way} busy",
                "Share of the clock, of the busiest rank.",
                Query(f"max({rate('ooc_swap_seconds_total', direction=way)})"),
                steps=BUSY,
                decimals=1,
            ),
        ]

    demand = share(rate("ooc_demand_swap_bytes_total", direction="in"), rate("ooc_swap_bytes_total", direction="in"))
    return Row(
        "Now",
        [
            *link("in", "Host to device."),
            *link("out", "Device to host."),
            figure(
                "Waiting",
                "Share of the clock, of the rank that waits most.",
                Query(f"max({WAITING})"),
                "percentunit",
                Steps(((0.2, "yellow"), (0.5, "red"))),
                1,
            ),
            figure(
                "Brought in on demand",
                "Share of the bytes brought in: no plan had asked for them in time.",
                Query(demand),
                "percentunit",
                Steps(((0.1, "yellow"), (0.5, "red"))),
                1,
            ),
        ],
    )


def _links() -> Row:
    probed = series("ooc_link_probed_bytes_per_second")
    achieved = series("ooc_link_achieved_bytes_per_second")
    operations = rate("ooc_swap_operations_total")
    size = f"sum by (direction) ({rate('ooc_swap_bytes_total')}) / (sum by (direction) ({operations}) > 0)"
    return Row(
        "Links",
        [
            time_series(
                "Moved",
                "Bytes a second, all ranks chosen together.",
                Query(f"sum by (direction) ({rate('ooc_swap_bytes_total')})", "{{direction}}"),
            ),
            time_series(
                "Speed while copying",
                "Of the slowest rank, beside what the link can do. "
                "Much less than probed: pieces are small, host memory is not pinned, or somebody else uses the link.",
                Query(f"min by (direction) ({achieved})", "{{direction}}"),
                Query(f"min by (direction) ({probed})", "probed {{direction}}"),
            ),
            time_series(
                "Busy",
                "Share of the clock in which copies are under way, of the busiest rank.",
                Query(f"max by (direction) ({rate('ooc_swap_seconds_total')})", "{{direction}}"),
                most=1,
                size=(8, 8),
            ),
            time_series(
                "Operations",
                "Swaps a second, all ranks chosen together.",
                Query(f"sum by (direction) ({rate('ooc_swap_operations_total')})", "{{direction}}"),
                size=(8, 8),
            ),
            time_series(
                "Bytes of a swap",
                "Mean. Small ones cost latency.",
                Query(size, "{{direction}}"),
                unit="bytes",
                size=(8, 8),
            ),
        ],
    )


def _stalls() -> Row:
    return Row(
        "Stalls",
        [
            time_series(
                "Waiting, by cause",
                "Share of the clock, mean of all ranks chosen.",
                Query(f"avg({rate('ooc_stall_seconds_total', cause='swap_in')})", "waiting for data"),
                Query(f"avg({rate('ooc_stall_seconds_total', cause='room')})", "waiting for room"),
                stacked=True,
                soft_most=0.1,
            ),
            time_series(
                "On demand",
                "Bytes a second that a function had to wait for, all ranks chosen together.",
                Query(f"sum by (direction) ({rate('ooc_demand_swap_bytes_total')})", "{{direction}}"),
            ),
            time_series(
                "Swap-ins on demand",
                "A second, all ranks chosen together.",
                Query(f"sum({rate('ooc_demand_swap_ins_total')})", "on demand"),
                Query(f"sum({rate('ooc_swap_operations_total', direction='in')})", "all"),
                size=(8, 8),
            ),
            time_series(
                "Copied ahead, and dropped clean",
                "Bytes a second, all ranks together: copied out before they had to leave, and left without a copy.",
                Query(f"sum({rate('ooc_write_back_bytes_total')})", "copied ahead"),
                Query(f"sum({rate('ooc_clean_drop_bytes_total')})", "dropped clean"),
                size=(8, 8),
            ),
            time_series(
                "Clean drops, and copies for nothing",
                "A second: what left without a copy, and copies that a write overtook.",
                Query(f"sum({rate('ooc_clean_drops_total')})", "dropped clean"),
                Query(f"sum({rate('ooc_cancelled_swap_outs_total')})", "for nothing"),
                size=(8, 8),
            ),
        ],
    )


def _driver() -> Row:
    return Row(
        "Driver",
        [
            time_series(
                "Calls for memory",
                "A second, all ranks chosen together.",
                Query(f"sum by (call) ({rate('ooc_driver_calls_total')})", "{{call}}"),
            ),
            time_series(
                "Events made",
                "A second, all ranks chosen together. They are pooled.",
                Query(f"sum({rate('ooc_stream_events_total')})", "events"),
                soft_most=1,
            ),
            time_series(
                "Failed calls",
                "A second, all ranks chosen together. Most are retried.",
                Query(f"sum by (call) ({rate('ooc_driver_errors_total')})", "{{call}}"),
                size=(24, 7),
                soft_most=1,
            ),
        ],
    )


def make() -> str:
    """The dashboard's JSON."""
    says = "How busy the links are, how fast against what they can do, and who waits for what."
    return dashboard(
        "Out-of-core: transfers and stalls", "ooc-transfers", says, [_figures(), _links(), _stalls(), _driver()]
    )
