"""What a JSON text is made of, found without making it: an object takes twenty times the memory of its text."""

from __future__ import annotations

import re
from typing import NamedTuple


class Structure(NamedTuple):
    """Counts of what opens or separates values outside of strings."""

    lists: int
    objects: int
    commas: int


def structure(text: str) -> Structure:
    """In time and memory proportional to `text`, whatever it is."""
    plain = re.sub('"[^"]*"', "", text.replace("\\\\", "").replace('\\"', ""))
    return Structure(plain.count("["), plain.count("{"), plain.count(","))
