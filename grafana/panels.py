"""What our panels look like: one function for each kind, so that the files in `dashboards/` say only what is shown.

A panel's description is its argument `says`, then the help texts of the metrics in its expressions. Its unit comes from
the catalogue unless it is given. The panels are built with the Grafana Foundation SDK, which needs Python 3.11.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.metrics import help_of, metric_of, names_in, unit_of

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

# One meaning, one colour, in every dashboard.
COLORS = {
    "computation": "green", "waiting for data": "orange", "waiting for room": "red",
    "resident": "green", "leaving": "orange", "arriving": "yellow", "cached": "blue", "free": "super-light-blue",
    "slab": "purple", "slab_empty": "light-purple", "lost": "dark-red", "used": "green",
    "can be swapped": "green", "small, in slabs": "purple",
    "budget": "red", "needed in-core": "semi-dark-yellow", "peak": "semi-dark-yellow",
    "bound": "blue", "predicted": "purple", "measured": "green",
    "out": "orange", "in": "blue", "probed out": "light-orange", "probed in": "light-blue",
}  # fmt: skip
DASHED = {"budget", "bound", "predicted", "needed in-core", "peak", "probed out", "probed in"}


@dataclass(frozen=True)
class Query:
    """One expression and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Steps:
    """Colours by value: `base` first, then each colour from its value on. `Steps.none()` is one neutral colour."""

    steps: tuple[tuple[float, str], ...] = ()
    base: str = "green"

    @classmethod
    def none(cls) -> Steps:
        """The colour of a figure that is neither good nor bad."""
        return cls((), "text")

    def build(self) -> build.ThresholdsConfig:
        """The steps as the SDK wants them."""
        first = [model.Threshold(value=None, color=self.base)]
        later = [model.Threshold(value=value, color=color) for value, color in self.steps]
        return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(first + later)


def _described(says: str, queries: Sequence[Query]) -> str:
    texts = help_of([query.expr for query in queries])
    return f"{says}\n\n{texts}" if texts else says


def _targets(panel: Any, queries: Sequence[Query], instant: bool, as_table: bool = False) -> None:
    for index, query in enumerate(queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + index)).expr(query.expr).datasource(SOURCE)
        target = target.instant() if instant else target.range()
        if query.legend:
            target = target.legend_format(query.legend)
        if as_table:
            target = target.format(PromQueryFormat.TABLE)
        panel.with_target(target)


def _start(panel: Any, title: str, says: str, queries: Sequence[Query], unit: str, size: tuple[int, int]) -> Any:
    unit = unit or unit_of(" ".join(query.expr for query in queries))
    width, height = size
    panel.title(title).description(_described(says, queries)).datasource(SOURCE).unit(unit)
    return panel.span(width).height(height)


def _value(id_val: str, value: Any) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val=id_val, value=value)


def _names_of(query: Query) -> list[str]:
    """The names that a query's series can have: the legend, with each of the catalogue's values in place of a label."""
    label = re.search(r"\{\{(\w+)\}\}", query.legend)
    if label is None:
        return [query.legend]
    metrics = [metric_of(name) for name in names_in(query.expr)]
    keys = {key for metric in metrics if label[1] in metric.labels for key in metric.sources}
    return [query.legend.replace(label[0], value) for key in keys for value in key]


def _color_overrides(panel: Any, queries: Sequence[Query], stacked: bool) -> None:
    """Gives series that have a meaning of their own our colours. Limits are dashed and not stacked."""
    names = {name for query in queries for name in _names_of(query)}
    for name in sorted(names):
        settings = []
        if name in COLORS:
            settings.append(_value("color", {"mode": "fixed", "fixedColor": COLORS[name]}))
        if name in DASHED:
            settings.append(_value("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}))
            settings.append(_value("custom.fillOpacity", 0))
            if stacked:
                settings.append(_value("custom.stacking", {"mode": "none", "group": "limit"}))
        if settings:
            panel.override_by_name(name, settings)


def time_series(
    title: str, says: str, *queries: Query, unit: str = "", stacked: bool = False, most: float | None = None,
    size: tuple[int, int] = (12, 8), soft_most: float | None = None,
) -> timeseries.Panel:  # fmt: skip
    """Lines over time, or stacked areas. `most` is the top of the axis, `soft_most` the least that the top can be."""
    panel: timeseries.Panel = _start(timeseries.Panel(), title, says, queries, unit, size)
    _targets(panel, queries, instant=False)
    panel.min(0).line_width(1).fill_opacity(60 if stacked else 8).show_points(kinds.VisibilityMode.NEVER)
    panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL if stacked else kinds.StackingMode.NONE))
    panel.legend(
        common.VizLegendOptions()
        .display_mode(kinds.LegendDisplayMode.LIST)
        .placement(kinds.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    if most is not None:
        panel.max(most)
    if soft_most is not None:
        panel.axis_soft_max(soft_most)
    _color_overrides(panel, queries, stacked)
    return panel


def figure(
    title: str, says: str, query: Query, unit: str = "", steps: Steps | None = None, decimals: int | None = None,
    size: tuple[int, int] = (4, 5), texts: dict[str, str] | None = None, name_only: bool = False,
) -> stat.Panel:  # fmt: skip
    """One number with its course over time behind it; or, with `name_only`, the text of a label.

    Grafana draws the course only in panels with a height of at least 5. `texts` replaces values by words.
    """
    panel: stat.Panel = _start(stat.Panel(), title, says, [query], unit, size)
    _targets(panel, [query], instant=name_only)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel.thresholds((steps or Steps.none()).build()).color_mode(kinds.BigValueColorMode.VALUE)
    panel.graph_mode(kinds.BigValueGraphMode.NONE if name_only or texts else kinds.BigValueGraphMode.AREA)
    if name_only:
        panel.text_mode(kinds.BigValueTextMode.NAME)
    if decimals is not None:
        panel.decimals(decimals)
    if texts:
        options = {
            value: model.ValueMappingResult(text=words, index=place)
            for place, (value, words) in enumerate(texts.items())
        }
        panel.mappings([model.ValueMap(options=options)])
    return panel


def bars(
    title: str, says: str, *queries: Query, unit: str = "", most: float = 1, steps: Steps | None = None,
    size: tuple[int, int] = (12, 8),
) -> bargauge.Panel:  # fmt: skip
    """A horizontal bar for each query."""
    panel: bargauge.Panel = _start(bargauge.Panel(), title, says, queries, unit, size)
    _targets(panel, queries, instant=True)
    panel.min(0).max(most).thresholds((steps or Steps.none()).build())
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel.orientation(kinds.VizOrientation.HORIZONTAL).display_mode(kinds.BarGaugeDisplayMode.BASIC)
    return panel.value_mode(kinds.BarGaugeValueMode.COLOR).show_unfilled(True)


@dataclass(frozen=True)
class Column:
    """A column of a table: a query's value, or one of the labels that it keeps beside the table's key."""

    title: str
    query: str
    label: str = ""
    unit: str = ""
    decimals: int | None = None


def rows_by(
    title: str, says: str, key: Sequence[str], *columns: Column, size: tuple[int, int] = (24, 8)
) -> table.Panel:
    """A table with a row for each combination of the labels `key`. Queries keep these and their column's label only."""
    queries = [Query(column.query) for column in columns]
    panel: table.Panel = _start(table.Panel(), title, says, queries, "short", size)
    _targets(panel, queries, instant=True, as_table=True)
    panel.show_header(True).min_width(60)
    panel.sort_by([common.TableSortByFieldState().display_name(key[-1].capitalize())])
    hidden, names = {"Time": True}, {name: name.capitalize() for name in key}
    order = {name: place for place, name in enumerate(key)}
    for name, width in (("Instance", 170), ("Rank", 60)):
        panel.override_by_name(name, [_value("custom.width", width)])
    for place, column in enumerate(columns):
        # Where several queries' frames are merged, each value has its query's letter; a single query's has none.
        value = f"Value #{chr(ord('A') + place)}" if len(columns) > 1 else "Value"
        if column.label:
            hidden[value] = True
        names[column.label or value] = column.title
        order[column.label or value] = len(key) + place
        settings = [] if column.label else [_value("unit", column.unit or unit_of(column.query))]
        if column.decimals is not None:
            settings.append(_value("decimals", column.decimals))
        if settings:
            panel.override_by_name(column.title, settings)
    merge = model.DataTransformerConfig(id_val="merge", options={})
    organize = model.DataTransformerConfig(
        id_val="organize", options={"excludeByName": hidden, "indexByName": order, "renameByName": names}
    )
    return panel.with_transformation(merge).with_transformation(organize)


def shades(title: str, says: str, query: Query, unit: str, size: tuple[int, int] = (12, 8)) -> heatmap.Panel:
    """A histogram over time; the query keeps the label `le`."""
    panel: heatmap.Panel = _start(heatmap.Panel(), title, says, [query], unit, size)
    target = prometheus.Dataquery().ref_id("A").expr(query.expr).datasource(SOURCE).range().legend_format("{{le}}")
    panel.with_target(target.format(PromQueryFormat.HEATMAP))
    return panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(unit)).cell_gap(1)


def words(title: str, markdown: str, size: tuple[int, int] = (12, 8)) -> text.Panel:
    """A text; the only panel without a query."""
    return text.Panel().title(title).content(markdown).span(size[0]).height(size[1])
