"""Overview: is it healthy, how much slower than in-core, what would help. Figures are the slowest rank's."""

from __future__ import annotations

from grafana.frame import Row, dashboard
from grafana.metrics import SELECTION, rate, series
from grafana.panels import Query, Steps, bars, figure, time_series, words

TIMES = "suffix: ×"
DATA = rate("ooc_stall_seconds_total", cause="swap_in")
ROOM = rate("ooc_stall_seconds_total", cause="room")
WAITING = f"clamp_max(sum without (cause) ({rate('ooc_stall_seconds_total')}), 0.99)"
SLOWDOWN = f"max(1 / (1 - {WAITING}))"
DEMAND = (
    f"sum({rate('ooc_demand_swap_bytes_total', direction='in')})"
    f" / (sum({rate('ooc_swap_bytes_total', direction='in')}) > 0) or vector(0)"
)

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


def _health() -> Row:
    alerts = f'count(ALERTS{{alertname=~"OutOfCore.*",alertstate="firing",{SELECTION}}}) or vector(0)'
    return Row(
        "Is it healthy, and how fast?",
        [
            figure(
                "Alerts firing",
                "Alerts of `grafana/rules/alerts.yaml` for what is chosen; what to do is in `docs/runbook.md`.",
                Query(alerts),
                "short",
                Steps(((1, "red"),)),
                texts={"0": "none"},
            ),
            figure(
                "Slower than in-core (est.)",
                "An estimate: time over the time without waiting, of the rank that waits most. "
                "What interception costs is not in it.",
                Query(SLOWDOWN),
                TIMES,
                Steps(((1.25, "yellow"), (2, "red"))),
                2,
            ),
            figure(
                "Step over the bound",
                "How far the slowest rank is from what no schedule beats. The bound is made from the times in the step "
                "that was planned from; below 1, operators have become faster since.",
                Query(f"max({series('ooc_step_over_bound_ratio')})"),
                TIMES,
                Steps(((1.5, "yellow"), (2, "red"))),
                2,
            ),
            figure("Step time", "Of the slowest rank.", Query(f"max({series('ooc_last_step_seconds')})"), decimals=2),
            figure(
                "Memory needed / budget",
                "Above 1 it does not fit and has to be swapped.",
                Query(f"max({series('ooc_oversubscription_ratio')})"),
                TIMES,
                decimals=2,
            ),
            figure(
                "Budget / smallest",
                "Budget over the smallest one that works. At 1 the next larger operator runs out of memory.",
                Query(f"min({series('ooc_budget_bytes')} / {series('ooc_min_budget_bytes')})"),
                TIMES,
                Steps(((1.05, "yellow"), (1.2, "green")), "red"),
                2,
            ),
        ],
    )


def _time() -> Row:
    return Row(
        "Time",
        [
            time_series(
                "Step time",
                "The last step of the slowest rank, what the plan promised, and what no plan beats.",
                Query(f"max({series('ooc_last_step_seconds')})", "measured"),
                Query(f"max({series('ooc_predicted_step_seconds')})", "predicted"),
                Query(f"max({series('ooc_bound_step_seconds')})", "bound"),
            ),
            time_series(
                "Where the time goes",
                "Shares of the clock, mean of all ranks chosen. Computation is what is left.",
                Query(f"1 - avg({WAITING})", "computation"),
                Query(f"avg({DATA})", "waiting for data"),
                Query(f"avg({ROOM})", "waiting for room"),
                unit="percentunit",
                stacked=True,
                most=1,
            ),
        ],
    )


def _memory_and_links() -> Row:
    return Row(
        "Memory and transfers",
        [
            time_series(
                "Device memory",
                "Everything held, by what it is held for, of all ranks chosen together.",
                Query(f"sum by (state) ({series('ooc_device_bytes')})", "{{state}}"),
                Query(f"sum({series('ooc_budget_bytes')})", "budget"),
                Query(f"sum({series('ooc_live_peak_bytes')})", "needed in-core"),
                stacked=True,
            ),
            time_series(
                "Transfers",
                "Bytes a second, of all ranks chosen together. out: device to host.",
                Query(f"sum by (direction) ({rate('ooc_swap_bytes_total')})", "{{direction}}"),
            ),
        ],
    )


def _what_helps() -> Row:
    return Row(
        "What would help?",
        [
            bars(
                "Causes",
                "Each is a share: of the clock, of the bytes brought in, of the memory. The worst of the ranks chosen.",
                Query(f"max({ROOM})", "Waiting for room"),
                Query(f"max({DATA})", "Waiting for data"),
                Query(f"max({rate('ooc_swap_seconds_total', direction='in')})", "Link in is busy"),
                Query(f"max({rate('ooc_swap_seconds_total', direction='out')})", "Link out is busy"),
                Query(DEMAND, "Brought in on demand"),
                Query(f"max({series('ooc_internal_fragmentation_ratio', at='live_peak')})", "Lost to rounding"),
                unit="percentunit",
                steps=Steps(((0.25, "yellow"), (0.5, "orange"), (0.75, "red"))),
                size=(12, 9),
            ),
            words("How to read it", HELPS.strip(), (12, 9)),
        ],
    )


def make() -> str:
    """The dashboard's JSON."""
    says = (
        "Training with more memory than the device has: is it healthy, how much slower than in-core, what would help."
    )
    rows = [_health(), _time(), _memory_and_links(), _what_helps()]
    return dashboard("Out-of-core: overview", "ooc-overview", says, rows)
