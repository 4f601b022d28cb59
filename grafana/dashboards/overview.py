"""Overview: is it healthy, how much slower than in-core, what would help. Figures are the slowest rank's."""

from __future__ import annotations

from grafana.dashboards import DEMAND, MARGIN, MARGIN_COLORS, OVER_BOUND, OVER_BOUND_COLORS, STEP_TIMES, WAITING
from grafana.frame import Row, dashboard
from grafana.metrics import SELECTION, by, rate, series
from grafana.panels import TIMES, bars, figure, time_series, words

DATA = rate("ooc_stall_seconds_total", cause="swap_in")
ROOM = rate("ooc_stall_seconds_total", cause="room")
STALLED = f"clamp_max({WAITING}, 0.99)"

HELPS = """
A long bar is a cause; look for the first one that is long.

- **Waiting for room**: a larger budget (`OOC_BUDGET`), a smaller batch, or a faster link out.
- **Waiting for data**, and a **busy link**: a faster link, or fewer bytes: a larger budget, a smaller batch.
- **Waiting for data**, and both links idle half the time: a plan that looks further ahead
  (`OOC_WINDOW`, `OOC_POLICY=auto`).
- **Brought in on demand**: the sequence of operators changes from step to step, or no plan was found. See *Planner*.
- **Lost to rounding**: smaller chunks (`OOC_CHUNK_SIZE`).

`swapd record` and `swapd simulate` say what each of them would save, in seconds, before anything is changed.
"""

HEALTH = Row(
    "Is it healthy, and how fast?",
    [
        figure(
            "Alerts firing",
            "Alerts of `grafana/rules/alerts.yaml` for what is chosen; what to do is in `docs/runbook.md`.",
            f'count(ALERTS{{alertname=~"OutOfCore.*",alertstate="firing",{SELECTION}}}) or vector(0)',
            "short",
            {1: "red"},
            texts={"0": "none"},
        ),
        figure(
            "Slower than in-core (est.)",
            "An estimate: time over the time without waiting, of the rank that waits most. "
            "What interception costs is not in it.",
            f"max(1 / (1 - {STALLED}))",
            TIMES,
            {1.25: "yellow", 2: "red"},
            2,
        ),
        figure(
            "Step over the bound",
            "How far the slowest rank is from what no schedule beats. The bound is made from the times in the step "
            "that was planned from; below 1, operators have become faster since.",
            OVER_BOUND,
            TIMES,
            OVER_BOUND_COLORS,
            2,
        ),
        figure("Step time", "Of the slowest rank.", STEP_TIMES["measured"], decimals=2),
        figure(
            "Memory needed / budget",
            "Above 1 it does not fit and has to be swapped.",
            f"max({series('ooc_oversubscription_ratio')})",
            TIMES,
            decimals=2,
        ),
        figure(
            "Budget / smallest",
            "Budget over the smallest one that works. At 1 the next larger operator runs out of memory.",
            MARGIN,
            TIMES,
            MARGIN_COLORS,
            2,
        ),
    ],
)

TIME = Row(
    "Time",
    [
        time_series(
            "Step time",
            "The last step of the slowest rank, what the plan promised, and what no plan beats.",
            STEP_TIMES,
        ),
        time_series(
            "Where the time goes",
            "Shares of the clock, mean of all ranks chosen. Computation is what is left.",
            {
                "computation": f"1 - avg({STALLED})",
                "waiting for data": f"avg({DATA})",
                "waiting for room": f"avg({ROOM})",
            },
            unit="percentunit",
            stacked=True,
            most=1,
        ),
    ],
)

MEMORY_AND_LINKS = Row(
    "Memory and transfers",
    [
        time_series(
            "Device memory",
            "Everything held, by what it is held for, of all ranks chosen together.",
            {
                **by("state", series("ooc_device_bytes")),
                "budget": f"sum({series('ooc_budget_bytes')})",
                "live peak": f"sum({series('ooc_live_peak_bytes')})",
            },
            stacked=True,
        ),
        time_series(
            "Transfers",
            "Bytes a second, of all ranks chosen together. out: device to host.",
            by("direction", rate("ooc_swap_bytes_total")),
        ),
    ],
)

WHAT_HELPS = Row(
    "What would help?",
    [
        bars(
            "Causes",
            "Each is a share: of the clock, of the bytes brought in, of the memory. The worst of the ranks chosen.",
            {
                "Waiting for room": f"max({ROOM})",
                "Waiting for data": f"max({DATA})",
                "Link in is busy": f"max({rate('ooc_swap_seconds_total', direction='in')})",
                "Link out is busy": f"max({rate('ooc_swap_seconds_total', direction='out')})",
                "Brought in on demand": DEMAND,
                "Lost to rounding": f"max({series('ooc_internal_fragmentation_ratio', at='live_peak')})",
            },
            {0.25: "yellow", 0.5: "orange", 0.75: "red"},
        ),
        words("How to read it", HELPS.strip()),
    ],
)

DASHBOARD = dashboard(
    "Out-of-core: overview",
    "ooc-overview",
    "Training with more memory than the device has: is it healthy, how much slower than in-core, what would help.",
    HEALTH,
    TIME,
    MEMORY_AND_LINKS,
    WHAT_HELPS,
)
