"""What a dashboard asks Prometheus, with its variables filled in as Grafana fills them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATED = Path(__file__).resolve().parents[2] / "grafana" / "generated"


@dataclass(frozen=True)
class Asked:
    """One query of one panel."""

    dashboard: str
    panel: str
    expr: str
    instant: bool
    collapsed: bool  # in a row that is closed at first

    @property
    def name(self) -> str:
        """The query's name in messages."""
        return f"{self.dashboard}: {self.panel}: {self.expr}"


def load() -> dict[str, dict[str, Any]]:
    """The generated dashboards by file name without its ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GENERATED.glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every panel but rows, and whether its row is collapsed."""
    for panel in dashboard["panels"]:
        if panel.get("type") == "row":
            yield from ((inner, True) for inner in panel["panels"])
        else:
            yield panel, False


def asked(name: str, dashboard: Mapping[str, Any]) -> list[Asked]:
    """Every query of a dashboard."""
    return [
        Asked(name, panel["title"], target["expr"], bool(target.get("instant")), collapsed)
        for panel, collapsed in panels(dashboard)
        for target in panel.get("targets", [])
    ]


def rate_interval(scrape_seconds: float, step_seconds: float) -> float:
    """`$__rate_interval` in seconds, as Grafana has it: at least four scrapes, so that a late scrape leaves two."""
    return max(4 * scrape_seconds, step_seconds + scrape_seconds)


def chosen(values: Sequence[str]) -> str:
    """The text that replaces a variable in a query. No choice means All, whose value is `.*` in our dashboards."""
    special = re.compile(r"[$^*{}\[\]'+?.()|\\]")
    escaped = [special.sub(lambda found: "\\\\" + found[0], value) for value in values]
    if not escaped:
        return ".*"
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def filled(expr: str, scrape_seconds: float, step_seconds: float, choices: Mapping[str, Sequence[str]]) -> str:
    """The query that Prometheus gets. Raises ValueError for a variable that is neither built in nor in `choices`."""
    built_in = {"__rate_interval": f"{round(1000 * rate_interval(scrape_seconds, step_seconds))}ms"}

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in built_in:
            return built_in[name]
        if name not in choices:
            raise ValueError(f"no value for ${name} in {expr}")
        return chosen(choices[name])

    # "$1" is a group of label_replace: a variable's name begins with a letter or underscore.
    return re.sub(r"\$([A-Za-z_]\w*)", value, expr)


def variables(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """The query of every variable whose values come from Prometheus, by the variable's name."""
    listed = dashboard["templating"]["list"]
    return {one["name"]: one["query"] for one in listed if one["type"] == "query"}


def label_values(query: str) -> tuple[str, str]:
    """`label_values(selector, label)` as (selector, label). Raises ValueError for anything else."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    if found is None:
        raise ValueError(f"not a query for a label's values: {query}")
    return found[1], found[2]
