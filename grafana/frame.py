"""What all dashboards share: the variables at the top, links to each other, and how they become JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from grafana.panels import SOURCE

TAG = "out-of-core"
COLUMNS = 24  # that a dashboard is wide
# Every process has this metric, whatever it does, so its labels are what there is to choose from.
PRESENT = "ooc_budget_bytes"
_ALL = model.VariableOption(selected=True, text=["All"], value=["$__all"])
# The SDK writes these for every variable; Grafana's schema knows them only for intervals.
_OF_INTERVALS = ("auto", "auto_count", "auto_min")


class Row:
    """Lines of panels under a heading. The panels of a line share its width equally.

    A collapsed row asks Prometheus nothing until somebody opens it.
    """

    def __init__(self, title: str, *lines: Sequence[Any], collapsed: bool = False) -> None:
        self.heading = build.Row(title)
        self.panels = [panel.span(COLUMNS // len(line)) for line in lines for panel in line]
        self.collapsed = collapsed


def choice(name: str, label: str, query: str, says: str) -> build.QueryVariable:
    """A variable with a label's values. At first all are chosen: `.*`, which also fits series without the label."""
    variable = build.QueryVariable(name).label(label).description(says).datasource(SOURCE).query(query)
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.NATURAL_ASC)
    return variable.multi(True).include_all(True).all_value(".*").current(_ALL)


def dashboard(title: str, uid: str, says: str, *rows: Row, more: Sequence[Any] = ()) -> str:
    """The dashboard's JSON, always the same text. `more` are variables that not all dashboards have."""
    job, instance = 'job=~"$job"', 'instance=~"$instance"'
    made = (
        build.Dashboard(title)
        .uid(uid)
        .description(says)
        .tags([TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(build.DashboardLink("Out-of-core").type(model.DashboardLinkType.DASHBOARDS).tags([TAG]).include_vars(True).keep_time(True))
        .variables([
            build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
            choice("job", "Job", f"label_values({PRESENT}, job)", "Job of Prometheus' configuration."),
            choice("instance", "Instance", f"label_values({PRESENT}{{{job}}}, instance)", "Address of a process."),
            choice("rank", "Rank", f"label_values({PRESENT}{{{job},{instance}}}, rank)", "0 without torchrun."),
            *more,
        ])
    )  # fmt: skip
    number = itertools.count(1)  # links refer to panels by it
    for row in rows:
        row.heading.id(next(number))
        for panel in row.panels:
            panel.id(next(number))
            if row.collapsed:
                row.heading.with_panel(panel)
        made.with_row(row.heading)
        if not row.collapsed:
            for panel in row.panels:
                made.with_panel(panel)
    plain: dict[str, Any] = json.loads(JSONEncoder().encode(made.build()))
    for variable in plain["templating"]["list"]:
        for name in _OF_INTERVALS:
            variable.pop(name, None)
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"
