"""Account: which sequences of a run carry a schedule out, and whether that is faster than swapping alone, as measured.

A schedule waits until a few steps under the sequence's last plan have shown what swapping alone takes. Then it is
followed, which makes iterations of another sequence. When a few of these have run under that sequence's last plan in
turn, the medians are compared, and a schedule that is slower is given up for good.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass, field

from ooc_alloc import Iteration
from swapd.recompute.schedule import RemakeFigures, Remaker, Schedule

log = logging.getLogger("ooc.swapd")

_COMPARED = 3  # steps of each kind
_PATIENCE = 50  # iterations with drops and nothing being planned, after which they are compared without a plan, too
_MOST_KEPT = 64  # schedules, and sequences that carry them out


@dataclass(eq=False)
class _Entry:
    """One schedule, and the seconds of steps without and with it."""

    schedule: Schedule
    bound_seconds: float | None
    alone: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_COMPARED))  # with it, under whatever plan
    waited: int = 0  # iterations with it that could have had a plan
    is_followed: bool = False
    is_kept: bool = False  # it was compared


class Account:
    """The schedules of one run. The thread that ends iterations calls it; any thread may ask for the figures."""

    def __init__(self) -> None:
        self.remaker: Remaker | None = None
        self._entries: dict[int, _Entry] = {}  # by the sequence without drops
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
        final = ended.followed_plan and last_plan
        if carried_out is not None and ended.fingerprint != carried_out:
            self._without[ended.fingerprint] = carried_out
            if len(self._without) > _MOST_KEPT:
                del self._without[next(iter(self._without))]
            entry = self._entries.get(carried_out)
            if entry is not None and not entry.is_kept:
                fits = ended.swapped_bytes == 0 and not ended.planned
                self._with_drops(entry, ended.seconds, final=final or fits, waits=waits)
        elif final and (entry := self._entries.get(ended.fingerprint)) is not None and not entry.is_followed:
            entry.alone.append(ended.seconds)
            if len(entry.alone) == _COMPARED and self.remaker is not None:
                entry.is_followed = True
                self.remaker.follow(entry.schedule)

    def _with_drops(self, entry: _Entry, seconds: float, *, final: bool, waits: bool) -> None:
        entry.last.append(seconds)
        if final:
            entry.planned.append(seconds)
        entry.waited += not final and not waits
        if len(entry.planned) < _COMPARED and entry.waited < _PATIENCE:
            return
        alone, found = statistics.median(entry.alone), statistics.median(entry.planned or entry.last)
        entry.is_kept = True
        if found > alone:
            log.info("recomputation takes %.3f s a step, swapping alone %.3f s: it ends", found, alone)
            self._give_up(entry.schedule.fingerprint)
        else:
            log.debug("recomputation takes %.3f s a step, swapping alone %.3f s", found, alone)

    def add(self, schedule: Schedule, bound_seconds: float | None) -> None:
        """Takes a schedule.

        Args:
            schedule: to be followed.
            bound_seconds: of a step that no plan of swapping and recomputing beats.
        """
        if len(self._entries) >= _MOST_KEPT:
            self._give_up(next(iter(self._entries)))
        self._give_up(schedule.fingerprint)
        self._entries[schedule.fingerprint] = _Entry(schedule, bound_seconds)

    def unplannable(self, fingerprint: int) -> None:
        """There is no plan for a sequence; if it has drops, they end."""
        if fingerprint in self._without:
            self._give_up(self._without[fingerprint])

    def has_drops(self, fingerprint: int) -> bool:
        """Whether iterations of a sequence were seen to carry a schedule out."""
        return fingerprint in self._without

    def bound_seconds(self, fingerprint: int) -> float | None:
        """Of a sequence with drops: what no plan of swapping and recomputing beats. None for others."""
        entry = self._entries.get(self._without.get(fingerprint, fingerprint))
        return entry.bound_seconds if entry is not None and self.has_drops(fingerprint) else None

    def _give_up(self, fingerprint: int) -> None:
        entry = self._entries.pop(fingerprint, None)
        if entry is not None and entry.is_followed and self.remaker is not None:
            self.remaker.unfollow(fingerprint)

    def forget(self) -> None:
        """Gives all schedules up."""
        self._entries.clear()
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
