"""Planner: what was planned, what it promised, what came of it, and how often the program departed from it."""

from __future__ import annotations

from grafana.frame import Row, dashboard
from grafana.metrics import rate, series
from grafana.panels import Query, Steps, figure, shades, time_series

TIMES = "suffix: ×"
STEPS = rate("ooc_step_seconds_count")


def _each_step(counter: str) -> str:
    return f"sum({rate(counter)}) / (sum({STEPS}) > 0) or vector(0)"


def _quantile(share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) ({rate('ooc_step_seconds_bucket')}))"


def _figures() -> Row:
    info = series("ooc_policy_info")
    return Row(
        "Now",
        [
            figure(
                "Policy",
                "Of the last plan.",
                Query(f"max by (policy) ({info})", "{{policy}}"),
                "short",
                name_only=True,
            ),
            figure("Window", "The widest of the ranks chosen.", Query(f"max({series('ooc_window_bytes')})")),
            figure(
                "Plans made",
                "All ranks chosen together.",
                Query(f"sum({series('ooc_plans_total')})"),
                "short",
                decimals=0,
            ),
            figure(
                "Sequences without a plan",
                "They run on demand.",
                Query(f"sum({series('ooc_unplannable_sequences_total')})"),
                "short",
                Steps(((1, "yellow"),)),
                0,
            ),
            figure(
                "Step over the bound",
                "The slowest rank.",
                Query(f"max({series('ooc_step_over_bound_ratio')})"),
                TIMES,
                Steps(((1.5, "yellow"), (2, "red"))),
                2,
            ),
            figure(
                "Steps under a plan",
                "Share, until their end, since the start.",
                Query(
                    f"sum({series('ooc_planned_steps_total')})"
                    f" / (sum({series('ooc_step_seconds_count')}) > 0) or vector(0)"
                ),
                "percentunit",
                Steps(((0.5, "yellow"), (0.9, "green")), "red"),
                1,
            ),
        ],
    )


def _promises() -> Row:
    return Row(
        "Promised and kept",
        [
            time_series(
                "Step time",
                "The slowest rank.",
                Query(f"max({series('ooc_last_step_seconds')})", "measured"),
                Query(f"max({series('ooc_predicted_step_seconds')})", "predicted"),
                Query(f"max({series('ooc_bound_step_seconds')})", "bound"),
            ),
            time_series(
                "Prediction error",
                "Measured over predicted, less 1; mean of the ranks chosen. The plan knows an earlier step's times.",
                Query(f"avg({series('ooc_last_step_seconds')} / {series('ooc_predicted_step_seconds')}) - 1", "mean"),
                unit="percentunit",
            )
            .axis_soft_min(-0.2)
            .min(-1),
            shades(
                "How long steps take",
                "Steps a second by their time, all ranks chosen together.",
                Query(f"sum by (le) ({rate('ooc_step_seconds_bucket')})"),
                "s",
            ),
            time_series(
                "Quantiles of step time",
                "All ranks chosen together; as fine as the histogram's buckets.",
                Query(_quantile(0.5), "half"),
                Query(_quantile(0.9), "90%"),
                Query(_quantile(0.99), "99%"),
                unit="s",
            ),
        ],
    )


def _departures() -> Row:
    return Row(
        "Departures",
        [
            time_series(
                "Departures from the plan",
                "For each step, all ranks chosen together. A switch is a departure after which another plan took over.",
                Query(_each_step("ooc_divergences_total"), "departures"),
                Query(_each_step("ooc_plan_switches_total"), "switches"),
                unit="short",
                soft_most=1,
            ),
            time_series(
                "Planning",
                "Share of the clock, of the rank that plans most; it happens between steps.",
                Query(f"max({rate('ooc_planning_seconds_total')})", "planning"),
                soft_most=0.01,
            ),
            time_series(
                "Functions",
                "Operators a second, all ranks chosen together.",
                Query(f"sum({rate('ooc_functions_total')})", "functions"),
                Query(f"sum({rate('ooc_host_backed_functions_total')})", "of these, on host memory"),
                size=(12, 6),
            ),
            time_series(
                "Functions of a step",
                "Mean of all ranks chosen. Not level: the sequence changes, and plans fit less often.",
                Query(_each_step("ooc_functions_total"), "functions"),
                unit="short",
                size=(12, 6),
            ),
        ],
    )


def make() -> str:
    """The dashboard's JSON."""
    says = "What was planned, what it promised, what came of it, and how often the program departed from it."
    return dashboard("Out-of-core: planner", "ooc-planner", says, [_figures(), _promises(), _departures()])
