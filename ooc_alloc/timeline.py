"""The timeline's part of `Core`: events as arrays, places, live variables. `_native.py` declares the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FUNCTION, COPY_OUT, COPY_IN, DROP, STALL_SWAP_IN, STALL_ROOM, MEMORY, ITERATION, ALLOCATED, FREED = range(1, 11)
ON_DEMAND, ENQUEUED, WRITE_BACK = 1, 2, 4
NO_FUNCTION = 0xFFFFFFFF

EVENT = np.dtype(
    [
        ("start", np.float64),
        ("end", np.float64),
        ("bytes", np.uint64),
        ("free_bytes", np.uint64),  # of ALLOCATED and FREED: the address
        ("cached_bytes", np.uint64),
        ("live_bytes", np.uint64),
        ("kind", np.uint16),
        ("flags", np.uint16),
        ("thread", np.uint32),
        ("function", np.uint32),
        ("index", np.int32),
        ("variable", np.int32),
        ("region", np.int32),
        ("iteration", np.uint32),
        ("reserved", np.uint32),
    ]
)
_STATE = np.dtype(
    [
        ("capacity", np.uint64),
        ("recorded", np.uint64),
        ("lost", np.uint64),
        ("next", np.uint64),
        ("now", np.float64),
        ("on", np.uint32),
        ("reserved", np.uint32),
    ]
)
REGION = np.dtype(
    [
        ("address", np.uint64),
        ("bytes", np.uint64),
        ("chunks", np.uint32),
        ("resident_chunks", np.uint32),
        ("clean_chunks", np.uint32),
        ("pins", np.uint32),
        ("place", np.uint32),
        ("reserved", np.uint32),
    ]
)
_BLOCK = 8192  # events copied at a time: the core's lock is held meanwhile, for some hundred microseconds
EVENTS_KEPT = 1 << 17  # by default: 10 MiB


@dataclass(frozen=True)
class TimelineState:
    """The ring: how many events it holds at most, were recorded since its start, and were overwritten since."""

    capacity: int
    recorded: int
    lost: int
    now: float  # the timeline's clock, seconds
    on: bool


class TimelineCalls:
    """Mixed into `Core`; see the timeline's part of `ooc_alloc.h`."""

    _library: Any
    handle: int

    def _check(self, status: int) -> None:
        raise NotImplementedError

    def timeline_start(self, capacity: int = EVENTS_KEPT) -> None:
        """Keeps the newest `capacity` events from now on; what was there is forgotten."""
        self._check(self._library.ooc_core_timeline_start(self.handle, capacity))

    def timeline_stop(self) -> None:
        """No more events; those that are there can still be read."""
        self._library.ooc_core_timeline_stop(self.handle)

    def timeline_state(self) -> TimelineState:
        """How full the ring is."""
        return self._read(0, 0)[2]

    def timeline_events(self) -> tuple[npt.NDArray[Any], TimelineState]:
        """Everything that is kept, oldest first, as an array of `EVENT`, while others may go on writing."""
        parts: list[npt.NDArray[Any]] = []
        position, state = 0, self.timeline_state()
        end = state.recorded  # what comes later than this call is left out: a busy program would have no end
        while len(parts) * _BLOCK <= end:
            block, first, state = self._read(position, _BLOCK)
            parts.append(block)
            position = first + len(block)
            if len(block) < _BLOCK:
                break
        return (np.concatenate(parts) if parts else np.zeros(0, EVENT)), state

    def _read(self, position: int, count: int) -> tuple[npt.NDArray[Any], int, TimelineState]:
        """At most `count` events from a position on, the position of the first of them, and the ring's state."""
        events, state = np.zeros(max(count, 1), EVENT), np.zeros(1, _STATE)
        first = np.array([position], np.uint64)
        found = self._library.ooc_core_timeline_read(
            self.handle, first.ctypes.data, events.ctypes.data, count, state.ctypes.data
        )
        row = state[0]
        facts = TimelineState(
            int(row["capacity"]), int(row["recorded"]), int(row["lost"]), float(row["now"]), bool(row["on"])
        )
        return events[:found], int(first[0]), facts

    def ranges_load(self, library: str) -> None:
        """Shows functions and stalls as NVTX ranges, for good. Raises OocError if the library does not serve."""
        self._check(self._library.ooc_core_ranges_load(self.handle, library.encode()))

    def place_id(self, text: str) -> int:
        """A number for a place in the user's program; 0 when there are too many."""
        return int(self._library.ooc_core_place_id(self.handle, text.encode(errors="replace")))

    def place_text(self, place: int) -> str:
        """The text of a place; empty for 0 and for numbers that were never given."""
        text: bytes | None = self._library.ooc_core_place_text(self.handle, place)
        return (text or b"").decode(errors="replace")

    def set_place(self, address: int, place: int) -> None:
        """The variable at an address was allocated there."""
        self._library.ooc_core_set_place(self.handle, address, place)

    def trace_places(self, fingerprint: int, variables: int) -> npt.NDArray[np.uint32]:
        """uint32[variables]: the place of each variable of a trace that is kept. Raises OocError."""
        found = np.zeros(variables, np.uint32)
        self._check(self._library.ooc_core_trace_places(self.handle, fingerprint, found.ctypes.data))
        return found

    def regions(self) -> npt.NDArray[Any]:
        """Every live variable of one chunk or more, as an array of `REGION`."""
        count = int(self._library.ooc_core_regions(self.handle, np.zeros(1, REGION).ctypes.data, 0))
        while True:
            found = np.zeros(count + 64, REGION)  # others allocate meanwhile
            count = int(self._library.ooc_core_regions(self.handle, found.ctypes.data, len(found)))
            if count <= len(found):
                return found[:count]
