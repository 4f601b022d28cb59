"""docs/metrics.md, made from the catalogue: `python -m ooc.prometheus.reference > docs/metrics.md`."""

from __future__ import annotations

import sys
from itertools import groupby

from ooc.prometheus.catalogue import CATALOGUE, STEP_BUCKETS, Metric

_TOP = """\
# Metrics

Made from `integrations/ooc/prometheus/catalogue.py` by `python -m ooc.prometheus.reference`; a test holds it up to
date. How to get them out of a program is in the [README](../README.md#metrics).

Every sample also has the label `rank`: `RANK` as torchrun sets it, what Open MPI, MPICH or Slurm set, or `0`. The host
is no label: Prometheus adds `instance`. All counters start at 0 with the program. A gauge that is not known yet has no
sample.
"""


def text() -> str:
    """The page."""
    parts = [_TOP]
    for group, metrics in groupby(CATALOGUE, key=lambda metric: metric.group):
        parts.append(f"\n## {group}\n\n| metric | type | unit | labels | |\n|---|---|---|---|---|\n")
        parts.extend(map(_row, metrics))
    ends = ", ".join(f"{end:g}" for end in STEP_BUCKETS)
    parts.append(f"\nBuckets of `ooc_step_seconds` end at {ends} seconds.\n")
    return "".join(parts)


def _row(metric: Metric) -> str:
    labels = "" if isinstance(metric.figures, str) else ", ".join(f"`{value}`" for value in metric.figures)
    if metric.label:
        labels = f"`{metric.label}`: {labels}"
    unit = metric.unit.replace("_", " ")
    return f"| `{metric.name}` | {metric.type} | {unit} | {labels} | {metric.help} |\n"


if __name__ == "__main__":
    sys.stdout.write(text())
