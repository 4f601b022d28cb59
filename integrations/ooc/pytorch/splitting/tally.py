"""What was split so far, for the summary."""

from __future__ import annotations

import threading
from typing import Any

from swapd.splitting.store import Verdict

HOST_BACKED = "host-backed"  # how a function runs that uses host memory in place


class Tally:
    """The counts of one session, for use by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[tuple[str, str, str, int], dict[str, Any]] = {}
        self.functions = 0  # calls that ran in parts
        self.parts = 0  # of all these calls together

    def add(self, operator: str, shapes: str, ran: Verdict) -> None:
        """Counts one more call of an operator; of calls that ran alike the largest difference is kept."""
        with self._lock:
            if ran.how != HOST_BACKED:
                self.functions += 1
                self.parts += ran.parts
            key = (operator, shapes, ran.how, ran.parts)
            new = dict(zip(("operator", "shapes", "how", "parts"), key)) | {"exact": True, "calls": 0}
            row = self._layers.setdefault(key, new)
            row["calls"] += 1
            row["exact"] &= ran.identical
            for name in ("largest_difference", "largest_relative"):
                row[name] = max(row.get(name, 0.0), getattr(ran, name))

    def rows(self) -> list[dict[str, Any]]:
        """`split_layers` of the summary, in the order in which they were first split."""
        with self._lock:
            return [dict(row) for row in self._layers.values()]
