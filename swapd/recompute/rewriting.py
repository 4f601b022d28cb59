"""Rewriting: the trace of a program that drops variables and makes them again.

The rewritten trace has the functions of the trace and, directly before those that need a dropped variable, the
functions that make it again. A variable that is dropped ends there; what makes it again gives birth to another one,
which lives on as the first would have done. After a final drop nothing is made again. What a repeated function
allocates besides is a workspace: it is gone once nothing else that is repeated with it needs it. Every input of a
repeated function is used by it, so it has to be on the device then. If an input was dropped too, it is made again
first, and stays, unless its drop is fleeting: then it is a workspace. If it has ended and may linger, it ends after the
last repeated function that uses it instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swapd.recompute.candidates import Candidate, Drop
from swapd.recompute.history import History
from swapd.trace.trace import READ, WRITE, Trace


class Linger(NamedTuple):
    """A variable stays beyond its end."""

    variable: int
    until: int  # the last function directly before which something is made again from it


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewritten trace, and where everything in it comes from.

    The first variables are the original ones, under their numbers; those that are made again follow.
    """

    trace: Trace  # its fingerprint is 0, as only a recording of it can tell
    function: NDArray[np.int32]  # int32[functions]: the original function of each
    repeated: NDArray[np.bool_]  # bool[functions]: whether it runs again, and is not the original itself
    variable: NDArray[np.int32]  # int32[variables]: the original variable whose bytes each one holds
    drops: tuple[Drop, ...]  # fleeting only where something was made again for another's sake
    final: tuple[Candidate, ...]  # final drops, beside `drops`
    lingers: tuple[Linger, ...]  # by variable

    @property
    def drop_count(self) -> int:
        """How many variables are dropped, and how often, all together."""
        return len(self.drops) + len(self.final)

    @property
    def repeated_seconds(self) -> float:
        """What it takes to run functions again."""
        return float(self.trace.function_seconds[self.repeated].sum())


def rewrite(history: History, drops: Iterable[Drop], final: Iterable[Candidate] = ()) -> Rewritten:
    """The trace of `history` as a program records it that carries out `drops`.

    Args:
        history: of the trace.
        drops: none of them final.
        final: final drops, of which those are carried out whose variables are not read to make something again.

    Raises:
        ValueError: a drop is not possible.
    """
    return _Writer(history, drops, final).write()


class _Writer:
    def __init__(self, history: History, drops: Iterable[Drop], final: Iterable[Candidate]) -> None:
        self.history, self.trace = history, history.trace
        trace = self.trace
        self.due: dict[int, list[Drop]] = {}  # what is dropped after each function
        self.events: set[int] = set()  # functions after which something is dropped, or which use it next
        self.drops = tuple(sorted(set(drops)))
        if len({drop[:2] for drop in self.drops}) < len(self.drops):
            raise ValueError("a variable is dropped twice after the same function")
        for drop in self.drops:
            self.events.update((drop.after, self._next_use(drop)))
            self.due.setdefault(drop.after, []).append(drop)
        self.last: dict[int, list[Candidate]] = {}  # final drops after each function
        for candidate in final:
            self.events.add(candidate.drop.after)
            self.last.setdefault(candidate.drop.after, []).append(candidate)
        self.over: dict[int, Candidate] = {}  # variables after their final drops
        self.done = 0  # functions of the trace that are written down
        self.origin: list[int] = []
        self.repeated: list[bool] = []
        self.counts: list[int] = []  # of each new function: how many variables it uses
        self.use_variables: list[int] = []
        self.use_flags: list[int] = []
        self.variable = list(range(trace.variables))
        self.holder: list[int] = list(range(trace.variables))  # the new variable that has each one's bytes
        self.lost: dict[int, Drop] = {}  # live original variables without bytes, and their drops
        self.fleeting: set[Drop] = set()  # those that made a difference
        self.until: dict[int, int] = {}  # of those that linger: the function before which they are used last
        self.born: list[int] = [-2] * trace.variables  # of new variables, in new functions; -2: not yet known
        self.died: list[int] = [-2] * trace.variables

    def _next_use(self, drop: Drop) -> int:
        v = drop.variable
        uses = self.history.uses[v] if 0 <= v < self.trace.variables else []
        at = bisect_left(uses, drop.after)
        if at >= len(uses) - 1 or uses[at] != drop.after:
            raise ValueError(f"{drop} is not between two uses of a variable")
        return uses[at + 1]

    def write(self) -> Rewritten:
        trace = self.trace
        for f in sorted(self.events):
            used = trace.use_variables[trace.use_offsets[f] : trace.use_offsets[f + 1]].tolist()
            wanted = [v for v in dict.fromkeys(used) if v in self.lost]
            if wanted:
                self._as_before(f)
                self._repeat(wanted, f)
            for drop in self.due.get(f, ()):
                self._ends(drop.variable, f)
                self.lost[drop.variable] = drop
            for candidate in self.last.get(f, ()):
                self._ends(candidate.drop.variable, f)
                self.over[candidate.drop.variable] = candidate
        self._as_before(trace.functions)
        return self._finish()

    def _ends(self, v: int, after: int) -> None:
        self.died[self.holder[v]] = len(self.origin) + after - self.done

    def _as_before(self, stop: int) -> None:
        """Write down functions of the trace up to this one, which find variables where they are now."""
        trace = self.trace
        offsets = trace.use_offsets[self.done : stop + 1]
        rows = slice(offsets[0], offsets[-1])
        self.origin.extend(range(self.done, stop))
        self.repeated.extend([False] * (stop - self.done))
        self.counts.extend(np.diff(offsets).tolist())
        self.use_variables.extend(map(self.holder.__getitem__, trace.use_variables[rows].tolist()))
        self.use_flags.extend(trace.use_flags[rows].tolist())
        self.done = stop

    def _repeat(self, wanted: list[int], before: int) -> None:
        """Write down what runs again before a function so that lost variables have their bytes."""
        history = self.history
        versions = [history.version(v, before) for v in wanted]
        functions = history.repeats(versions, before, self.lost.__contains__)
        if functions is None:
            raise ValueError(f"variables {wanted} cannot be made again before function {before}")
        fresh: dict[int, int] = {}  # original variable: the new one into which this makes it again
        for f in functions:
            index = len(self.origin)
            uses: dict[int, int] = {}
            for v, _, last in history.needs[f]:
                source = self.holder[v] if before <= last and v not in self.lost else fresh[v]
                if source == self.holder[v] and self.over.pop(v, None) is not None:
                    self.died[source] = -2  # it is not dropped
                uses[source] = uses.get(source, 0) | READ
                if source == self.holder[v] and history.died[v] < before:
                    self.died[source], self.until[v] = index, before
                self._extend(source, index)
            for v in history.makes[f]:
                fresh[v] = self._variable(v, index)
                uses[fresh[v]] = WRITE
            for v in history.writes[f]:  # in place
                uses[fresh[v]] = uses.get(fresh[v], 0) | WRITE
                self._extend(fresh[v], index)
            self.origin.append(f)
            self.repeated.append(True)
            self.counts.append(len(uses))
            self.use_variables.extend(uses)
            self.use_flags.extend(uses.values())
        done = set(functions)
        for v, new in fresh.items():
            alive = v in self.lost and history.born[v] < before <= history.died[v]
            if alive and all(w in done for w in history.writers[v][: history.version(v, before)[1] + 1]):
                if self.lost[v].fleeting and v not in wanted:
                    self.fleeting.add(self.lost[v])
                    continue
                self.holder[v] = new
                self.died[new] = -2
                del self.lost[v]

    def _extend(self, new: int, index: int) -> None:
        """A workspace lives until this function at least; how long others live is known otherwise."""
        if new >= self.trace.variables and self.died[new] >= 0:
            self.died[new] = index

    def _variable(self, origin: int, index: int) -> int:
        self.variable.append(origin)
        self.born.append(index)
        self.died.append(index)
        return len(self.variable) - 1

    def _finish(self) -> Rewritten:
        trace = self.trace
        variable = np.array(self.variable, np.int32)
        origin = np.array(self.origin, np.int32)
        repeated = np.array(self.repeated, bool)
        at = np.append(np.flatnonzero(~repeated), [len(origin), -1])  # the last two entries stand for n and for -1
        born, died = np.array(self.born, np.int64), np.array(self.died, np.int64)
        born[: trace.variables] = at[trace.born]
        open_ended = died == -2
        died[open_ended] = at[trace.died[variable[open_ended]]]
        previous = np.full(len(variable), -1, np.int32)
        known = np.flatnonzero(trace.previous >= 0)
        previous[known] = np.array(self.holder, np.int32)[trace.previous[known]]
        assert trace.functions == int((~repeated).sum())
        part_of, part_first_chunk = self._parts(variable)
        return Rewritten(
            replace(
                trace,
                function_names=tuple(trace.function_names[f] for f in self.origin),
                function_start=self._starts(origin, repeated),
                function_seconds=trace.function_seconds[origin],
                variable_bytes=trace.variable_bytes[variable],
                born=born.astype(np.int32),
                died=died.astype(np.int32),
                previous=previous,
                use_offsets=np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64),
                use_variables=np.array(self.use_variables, np.int32),
                use_flags=np.array(self.use_flags, np.uint8),
                fingerprint=0,
                variable_place=None if trace.variable_place is None else trace.variable_place[variable],
                part_of=part_of,
                part_first_chunk=part_first_chunk,
            ),
            origin,
            repeated,
            variable,
            tuple(drop._replace(fleeting=drop in self.fleeting) for drop in self.drops),
            tuple(self.over.values()),
            tuple(Linger(v, self.until[v]) for v in sorted(self.until)),
        )

    def _starts(self, origin: NDArray[np.int32], repeated: NDArray[np.bool_]) -> NDArray[np.float64]:
        """What runs again begins as the function before it ends. The host's time stays with the functions it had."""
        trace = self.trace
        added = np.where(repeated, trace.function_seconds[origin], 0.0)
        following = np.searchsorted(np.flatnonzero(~repeated), np.arange(len(origin)))
        ends = np.append(0.0, trace.function_start + trace.function_seconds)
        starts = np.where(repeated, ends[following], trace.function_start[following])
        shifted: NDArray[np.float64] = starts + np.cumsum(added) - added
        return shifted

    def _parts(self, variable: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]] | tuple[None, None]:
        """`part_of` and `part_first_chunk`. What is made again is whole, and counts as a recorded variable."""
        part_of, first = self.trace.part_of, self.trace.part_first_chunk
        if part_of is None or first is None:
            return None, None
        more = len(variable) - len(part_of)
        numbers = int(part_of.max(initial=-1)) + 1 + np.arange(more)
        return np.append(part_of, numbers).astype(np.int32), np.append(first, np.zeros(more)).astype(np.int32)
