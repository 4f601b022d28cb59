"""The page that is scraped: Prometheus's text format, version 0.0.4.

prometheus_client could write it (`collector.py`), but takes a millisecond of processor time where this takes a tenth:
everything that does not change from scrape to scrape is prepared. A test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ooc.prometheus.catalogue import CATALOGUE, COMMON_LABELS, STEP_BUCKETS, Metric
from ooc.prometheus.figures import Figure
from swapd.step_times import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def escape(text: str) -> str:
    """A label's value as it stands between the quotes."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """As the text format writes it."""
    if isinstance(value, int):
        return str(value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def labelled(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """The part of a sample before its value."""
    return name + "{" + ",".join(f'{label}="{escape(value)}"' for label, value in pairs) + "} "


def heading(metric: Metric) -> str:
    """A family's HELP and TYPE lines."""
    kind = "gauge" if metric.type == "info" else metric.type
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {metric.name} {text}\n# TYPE {metric.name} {kind}\n"


class Page:
    """Writes the page for one process.

    Args:
        common: values of `COMMON_LABELS`, in their order.
    """

    def __init__(self, common: tuple[str, ...]) -> None:
        self._common = tuple(zip(COMMON_LABELS, common, strict=True))
        # Of each metric: its HELP and TYPE lines, and of each sample what precedes the value, and its figure.
        self._families: list[tuple[Metric, str, list[tuple[str, str]]]] = []
        for metric in CATALOGUE:
            samples = []
            if metric.type in ("gauge", "counter"):
                for values, source in metric.sources.items():
                    pairs = (*self._common, *zip(metric.labels, values, strict=True))
                    samples.append((labelled(metric.name, pairs), source))
            self._families.append((metric, heading(metric), samples))
        ends = [*map(number, STEP_BUCKETS), "+Inf"]
        self._bucket_labels = ["le=" + f'"{end}"' for end in ends]

    def text(self, found: Mapping[str, Figure]) -> str:
        """The page for these figures. A figure that is None has no sample; one that is missing is a KeyError."""
        parts = []
        for metric, head, samples in self._families:
            parts.append(head)
            if metric.type == "info":
                parts.append(self._info(metric, found))
            elif metric.type == "histogram":
                parts.extend(self._histogram(metric, found))
            for before, source in samples:
                value = found[source]
                if isinstance(value, (int, float)):
                    parts.append(f"{before}{number(value)}\n")
        return "".join(parts)

    def _info(self, metric: Metric, found: Mapping[str, Figure]) -> str:
        pairs = [(values[0], str(found[source])) for values, source in metric.sources.items()]
        return labelled(metric.name, (*self._common, *pairs)) + "1\n"

    def _histogram(self, metric: Metric, found: Mapping[str, Figure]) -> Iterable[str]:
        common = ",".join(f'{label}="{escape(value)}"' for label, value in self._common)
        (source,) = metric.sources.values()
        value = found[source]
        assert isinstance(value, Histogram)
        below = 0
        for label, count in zip(self._bucket_labels, value.counts, strict=True):
            below += count
            yield f"{metric.name}_bucket{{{common},{label}}} {below}\n"
        yield f"{metric.name}_count{{{common}}} {below}\n"
        yield f"{metric.name}_sum{{{common}}} {number(value.sum)}\n"
