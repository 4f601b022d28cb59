"""Account: which sequences of a run carry a schedule out, and whether that is faster than swapping alone, as measured.

What to drop is asked for once a few steps under a sequence's last plan have shown what swapping alone takes, and with
the least times that its functions took in these. The schedule is followed at once, which makes iterations of another
sequence. It is kept if one of the first steps under that sequence's last plan is faster than all of swapping alone
were, and given up for good if none is: what else a machine does makes a step slower, and never faster.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ooc_alloc import Iteration
from swapd.recompute.schedule import RemakeFigures, Remaker, Schedule

log = logging.getLogger("ooc.swapd")

_TIMED = 3  # steps of swapping alone
_TRIED = 6  # steps with drops, none of which is faster
_PATIENCE = 50  # iterations with drops and nothing being planned, after which they are compared without a plan, too
_MOST_KEPT = 64  # sequences that may carry a schedule out, and those that do


@dataclass(eq=False)
class _Entry:
    """A sequence that swaps, its schedule if there is one, and the seconds of steps without and with it."""

    function_seconds: NDArray[np.float64]  # the least of each
    alone: list[float] = field(default_factory=list)
    schedule: Schedule | None = None
    bound_seconds: float | None = None
    planned: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED))  # with it, under whatever plan
    waited: int = 0  # iterations with it that could have had a plan
    is_kept: bool = False  # it was compared


class Account:
    """The schedules of one run. The thread that ends iterations calls it; any thread may ask for the figures."""

    def __init__(self) -> None:
        self.remaker: Remaker | None = None
        self._entries: dict[int, _Entry] = {}  # by the sequence without drops
        self._asked: set[int] = set()  # sequences of which it was asked what to drop, once for each
        self._without: dict[int, int] = {}  # of sequences with drops: the one without
        self._carried_out: int | None = None  # in the iteration that ends
        self._figures = RemakeFigures()

    def iteration_ends(self) -> None:
        """An iteration ends, before its boundary."""
        self._carried_out = self.remaker.ended() if self.remaker is not None else None

    def count(self, ended: Iteration, *, last_plan: bool, waits: bool) -> None:
        """An iteration has ended.

        Args:
            ended: the iteration.
            last_plan: whether its sequence has had the last plan that is made for it.
            waits: whether a plan is being made, for it or for another sequence.
        """
        carried_out, self._carried_out = self._carried_out, None
        if carried_out is None or ended.fingerprint == carried_out:
            return
        self._without[ended.fingerprint] = carried_out
        if len(self._without) > _MOST_KEPT:
            del self._without[next(iter(self._without))]
        entry = self._entries.get(carried_out)
        if entry is not None and entry.schedule is not None and not entry.is_kept:
            fits = ended.swapped_bytes == 0 and not ended.planned
            final = fits or (ended.followed_plan and last_plan)
            self._with_drops(entry, entry.schedule, ended.seconds, final=final, waits=waits)

    def _with_drops(self, entry: _Entry, schedule: Schedule, seconds: float, *, final: bool, waits: bool) -> None:
        entry.last.append(seconds)
        if final:
            entry.planned.append(seconds)
        entry.waited += not final and not waits
        alone, found = min(entry.alone), min(entry.planned or entry.last)
        over = len(entry.planned) >= _TRIED or entry.waited >= _PATIENCE
        entry.is_kept = found <= alone and (over or bool(entry.planned))
        if entry.is_kept:
            log.debug("recomputation takes %.3f s a step, swapping alone %.3f s", found, alone)
        elif over:
            log.info("recomputation takes %.3f s a step, swapping alone %.3f s: it ends", found, alone)
            self._give_up(schedule.fingerprint)

    def is_timed(self, fingerprint: int) -> bool:
        """Whether it was asked what a sequence is to drop, or it drops already: its iterations need no `time_alone`."""
        return fingerprint in self._without or fingerprint in self._asked

    def time_alone(self, ended: Iteration, function_seconds: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """An iteration swapped alone, under the last plan.

        Returns:
            float64[functions], the least seconds of each function so far, if that is enough to choose what to drop.
        """
        entry = self._entries.get(ended.fingerprint)
        if entry is None:
            if len(self._entries) >= _MOST_KEPT:
                self._drop_oldest()
            entry = self._entries[ended.fingerprint] = _Entry(function_seconds)
        entry.alone.append(ended.seconds)
        entry.function_seconds = np.minimum(entry.function_seconds, function_seconds)
        return entry.function_seconds if len(entry.alone) >= _TIMED else None

    def asked(self, fingerprint: int) -> None:
        """It is being chosen what a sequence drops, after `time_alone`."""
        self._asked.add(fingerprint)

    def follow(self, schedule: Schedule, bound_seconds: float | None) -> None:
        """Has a schedule followed that was asked for, unless all has been given up since.

        Args:
            schedule: what to drop.
            bound_seconds: of a step that no plan of swapping and recomputing beats.
        """
        entry = self._entries.get(schedule.fingerprint)
        if entry is not None and self.remaker is not None:
            entry.schedule, entry.bound_seconds = schedule, bound_seconds
            self.remaker.follow(schedule)

    def unplannable(self, fingerprint: int) -> None:
        """There is no plan for a sequence; if it has drops, they end."""
        if fingerprint in self._without:
            self._give_up(self._without[fingerprint])

    def bound_seconds(self, fingerprint: int) -> float | None:
        """Of a sequence with drops: what no plan of swapping and recomputing beats. None for others."""
        entry = self._entries.get(self._without.get(fingerprint, fingerprint))
        return entry.bound_seconds if entry is not None and fingerprint in self._without else None

    def _give_up(self, fingerprint: int) -> None:
        entry = self._entries.get(fingerprint)
        if entry is not None and entry.schedule is not None and self.remaker is not None:
            entry.schedule = None
            self.remaker.unfollow(fingerprint)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._entries))
        self._give_up(oldest)
        del self._entries[oldest]

    def forget(self) -> None:
        """Gives all schedules up."""
        self._entries.clear()
        self._asked.clear()
        if self.remaker is not None:
            self.remaker.forget()

    def figures(self) -> RemakeFigures:
        """What was dropped and made again since the start; zeros without a remaker."""
        remaker = self.remaker
        return remaker.figures() if remaker is not None else self._figures

    def shown(self) -> dict[str, int | float]:
        """The same by the keys of the summary."""
        found = self.figures()
        return {
            "recompute_drop_count": found.drop_count,
            "recompute_drop_bytes": found.drop_bytes,
            "recompute_function_count": found.repeat_count,
            "recompute_seconds": found.repeat_seconds,
            "recompute_refused_count": found.refused_drop_count,
        }

    def close(self) -> None:
        """Gives all schedules up, and asks nobody any more."""
        self.forget()
        self._figures = self.figures()
        self.remaker = None
