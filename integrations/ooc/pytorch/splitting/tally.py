"""What was split so far, for the summary."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

HOST_BACKED = "host-backed"


@dataclass
class SplitRecord:
    """One operator with one set of shapes, done in one way: a row of `split_layers`."""

    operator: str
    shapes: str
    how: str  # the division, or `HOST_BACKED`
    parts: int
    exact: bool = True  # every bit is that of the result in one piece: verified, or by construction (data only move)
    largest_difference: float = 0.0  # absolute; 0 where exact
    largest_relative: float = 0.0  # relative to the largest absolute value of the result in one piece
    calls: int = 0


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
            known.exact &= layer.exact
            known.largest_difference = max(known.largest_difference, layer.largest_difference)
            known.largest_relative = max(known.largest_relative, layer.largest_relative)

    def rows(self) -> list[dict[str, Any]]:
        """`split_layers` of the summary, in the order in which they were first split."""
        with self._lock:
            return [asdict(layer) for layer in self._layers.values()]
