"""Schedule: what a program is to drop, in the terms in which its sequence of functions is recorded.

A program that carries a schedule out records another sequence than before: the functions that run again are in it,
under their names with `AGAIN` behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from swapd.recompute.rewriting import Rewritten
from swapd.trace.trace import Trace

AGAIN = " again"  # behind the name of a function that runs again


class ScheduledDrop(NamedTuple):
    """A variable that loses its bytes, named by how it comes to be."""

    made_by: int  # the function that allocates it
    number: int  # which of the recorded variables that this function allocates, in the order of allocation
    after: int  # the last function before the gap
    final: bool = False  # no function uses it behind the gap
    fleeting: bool = False  # made again for another variable's sake, it is gone once that is made, and made once more


class ScheduledLinger(NamedTuple):
    """A variable that stays, although the program frees it, for what is made again from it."""

    made_by: int
    number: int
    until: int  # it goes once this function has begun, before which what was dropped is made again


@dataclass(frozen=True)
class Schedule:
    """What iterations of one sequence drop, and make again. Functions are numbered as in the sequence without drops."""

    fingerprint: int  # of the sequence without drops
    functions: tuple[str, ...]  # the names of its functions
    kept: tuple[int, ...]  # ascending: functions whose calls are kept, as they may run again or make what lingers
    drops: tuple[ScheduledDrop, ...]  # by `after`, ascending
    lingers: tuple[ScheduledLinger, ...] = ()


class RemakeFigures(NamedTuple):
    """What was dropped and made again since the start."""

    drop_count: int = 0
    drop_bytes: int = 0
    repeat_count: int = 0  # functions that ran again
    repeat_seconds: float = 0.0
    refused_drop_count: int = 0  # their trial did not give the same bits, or they could not be tried


class Remaker(Protocol):
    """Who carries schedules out. The planner calls it where iterations end, in the thread that ends them."""

    def follow(self, schedule: Schedule) -> None:
        """From now on iterations of this sequence carry the schedule out; it replaces an earlier one."""

    def unfollow(self, fingerprint: int) -> None:
        """From now on iterations of this sequence drop nothing. It may have no schedule."""

    def forget(self) -> None:
        """From now on nothing is dropped at all."""

    def ended(self) -> int | None:
        """The iteration ends, before its boundary: what is still dropped is made again.

        Returns the fingerprint of the schedule that the iteration carried out from its beginning to here; None if it
        dropped nothing, as in trials, or departed from its sequence.
        """

    def figures(self) -> RemakeFigures:
        """What was done so far. Any thread may call this."""


def schedule_of(whole: Trace, trace: Trace, rewritten: Rewritten) -> Schedule:
    """The schedule of drops.

    Args:
        whole: the sequence as it was recorded, before it was cut into parts.
        trace: the same after that: what the drops are of.
        rewritten: the drops.

    Raises:
        ValueError: a variable that is dropped or lingers is none that a function of the iteration allocated.
    """

    def named(variable: int) -> tuple[int, int]:
        v = trace.recorded(variable)
        made_by = int(whole.born[v])
        if not 0 <= made_by < whole.functions or made_by != trace.born[variable]:
            raise ValueError(f"no function of the iteration allocated {trace.label(variable)}, so nothing can name it")
        return made_by, int(np.count_nonzero(whole.born[:v] == made_by))

    drops = [ScheduledDrop(*named(drop.variable), drop.after, fleeting=drop.fleeting) for drop in rewritten.drops]
    drops += [ScheduledDrop(*named(c.drop.variable), c.drop.after, True) for c in rewritten.final]
    lingers = tuple(ScheduledLinger(*named(linger.variable), linger.until) for linger in rewritten.lingers)
    kept = {*rewritten.function[rewritten.repeated].tolist(), *(linger.made_by for linger in lingers)}
    kept.update(*(c.functions for c in rewritten.final))
    in_order = tuple(sorted(drops, key=lambda drop: (drop.after, drop.made_by, drop.number)))
    return Schedule(whole.fingerprint, trace.function_names, tuple(sorted(kept)), in_order, lingers)


def runs_again(trace: Trace) -> bool:
    """Whether a program dropped something in an iteration."""
    return any(name.endswith(AGAIN) for name in trace.function_names)
