"""Whether a dashboard's JSON is of Grafana's types, which the Grafana Foundation SDK has as Python classes.

The classes read whatever JSON there is: what they do not know gets lost, what they need gets added, and values are
taken as they are. So the JSON is read and written again, and the values between are compared with the classes'
annotations.
"""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import Runtime
from grafana_foundation_sdk.models import dashboard as model
from queries import panels

register_default_plugins()
# The SDK writes these for every variable; Grafana knows them only for intervals.
OF_INTERVALS = {"auto", "auto_count", "auto_min"}


def misfits(dashboard: dict[str, Any]) -> list[str]:
    """What of a dashboard is not of Grafana's types, each with its path. Overrides count as settings of the panel."""
    found = list(_unlike(dashboard, model.Dashboard, "dashboard"))
    for panel, _ in panels(dashboard):
        title = panel["title"]
        if panel.get("type") not in Runtime().panelcfg_variants:
            found.append(f"{title}: no panel is of type {panel.get('type')}")
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            for setting in override["properties"]:
                defaults = nested(setting["id"], setting["value"])
                overridden = {**panel, "fieldConfig": {"defaults": defaults, "overrides": []}}
                complaints = _unlike(overridden, model.Panel, title)
                # An override is a part of the settings: others of them may be missing.
                found += [one for one in complaints if not one.endswith(": missing")]
    return found


def nested(path: str, value: Any) -> dict[str, Any]:
    """An override's property as a field setting: ("custom.lineWidth", 2) is {"custom": {"lineWidth": 2}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def _unlike(plain: dict[str, Any], kind: Any, path: str) -> Iterator[str]:
    try:
        read = kind.from_json(plain)
    except KeyError as missing:
        yield f"{path}: without {missing}"
        return
    yield from _changed(plain, json.loads(JSONEncoder().encode(read)), path)
    yield from _wrong(read, path)


def _changed(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() - after.keys():
            yield f"{path}.{name}: unknown"
        for name in after.keys() - before.keys() - OF_INTERVALS:
            if after[name] != {}:
                yield f"{path}.{name}: missing"
        for name in before.keys() & after.keys():
            yield from _changed(before[name], after[name], f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _changed(one, other, f"{path}[{place}]")
    elif before != after:
        yield f"{path}: {before!r} became {after!r}"


def _wrong(value: Any, path: str) -> Iterator[str]:
    """The attributes below an object of the SDK whose values are not what their annotations say."""
    if isinstance(value, list):
        for place, one in enumerate(value):
            yield from _wrong(one, f"{path}[{place}]")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _wrong(one, f"{path}.{name}")
    elif hasattr(value, "to_json"):
        for name, kind in typing.get_type_hints(type(value)).items():
            if not _fits(getattr(value, name), kind):
                yield f"{path}.{name}: {getattr(value, name)!r} is no {kind}"
            yield from _wrong(getattr(value, name), f"{path}.{name}")


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(one, arguments[0]) for one in value)
    if origin is not None:
        return isinstance(value, origin)
    if isinstance(value, dict) and hasattr(kind, "from_json"):  # the SDK leaves some as they are
        return not any(_unlike(value, kind, ""))
    if kind is float:
        return isinstance(value, (int, float))
    if issubclass(kind, enum.Enum):
        return value in list(kind)
    return isinstance(value, kind)
