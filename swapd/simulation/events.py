"""Events: what a simulated machine does, one by one, for pictures and Perfetto traces.

The machine's `log` is None, or a list to which it appends the events of all iterations as they happen, in its own time.
`swapd.simulation.simulator.simulate_events` returns the events of the iteration that is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swapd.planning.problem import Problem


class IterationStart(NamedTuple):
    """From here on events, and their variables' numbers, are those of a new iteration."""

    start: float


class Run(NamedTuple):
    """Function `function` runs."""

    function: int
    start: float
    end: float


class Stall(NamedTuple):
    """Function `function` waits. What it waits for last is `variable`, or room if that is -1."""

    function: int
    variable: int
    start: float
    end: float


class Copy(NamedTuple):
    """Chunks on a link. The event is logged when the copy starts, as its end is known by then."""

    is_out: bool
    variable: int
    chunks: int
    is_planned: bool  # else on demand
    start: float
    end: float


class Held(NamedTuple):
    """From `start` until the next event of this kind, `chunks` chunks are taken."""

    start: float
    chunks: int


Event = IterationStart | Run | Stall | Copy | Held


@dataclass(frozen=True)
class Events:
    """One iteration, in seconds since it began. A copy may have begun before it (start < 0), or outlast it."""

    seconds: float
    runs: tuple[Run, ...]  # [n]
    stalls: tuple[Stall, ...]
    copies: tuple[Copy, ...]  # by start; variables as numbered in this iteration, -1 if freed with the one before
    held: tuple[Held, ...]  # by start

    def copies_of(self, *, is_out: bool) -> list[Copy]:
        """The copies in one direction."""
        return [copy for copy in self.copies if copy.is_out == is_out]


def last_iteration(problem: Problem, log: Sequence[Event], seconds: float) -> Events:
    """The last iteration of `log`, which took so many `seconds`, with the copies still under way as it began."""
    places = [at for at, event in enumerate(log) if isinstance(event, IterationStart)]
    began = log[places[-1]].start
    before = log[places[-2] : places[-1]] if len(places) > 1 else []
    found = log[places[-1] + 1 :]
    return Events(
        seconds=seconds,
        runs=tuple(Run(e.function, e.start - began, e.end - began) for e in found if isinstance(e, Run)),
        stalls=tuple(
            Stall(e.function, e.variable, e.start - began, e.end - began) for e in found if isinstance(e, Stall)
        ),
        copies=tuple(
            copy._replace(start=copy.start - began, end=copy.end - began)
            for copy in [*_carried_over(problem, before, began), *(e for e in found if isinstance(e, Copy))]
        ),
        held=tuple(Held(e.start - began, e.chunks) for e in found if isinstance(e, Held)),
    )


def _carried_over(problem: Problem, events: Iterable[Event], began: float) -> list[Copy]:
    """Copies of the iteration before that end in this one, with variables as numbered in this one."""
    return [
        event._replace(variable=int(problem.successor[event.variable]) if event.variable >= 0 else -1)
        for event in events
        if isinstance(event, Copy) and event.end > began
    ]
