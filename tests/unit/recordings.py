"""Recordings made by hand: the ring's events as a test says them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ooc_alloc import timeline as kinds
from swapd.observing.recording import Recording

NAMES = {0: "make", 1: "use"}
CHUNK = 1000


def event(kind: int, start: float, end: float | None = None, **fields: Any) -> dict[str, Any]:
    """One event; `end` is `start` unless given. Fields that are not given are those of nothing."""
    nothing = {"function": kinds.NO_FUNCTION, "index": -1, "variable": -1, "region": -1, "iteration": 1}
    return {**nothing, "kind": kind, "start": start, "end": start if end is None else end, **fields}


def recording(rows: list[dict[str, Any]], lost: int = 0, now: float = 100.0, **fields: Any) -> Recording:
    """The events in a ring of one process; its budget is 10 chunks of 1000 bytes."""
    events = np.zeros(len(rows), kinds.EVENT)
    for at, row in enumerate(rows):
        for name, value in row.items():
            events[name][at] = value
    facts = {"device": "emulated", "budget_bytes": 10 * CHUNK, "pid": 4711, **fields}
    return Recording(events=events, lost=lost, names=facts.pop("names", NAMES), now=now, unix_now=1000.0 + now, **facts)


def function(start: float, end: float, number: int, index: int, iteration: int = 1, thread: int = 1) -> dict[str, Any]:
    return event(kinds.FUNCTION, start, end, function=number, index=index, iteration=iteration, thread=thread)


def iteration(number: int, start: float, end: float, fingerprint: int = 7, planned: bool = True) -> dict[str, Any]:
    flags = 0 if planned else kinds.ON_DEMAND
    return event(kinds.ITERATION, start, end, iteration=number, bytes=fingerprint, index=2, flags=flags)


def two_iterations() -> list[dict[str, Any]]:
    """1: demand mode, from 10 to 20; 2: planned, from 20 to 28, in which function 1 waits 1 s for variable 0."""
    return [
        event(kinds.ALLOCATED, 10.0, bytes=4000, free_bytes=0xABC000, live_bytes=4000, variable=0, region=0),
        event(kinds.MEMORY, 10.0, bytes=4000, live_bytes=4000),
        function(10.0, 12.0, 0, 0),
        event(kinds.COPY_OUT, 12.0, 14.0, bytes=4000, variable=0, region=0, index=0, flags=kinds.ON_DEMAND),
        event(kinds.STALL_ROOM, 12.0, 14.0, function=1, index=1, thread=1),
        function(12.0, 16.0, 1, 1),
        iteration(1, 10.0, 20.0, planned=False),
        function(20.0, 22.0, 0, 0, iteration=2),
        event(kinds.MEMORY, 22.0, bytes=9000, live_bytes=12000),
        event(kinds.COPY_IN, 22.0, 24.5, bytes=4000, variable=0, region=0, index=1, iteration=2),
        event(kinds.STALL_SWAP_IN, 23.5, 24.5, function=1, index=1, variable=0, region=0, iteration=2, thread=1),
        function(24.5, 27.0, 1, 1, iteration=2),
        event(kinds.DROP, 27.0, bytes=4000, variable=0, region=0, iteration=2),
        event(kinds.FREED, 27.5, bytes=4000, free_bytes=0xABC000, live_bytes=8000, variable=0, region=0, iteration=2),
        iteration(2, 20.0, 28.0),
    ]
