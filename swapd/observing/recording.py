"""Recording: what the timeline of a running program says, and what was predicted for it, on one axis of time.

The core keeps a ring of events (`ooc_alloc.h`, the timeline); a recording is a copy of it with the names that it needs.
`Scene` is one stretch of time laid out for pictures, the same for what was measured and what was simulated.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc_alloc import Core
from ooc_alloc import timeline as kinds
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Events, Run, Stall
from swapd.tiers import store


class Span(NamedTuple):
    """An iteration that is in the ring. Its times are seconds on the timeline's clock."""

    number: int
    fingerprint: int
    planned: bool  # under a plan from its start to its end
    start: float
    end: float


class Bar(NamedTuple):
    """Something with a start and an end, in seconds. Only copies use `is_planned`."""

    start: float
    end: float
    is_planned: bool = True


@dataclass(frozen=True)
class Scene:
    """One stretch of time. Its seconds begin at 0. What has a start and an end is a `Bar`, or an event like one."""

    seconds: float
    budget_bytes: int
    memory: list[tuple[float, int]]  # (time, bytes in use from then on)
    live: list[tuple[float, int]]  # the same if nothing were swapped; empty if not known
    runs: Sequence[Bar | Run]
    outs: Sequence[Bar | Copy]
    ins: Sequence[Bar | Copy]
    stalls: Sequence[Bar | Stall]
    link: str = "link"  # what copies go over: "disk" where swapped data are on one


class Waited(NamedTuple):
    """How long one function of a sequence waited for one variable (-1 for room), over the ring's iterations."""

    place: int  # of the function in the sequence; -1 if it is not recorded
    function: str
    variable: int
    seconds: float
    times: int


@dataclass(frozen=True, eq=False)
class Recording:
    """A copy of the ring, oldest event first (fields of `ooc_alloc.timeline.EVENT`)."""

    events: NDArray[Any]
    lost: int  # events that newer ones have overwritten
    names: dict[int, str]  # of functions, by id
    now: float  # when the copy was made, on the timeline's clock
    unix_now: float
    device: str
    budget_bytes: int
    disk_budget_bytes: int = 0  # 0: swapped data are in host memory
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def of(cls, core: Core) -> Recording:
        """What the core's ring holds now. The program may go on meanwhile."""
        events, state = core.timeline_events()
        stats = core.stats()
        used = np.unique(events["function"])
        return cls(
            events=events,
            lost=state.lost,
            names={int(n): core.function_name(int(n)) for n in used if n != kinds.NO_FUNCTION},
            now=state.now,
            unix_now=time.time(),
            device=core.device_name,
            budget_bytes=int(stats["budget_bytes"]),
            disk_budget_bytes=int(stats["disk_budget_bytes"]) if store(stats) == "disk" else 0,
        )

    @property
    def link(self) -> str:
        """What copies go over, in one word: the disk if they lie there, else the link between device and host."""
        return "disk" if self.disk_budget_bytes else "link"

    @property
    def begin(self) -> float:
        """When the first event began, or `now` if there is none."""
        return float(self.events["start"][0]) if len(self.events) else self.now

    def of_kind(self, *which: int) -> NDArray[Any]:
        """The events of some kinds, in order."""
        return self.events[np.isin(self.events["kind"], which)]

    def end_of(self, event: Any) -> float:
        """When the event ended, or `now` if it has not ended."""
        return float(event["end"]) if event["end"] >= 0 else self.now

    @cached_property
    def spans(self) -> list[Span]:
        """The iterations that have ended and whose events are there from their start, oldest first."""
        found = [
            Span(
                int(row["iteration"]),
                int(row["bytes"]),
                not row["flags"] & kinds.ON_DEMAND,
                float(row["start"]),
                float(row["end"]),
            )
            for row in self.of_kind(kinds.ITERATION)
        ]
        return [span for span in found if span.start >= self.begin or (span.number == 1 and self.lost == 0)]

    def span_of(self, fingerprint: int | None = None) -> Span | None:
        """Returns the last whole iteration, or None if there is none.

        It is one under a plan if there is any, and one of the sequence `fingerprint` if that is given.
        """
        found = [span for span in self.spans if fingerprint in (None, span.fingerprint)]
        return max(found, key=lambda span: (span.planned, span.end), default=None)

    def scene(self, start: float, end: float) -> Scene:
        """What happened between two times."""
        rows = self.events
        ends = np.where(rows["end"] < 0, self.now, rows["end"])
        inside = rows[(rows["start"] <= end) & (ends >= start)]

        def bars(*which: int) -> list[Bar]:
            return [
                Bar(float(row["start"]) - start, self.end_of(row) - start, not row["flags"] & kinds.ON_DEMAND)
                for row in inside[np.isin(inside["kind"], which)]
            ]

        memory = self.of_kind(kinds.MEMORY)
        stalls = bars(kinds.STALL_SWAP_IN, kinds.STALL_ROOM)
        return Scene(
            seconds=end - start,
            budget_bytes=self.budget_bytes,
            memory=_from(list(zip(memory["start"].tolist(), memory["bytes"].tolist())), start, end),
            live=_from(self.live(), start, end),
            runs=_without(bars(kinds.FUNCTION), stalls),
            outs=bars(kinds.COPY_OUT),
            ins=bars(kinds.COPY_IN),
            stalls=stalls,
            link=self.link,
        )

    def live(self) -> list[tuple[float, int]]:
        """(time, bytes of all live variables from then on), whether they are on the device or not."""
        rows = self.of_kind(kinds.ALLOCATED, kinds.FREED, kinds.MEMORY)
        return list(zip(rows["start"].tolist(), rows["live_bytes"].astype(np.int64).tolist()))

    def waits(self, spans: list[Span]) -> list[Waited]:
        """The stalls of some iterations, longest first."""
        numbers = {span.number for span in spans}
        seconds: defaultdict[tuple[int, str, int], float] = defaultdict(float)
        counts: defaultdict[tuple[int, str, int], int] = defaultdict(int)
        ends = {span.end: span.number for span in self.spans}
        limits = np.array(sorted(ends))
        for row in self.of_kind(kinds.STALL_SWAP_IN, kinds.STALL_ROOM):
            at = int(np.searchsorted(limits, float(row["start"])))
            if at >= len(limits) or ends[float(limits[at])] not in numbers:
                continue
            room = row["kind"] == kinds.STALL_ROOM
            name = self.names.get(int(row["function"]), "(no function)")
            # A variable that this iteration had not used yet has its number of another iteration, which says nothing.
            known = row["iteration"] == ends[float(limits[at])]
            key = (int(row["index"]), name, -1 if room or not known else int(row["variable"]))
            seconds[key] += self.end_of(row) - float(row["start"])
            counts[key] += 1
        rows = sorted(seconds.items(), key=lambda item: -item[1])
        return [Waited(*key, value, counts[key]) for key, value in rows]

    def stall_seconds(self, span: Span) -> float:
        """How long the threads waited during an iteration, in all, in seconds."""
        return sum(bar.end - bar.start for bar in self.scene(span.start, span.end).stalls if bar.start >= 0)

    def moved_bytes(self, span: Span, *, is_out: bool) -> int:
        """The bytes of the copies in one direction that ended during an iteration."""
        rows = self.of_kind(kinds.COPY_OUT if is_out else kinds.COPY_IN)
        inside = rows[(rows["end"] > span.start) & (rows["end"] <= span.end)]
        return int(inside["bytes"].sum())


@dataclass(frozen=True)
class Predicted:
    """A simulated iteration of the program that runs."""

    problem: Problem
    events: Events
    plan: Plan

    def scene(self) -> Scene:
        """The simulated iteration, laid out for pictures as a measured one is."""
        problem, events, chunk = self.problem, self.events, self.problem.chunk_bytes
        slabs, live = problem.slab_chunks, self.problem.live
        return Scene(
            seconds=events.seconds,
            budget_bytes=problem.budget_bytes,
            memory=[(held.start, (held.chunks + slabs) * chunk) for held in events.held],
            live=[(run.start, int(live[run.function] + slabs) * chunk) for run in events.runs],
            runs=events.runs,
            outs=[copy for copy in events.copies if copy.is_out],
            ins=[copy for copy in events.copies if not copy.is_out],
            stalls=events.stalls,
        )


def _without(bars: list[Bar], holes: list[Bar]) -> list[Bar]:
    """Cuts `holes` out of `bars`. Both have to be sorted by their starts."""
    found: list[Bar] = []
    first = 0
    for bar in bars:
        start = bar.start
        while first < len(holes) and holes[first].end <= bar.start:
            first += 1
        for hole in holes[first:]:
            if hole.start >= bar.end:
                break
            if hole.start > start:
                found.append(bar._replace(start=start, end=hole.start))
            start = max(start, hole.end)
        if start < bar.end:
            found.append(bar._replace(start=start))
    return found


def _from(points: list[tuple[float, int]], start: float, end: float) -> list[tuple[float, int]]:
    """The points between two times, with seconds from `start` on. The last point before `start` becomes that at 0."""
    first = max(bisect_right(points, start, key=itemgetter(0)) - 1, 0)
    return [(max(when - start, 0.0), value) for when, value in points[first:] if when <= end]
