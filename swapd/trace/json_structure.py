"""JSON of unknown origin, looked at before it is parsed: a parsed object takes twenty times the memory of its text."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def parse(text: str, lists: int, objects: int, commas_per_list: float = math.inf) -> Any:
    """The value of a JSON text that may hold so many lists and objects, and a further list for every few commas.

    Raises:
        ValueError: it holds more of them, or is no JSON.
    """
    plain = re.sub('"[^"]*"', "", text.replace("\\\\", "").replace('\\"', ""))
    if plain.count("[") > lists + plain.count(",") / commas_per_list or plain.count("{") > objects:
        raise ValueError("there are lists or objects in it that do not belong there")
    try:
        return json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def check_format(value: Any, name: str, first: int, last: int) -> None:
    """Raise ValueError unless `value` is an object that says to be of this format, in one of the versions."""
    if not isinstance(value, dict) or value.get("format") != name:
        raise ValueError(f"not a {name} file")
    version = value.get("version")
    if type(version) is not int or not first <= version <= last:
        newer = type(version) is int and version > last
        hint = "; it was written by a newer release, which can read it" if newer else ""
        known = " and ".join(map(str, sorted({first, last})))
        raise ValueError(f"version {version!r:.40} of the format, this release reads {known}{hint}")
