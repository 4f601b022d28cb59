"""The timeline's part of `Core`: events as arrays, places, live variables. Their fields are those of `ooc_alloc.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc_alloc.library import NUMBER, check, constants, ffi, numpy_type, text_of

FUNCTION: int = constants.OOC_EVENT_FUNCTION
COPY_OUT: int = constants.OOC_EVENT_COPY_OUT
COPY_IN: int = constants.OOC_EVENT_COPY_IN
DROP: int = constants.OOC_EVENT_DROP
STALL_SWAP_IN: int = constants.OOC_EVENT_STALL_SWAP_IN
STALL_ROOM: int = constants.OOC_EVENT_STALL_ROOM
MEMORY: int = constants.OOC_EVENT_MEMORY
ITERATION: int = constants.OOC_EVENT_ITERATION
ALLOCATED: int = constants.OOC_EVENT_ALLOCATED
FREED: int = constants.OOC_EVENT_FREED
ON_DEMAND: int = constants.OOC_EVENT_ON_DEMAND
ENQUEUED: int = constants.OOC_EVENT_ENQUEUED
WRITE_BACK: int = constants.OOC_EVENT_WRITE_BACK
NO_FUNCTION: int = constants.OOC_NO_FUNCTION

_EVENTS = ffi.typeof("ooc_event[]")
_STATE = ffi.typeof("ooc_timeline *")
_PLACES = ffi.typeof("uint32_t[]")
EVENT = numpy_type(_EVENTS.item)  # in events of the kinds ALLOCATED and FREED, free_bytes is the address
_BLOCK = 8192  # events copied at a time: the core's lock is held meanwhile, for some hundred microseconds
EVENTS_KEPT = 1 << 17  # by default: 10 MiB


@dataclass(frozen=True)
class TimelineState:
    """How many events the ring can hold, how many were recorded since its start, and how many of them are lost."""

    capacity: int
    recorded: int
    lost: int
    now: float  # the timeline's clock, seconds
    on: bool


class TimelineCalls:
    """Mixed into `Core`; see the timeline's part of `ooc_alloc.h`."""

    _library: Any
    _core: Any

    def timeline_start(self, capacity: int = EVENTS_KEPT) -> None:
        """Keeps the newest `capacity` events from now on. Earlier events are forgotten."""
        check(self._library.ooc_core_timeline_start(self._core, capacity))

    def timeline_stop(self) -> None:
        """Stops recording. The events that are kept can still be read."""
        self._library.ooc_core_timeline_stop(self._core)

    def timeline_state(self) -> TimelineState:
        """How full the ring is."""
        return self._read(0, 0)[2]

    def timeline_events(self) -> tuple[npt.NDArray[Any], TimelineState]:
        """Everything that is kept, oldest first, as an array of `EVENT`, while others may go on writing."""
        parts: list[npt.NDArray[Any]] = []
        position, state = 0, self.timeline_state()
        end = state.recorded  # events after this call are left out, as a busy program adds new ones without end
        while len(parts) * _BLOCK <= end:
            block, first, state = self._read(position, _BLOCK)
            parts.append(block)
            position = first + len(block)
            if len(block) < _BLOCK:
                break
        return (np.concatenate(parts) if parts else np.zeros(0, EVENT)), state

    def _read(self, position: int, count: int) -> tuple[npt.NDArray[Any], int, TimelineState]:
        """At most `count` events from a position on, the position of the first of them, and the ring's state."""
        events = np.zeros(max(count, 1), EVENT)
        first, state = ffi.new(NUMBER, position), ffi.new(_STATE)
        found = self._library.ooc_core_timeline_read(self._core, first, ffi.from_buffer(_EVENTS, events), count, state)
        facts = TimelineState(state.capacity, state.recorded, state.lost, state.now, bool(state.on))
        return events[:found], first[0], facts

    def ranges_load(self, library: str) -> None:
        """Shows functions and stalls as NVTX ranges from now on. Raises OocError if the library cannot be used."""
        check(self._library.ooc_core_ranges_load(self._core, library.encode()))

    def place_id(self, text: str) -> int:
        """A number for a place in the user's program; 0 if there are too many places."""
        return int(self._library.ooc_core_place_id(self._core, text.encode(errors="replace")))

    def place_text(self, place: int) -> str:
        """The text of a place; empty for 0 and for numbers that were never given."""
        return text_of(self._library.ooc_core_place_text(self._core, place))

    def set_place(self, address: int, place: int) -> None:
        """Notes that the variable at an address was allocated at a place."""
        self._library.ooc_core_set_place(self._core, address, place)

    def trace_places(self, fingerprint: int, variables: int) -> npt.NDArray[np.uint32]:
        """uint32[variables]: the place of each variable of a trace that is kept. Raises OocError."""
        found = np.zeros(variables, np.uint32)
        check(self._library.ooc_core_trace_places(self._core, fingerprint, ffi.from_buffer(_PLACES, found)))
        return found
