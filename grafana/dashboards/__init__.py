"""The dashboards' JSON, one in each module as `DASHBOARD`; and here what several of them show."""

from __future__ import annotations

from grafana.metrics import rate, ratio, series
from grafana.panels import ColorsByValue

STEP_TIMES = {
    "measured": f"max({series('ooc_last_step_seconds')})",
    "predicted": f"max({series('ooc_predicted_step_seconds')})",
    "bound": f"max({series('ooc_bound_step_seconds')})",
}
OVER_BOUND = f"max({series('ooc_step_over_bound_ratio')})"
OVER_BOUND_COLORS: ColorsByValue = {1.5: "yellow", 2: "red"}
# The budget over the smallest that works, of the tightest rank.
MARGIN = f"min({series('ooc_budget_bytes')} / {series('ooc_min_budget_bytes')})"
MARGIN_COLORS: ColorsByValue = {None: "red", 1.05: "yellow", 1.2: "green"}
DEMAND = ratio(rate("ooc_demand_swap_bytes_total", direction="in"), rate("ooc_swap_bytes_total", direction="in"))
WAITING = f"sum without (cause) ({rate('ooc_stall_seconds_total')})"
