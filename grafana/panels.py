"""What our panels look like: one function for each kind, so that the files in `dashboards/` say only what is shown.

A panel's description is its argument `says`, then the help texts of the metrics in its expressions. Its unit comes from
the catalogue unless it is given. Queries are expressions by what their series are called. The panels are built with the
Grafana Foundation SDK, which needs Python 3.11.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.metrics import help_of, metric_of, names_in, unit_of

# Colours of a figure, each from a value on; `None` is below all of them, and green unless it is given.
ColorsByValue = Mapping[float | None, str]
TIMES = "suffix: ×"  # the unit of how many times as much something is
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")

# One meaning, one colour, in every dashboard.
COLORS = {
    "computation": "green", "waiting for data": "orange", "waiting for room": "red",
    "resident": "green", "leaving": "orange", "arriving": "yellow", "cached": "blue", "free": "super-light-blue",
    "slab": "purple", "slab_empty": "light-purple", "lost": "dark-red", "used": "green",
    "can be swapped": "green", "small, in slabs": "purple",
    "budget": "red", "live peak": "semi-dark-yellow", "peak": "semi-dark-yellow",
    "bound": "blue", "predicted": "purple", "measured": "green",
    "out": "orange", "in": "blue", "written": "orange", "read": "blue",
    "probed out": "light-orange", "probed in": "light-blue",
}  # fmt: skip
DASHED = {"budget", "bound", "predicted", "live peak", "peak", "probed out", "probed in"}


def _panel(
    panel: Any, title: str, says: str, queries: Iterable[tuple[str, str]], unit: str, height: int,
    instant: bool = False, form: PromQueryFormat | None = None,
) -> Any:  # fmt: skip
    """Gives a panel what all kinds have. `queries` are (legend, expression)."""
    expressions = []
    for letter, (legend, expression) in zip(string.ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(expression).datasource(SOURCE)
        target = target.instant() if instant else target.range()
        if legend:
            target.legend_format(legend)
        if form is not None:
            target.format(form)
        panel.with_target(target)
        expressions.append(expression)
    helps = help_of(expressions)
    panel.title(title).description(f"{says}\n\n{helps}" if helps else says).datasource(SOURCE)
    return panel.unit(unit or unit_of(" ".join(expressions))).height(height)


def _value(id_val: str, value: Any) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val=id_val, value=value)


def _thresholds(colors: ColorsByValue | None) -> build.ThresholdsConfig:
    """Colours by value as the SDK wants them. Without any, the figure is neither good nor bad."""
    whole: ColorsByValue = {None: "green", **colors} if colors else {None: "text"}
    steps = [model.Threshold(value=value, color=color) for value, color in whole.items()]
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _names_of(legend: str, expression: str) -> list[str]:
    """The names that a query's series can have: the legend, with each of the catalogue's values in place of a label."""
    label = re.search(r"\{\{(\w+)\}\}", legend)
    if label is None:
        return [legend]
    metrics = [metric_of(name) for name in names_in(expression)]
    keys = {key for metric in metrics if label[1] in metric.labels for key in metric.sources}
    return [legend.replace(label[0], value) for key in keys for value in key]


def _color_overrides(panel: Any, queries: Mapping[str, str], stacked: bool) -> None:
    """Gives series that have a meaning of their own our colours. Limits are dashed and not stacked."""
    names = {name for legend, expression in queries.items() for name in _names_of(legend, expression)}
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
    title: str, says: str, queries: Mapping[str, str], unit: str = "", stacked: bool = False, most: float | None = None,
    soft_most: float | None = None, height: int = 8,
) -> timeseries.Panel:  # fmt: skip
    """Lines over time, or stacked areas. `most` is the top of the axis, `soft_most` the least that the top can be."""
    panel: timeseries.Panel = _panel(timeseries.Panel(), title, says, queries.items(), unit, height)
    panel.min(0).line_width(1).fill_opacity(60 if stacked else 8).show_points(kinds.VisibilityMode.NEVER)
    panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL if stacked else kinds.StackingMode.NONE))
    panel.legend(common.VizLegendOptions().show_legend(True))
    panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    if most is not None:
        panel.max(most)
    if soft_most is not None:
        panel.axis_soft_max(soft_most)
    _color_overrides(panel, queries, stacked)
    return panel


def figure(
    title: str, says: str, query: str, unit: str = "", colors: ColorsByValue | None = None,
    decimals: int | None = None, texts: dict[str, str] | None = None, label: str = "",
) -> stat.Panel:  # fmt: skip
    """One number with its course over time behind it; or, with `label`, that label's text.

    Grafana draws the course only in panels with a height of at least 5. `texts` replaces values by words.
    """
    legend = f"{{{{{label}}}}}" if label else ""
    panel: stat.Panel = _panel(stat.Panel(), title, says, [(legend, query)], unit, 5, instant=bool(label))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel.thresholds(_thresholds(colors)).color_mode(kinds.BigValueColorMode.VALUE)
    panel.graph_mode(kinds.BigValueGraphMode.NONE if label or texts else kinds.BigValueGraphMode.AREA)
    if label:
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


def bars(title: str, says: str, queries: Mapping[str, str], colors: ColorsByValue) -> bargauge.Panel:
    """A horizontal bar for each query, of a share between 0 and 1."""
    panel: bargauge.Panel = _panel(bargauge.Panel(), title, says, queries.items(), "percentunit", 9, instant=True)
    panel.min(0).max(1).thresholds(_thresholds(colors))
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


def rows_by(title: str, says: str, key: Sequence[str], *columns: Column) -> table.Panel:
    """A table with a row for each combination of the labels `key`. Queries keep these and their column's label only."""
    queries = [("", column.query) for column in columns]
    panel: table.Panel = _panel(
        table.Panel(), title, says, queries, "short", 8, instant=True, form=PromQueryFormat.TABLE
    )
    panel.show_header(True).min_width(60)
    panel.sort_by([common.TableSortByFieldState().display_name(key[-1].capitalize())])
    hidden, names = {"Time": True}, {name: name.capitalize() for name in key}
    order = {name: place for place, name in enumerate(key)}
    for name, width in (("Instance", 170), ("Rank", 60)):
        panel.override_by_name(name, [_value("custom.width", width)])
    for place, column in enumerate(columns):
        # Where several queries' frames are merged, each value has its query's letter.
        value = f"Value #{string.ascii_uppercase[place]}"
        names[column.label or value] = column.title
        order[column.label or value] = len(key) + place
        if column.label:
            hidden[value] = True
            continue
        settings = [_value("unit", column.unit or unit_of(column.query))]
        if column.decimals is not None:
            settings.append(_value("decimals", column.decimals))
        panel.override_by_name(column.title, settings)
    merge = model.DataTransformerConfig(id_val="merge", options={})
    organize = model.DataTransformerConfig(
        id_val="organize", options={"excludeByName": hidden, "indexByName": order, "renameByName": names}
    )
    return panel.with_transformation(merge).with_transformation(organize)


def shades(title: str, says: str, query: str, unit: str) -> heatmap.Panel:
    """A histogram over time; the query keeps the label `le`."""
    queries = [("{{le}}", query)]
    panel: heatmap.Panel = _panel(heatmap.Panel(), title, says, queries, unit, 8, form=PromQueryFormat.HEATMAP)
    return panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(unit)).cell_gap(1)


def words(title: str, markdown: str) -> text.Panel:
    """A text; the only panel without a query."""
    return text.Panel().title(title).content(markdown).height(9)
