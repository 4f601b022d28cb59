"""Planner: what was planned, what it promised, what came of it, and how often the program departed from it."""

from __future__ import annotations

from grafana.dashboards import OVER_BOUND, OVER_BOUND_COLORS, STEP_TIMES
from grafana.frame import Row, dashboard
from grafana.metrics import rate, ratio, series
from grafana.panels import TIMES, figure, shades, time_series

STEPS = rate("ooc_step_seconds_count")
BY_TIME = f"sum by (le) ({rate('ooc_step_seconds_bucket')})"

NOW = Row(
    "Now",
    [
        figure(
            "Policy",
            "Of the last plan.",
            f"max by (policy) ({series('ooc_policy_info')})",
            "short",
            label="policy",
        ),
        figure("Window", "The widest of the ranks chosen.", f"max({series('ooc_window_bytes')})"),
        figure("Plans made", "All ranks chosen together.", f"sum({series('ooc_plans_total')})", "short", decimals=0),
        figure(
            "Sequences without a plan",
            "They run on demand.",
            f"sum({series('ooc_unplannable_sequences_total')})",
            "short",
            {1: "yellow"},
            0,
        ),
        figure("Step over the bound", "The slowest rank.", OVER_BOUND, TIMES, OVER_BOUND_COLORS, 2),
        figure(
            "Steps under a plan",
            "Share, until their end, since the start.",
            ratio(series("ooc_planned_steps_total"), series("ooc_step_seconds_count")),
            "percentunit",
            {None: "red", 0.5: "yellow", 0.9: "green"},
            1,
        ),
    ],
)

PROMISES = Row(
    "Promised and kept",
    [
        time_series("Step time", "The slowest rank.", STEP_TIMES),
        time_series(
            "Prediction error",
            "Measured over predicted, less 1; mean of the ranks chosen. The plan knows an earlier step's times.",
            {"mean": f"avg({series('ooc_last_step_seconds')} / {series('ooc_predicted_step_seconds')}) - 1"},
            unit="percentunit",
        )
        .axis_soft_min(-0.2)
        .min(-1),
    ],
    [
        shades("How long steps take", "Steps a second by their time, all ranks chosen together.", BY_TIME, "s"),
        time_series(
            "Quantiles of step time",
            "All ranks chosen together; as fine as the histogram's buckets.",
            {
                "half": f"histogram_quantile(0.5, {BY_TIME})",
                "90%": f"histogram_quantile(0.9, {BY_TIME})",
                "99%": f"histogram_quantile(0.99, {BY_TIME})",
            },
            unit="s",
        ),
    ],
)

DEPARTURES = Row(
    "Departures",
    [
        time_series(
            "Departures from the plan",
            "For each step, all ranks chosen together. A switch is a departure after which another plan took over.",
            {
                "departures": ratio(rate("ooc_divergences_total"), STEPS),
                "switches": ratio(rate("ooc_plan_switches_total"), STEPS),
            },
            unit="short",
            soft_most=1,
        ),
        time_series(
            "Planning",
            "Share of the clock, of the rank that plans most; a process beside the program does it.",
            {"planning": f"max({rate('ooc_planning_seconds_total')})"},
            soft_most=0.01,
        ),
    ],
    [
        time_series(
            "Functions",
            "Operators a second, all ranks chosen together.",
            {
                "functions": f"sum({rate('ooc_functions_total')})",
                "of these, on host memory": f"sum({rate('ooc_host_backed_functions_total')})",
            },
            height=6,
        ),
        time_series(
            "Functions of a step",
            "Mean of all ranks chosen. Not level: the sequence changes, and plans fit less often.",
            {"functions": ratio(rate("ooc_functions_total"), STEPS)},
            unit="short",
            height=6,
        ),
    ],
)

RECOMPUTATION = Row(
    "Recomputation",
    [
        time_series(
            "Dropped, to be computed again",
            "Bytes a second that left without a copy, beside those that were copied out; all ranks chosen together.",
            {
                "dropped": f"sum({rate('ooc_recompute_drop_bytes_total')})",
                "copied out": f"sum({rate('ooc_swap_bytes_total', direction='out')})",
            },
            height=6,
        ),
        time_series(
            "Computing again",
            "Share of the clock, mean of the ranks chosen.",
            {"computing again": f"avg({rate('ooc_recompute_seconds_total')})"},
            soft_most=0.1,
            height=6,
        ),
        time_series(
            "Functions that ran again",
            "For each step, all ranks chosen together.",
            {
                "functions": ratio(rate("ooc_recompute_functions_total"), STEPS),
                "drops": ratio(rate("ooc_recompute_drops_total"), STEPS),
            },
            unit="short",
            height=6,
        ),
        time_series(
            "Refused drops",
            "Since the start, all ranks chosen together: computed again, they did not have the same bits.",
            {"refused": f"sum({series('ooc_recompute_refused_drops_total')})"},
            soft_most=1,
            height=6,
        ),
    ],
)

DASHBOARD = dashboard(
    "Out-of-core: planner",
    "ooc-planner",
    "What was planned, what it promised, what came of it, and how often the program departed from it.",
    NOW,
    PROMISES,
    DEPARTURES,
    RECOMPUTATION,
)
