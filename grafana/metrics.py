"""PromQL from the catalogue: a misspelt name or label fails when the dashboards are made, not on a screen."""

from __future__ import annotations

import re

from ooc.prometheus.catalogue import CATALOGUE, COMMON_LABELS, Metric

# What the variables at the top of every dashboard choose. A run outside torchrun has a rank too: "0".
SELECTION = 'job=~"$job",instance=~"$instance",rank=~"$rank"'
WINDOW = "$__rate_interval"

_BY_NAME = {metric.name: metric for metric in CATALOGUE}
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
_NAME = re.compile(r"\booc_[a-z_]+")


def metric_of(series: str) -> Metric:
    """The catalogue's metric that a series name belongs to. Raises KeyError."""
    for part in _HISTOGRAM_PARTS:
        family = _BY_NAME.get(series.removesuffix(part))
        if series.endswith(part) and family is not None and family.type == "histogram":
            return family
    if series not in _BY_NAME or _BY_NAME[series].type == "histogram":
        raise KeyError(f"{series} is not in the catalogue (integrations/ooc/prometheus/catalogue.py)")
    return _BY_NAME[series]


def series(name: str, **labels: str) -> str:
    """The selector of a metric's chosen series: series("ooc_chunks", state="free"). Raises KeyError, ValueError."""
    metric = metric_of(name)
    for label, value in labels.items():
        if label in COMMON_LABELS or (label == "le" and metric.type == "histogram"):
            continue
        if label not in metric.labels:
            raise ValueError(f"{name} has no label {label}, only {metric.labels}")
        place = metric.labels.index(label)
        if metric.type != "info" and value not in {key[place] for key in metric.sources}:
            raise ValueError(f"{name}: {label} is never {value!r}")
    own = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{SELECTION}{own}}}"


def rate(name: str, **labels: str) -> str:
    """The growth of a counter per second. Raises ValueError for what is no counter."""
    if metric_of(name).type not in ("counter", "histogram"):
        raise ValueError(f"{name} is no counter: its rate means nothing")
    return f"rate({series(name, **labels)}[{WINDOW}])"


def ratio(part: str, whole: str) -> str:
    """The sum of `part` over the sum of `whole`; 0 where there is nothing of `whole`."""
    return f"sum({part}) / (sum({whole}) > 0) or vector(0)"


def by(label: str, expression: str, how: str = "sum") -> dict[str, str]:
    """A query that gives each value of a label a series, which is called like the value."""
    return {f"{{{{{label}}}}}": f"{how} by ({label}) ({expression})"}


def names_in(expression: str) -> list[str]:
    """The series names in an expression, each once, in order. Names of recording rules have colons and do not count."""
    without_rules = re.sub(r"[a-zA-Z_]\w*(:\w+)+", "", expression)
    return list(dict.fromkeys(_NAME.findall(without_rules)))


_UNITS = {"seconds": "s", "bytes": "bytes", "bytes_per_second": "binBps", "ratio": "percentunit", "": "short"}
_RATES = {"seconds": "percentunit", "bytes": "binBps", "": "ops"}


def _unit(name: str) -> str:
    """The unit of a series. A histogram's counts have none: a number of steps is no time, although their sum is one."""
    return "" if metric_of(name).type == "histogram" and not name.endswith("_sum") else metric_of(name).unit


def unit_of(expression: str) -> str:
    """Grafana's unit for an expression whose metrics all have the same unit. Raises ValueError if they have not."""
    units = {_unit(name) for name in names_in(expression)}
    if len(units) != 1:
        raise ValueError(f"no one unit in {expression}: say which")
    table = _RATES if "rate(" in expression else _UNITS
    return table[units.pop()]


def help_of(expressions: list[str]) -> str:
    """Name and help text of every metric in the expressions, as a Markdown list."""
    names = dict.fromkeys(metric_of(name).name for text in expressions for name in names_in(text))
    return "\n".join(f"- `{name}`: {_BY_NAME[name].help}" for name in names)
