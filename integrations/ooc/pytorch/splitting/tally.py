"""What was split so far, for the summary."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any


@dataclass
class SplitRecord:
    """One operator with one set of shapes, done in one way."""

    operator: str
    shapes: str
    how: str  # the division, or "host-backed"
    parts: int
    identical: bool  # every bit is that of the result in one piece: verified, or by construction (data only move)
    largest_difference: float  # absolute; 0 where identical
    largest_relative: float  # relative to the largest absolute value of the result in one piece
    calls: int = 0

    def row(self) -> dict[str, Any]:
        """The record as JSON has it."""
        return {
            "operator": self.operator,
            "shapes": self.shapes,
            "how": self.how,
            "parts": self.parts,
            "exact": self.identical,
            "largest_difference": self.largest_difference,
            "largest_relative": self.largest_relative,
            "calls": self.calls,
        }


class Tally:
    """The counts of one session, for use by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[tuple[str, str, str, int], SplitRecord] = {}
        self.functions = 0  # calls that ran in parts
        self.parts = 0  # of all these calls together

    def add(self, layer: SplitRecord) -> None:
        """Counts one more call of an operator that ran in parts; of equal calls the largest difference is kept."""
        if layer.parts == 0:
            return
        with self._lock:
            if layer.how != HOST_BACKED:
                self.functions += 1
                self.parts += layer.parts
            known = self._layers.setdefault((layer.operator, layer.shapes, layer.how, layer.parts), layer)
            known.calls += 1
            known.identical &= layer.identical
            known.largest_difference = max(known.largest_difference, layer.largest_difference)
            known.largest_relative = max(known.largest_relative, layer.largest_relative)

    def rows(self) -> list[dict[str, Any]]:
        """`split_layers` of the summary, in the order in which they were first split."""
        with self._lock:
            return [layer.row() for layer in self._layers.values()]


HOST_BACKED = "host-backed"
