"""Counts of what a JSON text holds, without parsing it: a parsed object takes twenty times the memory of its text."""

from __future__ import annotations

import re
from typing import NamedTuple


class Structure(NamedTuple):
    """Counts of what opens or separates values outside of strings."""

    lists: int
    objects: int
    commas: int


def structure(text: str) -> Structure:
    """Count what is in `text`, in time and memory proportional to its length, whatever it holds."""
    plain = re.sub('"[^"]*"', "", text.replace("\\\\", "").replace('\\"', ""))
    return Structure(plain.count("["), plain.count("{"), plain.count(","))
