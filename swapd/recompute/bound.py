"""Bound: a step time that no plan beats that swaps and carries out some of the candidates' drops.

The stretches of `swapd.planning.lower_bound` last as long as that says, but a chunk that is made again needs no copy.
The iteration is cut at some places. What is unknown is how long it takes from each to the next, d_k, and to what part
each candidate g, of x_g bytes in chunks, is made again meanwhile, z_gk. In the least step

    from each place to the next      d_k >= C_k + sum over g of m_g z_gk
    from any place i to any place j  sum of d_k >= c_i + (P_i + U - M - sum of x_g made again within) / b_in
                                     sum of d_k >= c_i + (P_j + D - M - sum of x_g made again later) / b_out
    if g is made again from h        no g by a place behind which h is made again, if h was dropped and did not fleet by

What fleets is made again for g, and once more later.

What g is made again of may have ended. Then it lingers until that is made, or it is made again as well. Let y_lk be 1
if l lingers for something that is made again behind place k, u_lk how often l is made again behind place k. Then

    for each l that g is made of     y_lk + u_lk >= whether g is made again behind k

and l counts as others do: it takes x_l (y_li - y_lj) more to bring in from i to j, and x_l y_lj to send out before j.

All of this is linear. So a linear programme finds the least sum of all d_k, with each candidate made again wholly, in
part or not at all; the least step of whole ones is no shorter, and takes longer to find. m_g is what the functions take
that make g again, each of them divided among the candidates that one run of it can serve.
Proof: docs/lower-bound.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swapd.planning.lower_bound import Forced, cut_places
from swapd.planning.problem import Problem
from swapd.recompute.candidates import Candidate
from swapd.recompute.history import History

PLACES, LEAST_PLACES = 32, 4
MOST_UNKNOWN = 20_000  # where candidates times places would be more, there are fewer places


def recompute_bound(
    problem: Problem,
    history: History,
    candidates: Sequence[Candidate],
    places: int | None = None,
    whole_seconds: float | None = None,
) -> float:
    """The bound in seconds; more places give more, and take longer.

    Args:
        problem, history, candidates, places: as in `relaxed`.
        whole_seconds: how long to look for the least step in which each candidate is made again wholly or not at all;
            what is found out by then is a bound as well, and no less.
    """
    if not problem.functions:
        return 0.0
    return _Programme(problem, history, candidates, places).least(whole_seconds)[0]


def relaxed(
    problem: Problem, history: History, candidates: Sequence[Candidate], places: int | None = None
) -> tuple[float, NDArray[np.float64]]:
    """The least step of the linear programme, in which what lingers costs nothing: that takes half as long.

    Args:
        problem: of the trace, without drops.
        history: of the same trace.
        candidates: all drops that plans may carry out.
        places: how many functions the iteration may be cut at; by default as many as take about a second.

    Returns:
        The bound in seconds, and float64[candidates]: the part of each that is made again.
    """
    if not problem.functions:
        return 0.0, np.zeros(len(candidates))
    return _Programme(problem, history, candidates, places, lingering=False).least()


@dataclass
class _Rows:
    """Rows of a linear programme: sums of unknowns, each of which is to be at most a number."""

    columns: list[NDArray[np.int64]] = field(default_factory=list)  # an entry for each row
    factors: list[NDArray[np.float64]] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def add(self, columns: ArrayLike, factors: ArrayLike, most: float) -> None:
        self.columns.append(np.asarray(columns, np.int64))
        self.factors.append(np.asarray(factors, np.float64))
        self.most.append(most)


class _Programme:
    """The unknowns are the d_k and then the s_gk, sums of z_gk and all z of g at later places.

    With these a row has one entry for each candidate, and not one for each place at which it may be made again.
    """

    def __init__(
        self,
        problem: Problem,
        history: History,
        candidates: Sequence[Candidate],
        places: int | None,
        lingering: bool = True,
    ) -> None:
        if places is None:
            places = max(LEAST_PLACES, min(PLACES, MOST_UNKNOWN // max(1, len(candidates))))
        self.problem, self.history, self.candidates = problem, history, candidates
        # Of each candidate: the functions that run again if it is made again right after it is dropped.
        self.functions = [self._makers(c) for c in candidates]
        self.forced = Forced(problem, cut_places(problem, places))
        self.places = self.forced.places
        self.m = len(self.places)
        self.after = np.array([c.drop.after for c in candidates], np.int64)
        self.before = np.array([c.before for c in candidates], np.int64)
        self.returns = np.array([not c.final for c in candidates], bool)
        self.sizes = np.array([problem.sizes[c.drop.variable] for c in candidates], np.float64)
        # A candidate can be made again between two places if there is a function that it may run directly before.
        stops = np.append(self.places[1:], problem.functions)
        exists = (self.after[:, None] < stops) & (self.places < self.before[:, None])
        self.behind = np.where(exists, self.m - 1 + np.cumsum(exists).reshape(exists.shape), -1)  # [g, k]: s_gk
        self.unknown = self.m + int(exists.sum())
        # Whether a candidate was made again by the next place for another's sake, and was gone after that.
        self.fleeting = np.full((len(candidates), self.m), -1)
        self.made_of = self._made_of() if lingering else {}
        self.lingers = np.array(list(self.made_of), np.int64)  # variables
        self.ended = np.array([history.died[v] for v in self.made_of], np.int64)
        lost = [(v, len(history.writers[v]) - 1) for v in self.made_of]
        self.remakers = [history.repeats([each], history.died[each[0]] + 1, each[0].__eq__) for each in lost]
        # Whether each lingers for what is made of it behind a place or later; how often it is made again from there on.
        self.stays, self.again = np.full((2, len(self.lingers), self.m), -1)
        self.rows = _Rows()

    def least(self, whole_seconds: float | None = None) -> tuple[float, NDArray[np.float64]]:
        """The least sum of all d_k, in seconds, and how much of each candidate is made again then.

        With `whole_seconds` it is that of whole candidates, or what it is at least as far as was found out by then.
        """
        from scipy.optimize import linprog  # takes a quarter of a second
        from scipy.sparse import csr_array

        self._made_once()
        self._in_order()
        self._lingering()
        self._computing()
        self._copying()
        rows, duration = self.rows, np.arange(self.unknown) < self.m
        most = np.where(duration, np.inf, 1.0)
        most[self.again[self.again >= 0]] = np.inf
        offsets = np.cumsum([0, *map(len, rows.columns)])
        entries = np.concatenate(rows.factors), np.concatenate(rows.columns), offsets
        matrix = csr_array(entries, shape=(len(rows.most), self.unknown))
        bounds = np.stack([np.zeros(self.unknown), most], axis=1)
        if whole_seconds is None:
            found = linprog(duration, matrix, rows.most, bounds=bounds, method="highs-ipm")
            seconds = found.fun if found.success else 0.0
        else:
            options = {"time_limit": whole_seconds}
            found = linprog(duration, matrix, rows.most, bounds=bounds, integrality=~duration, options=options)
            seconds = found.get("mip_dual_bound")  # there is none if time was over before the search began
        # Without an answer the computation alone is a bound.
        seconds, solution = seconds or 0.0, found.x if found.x is not None else np.zeros(self.unknown)
        first = (self.behind >= 0).argmax(axis=1)
        parts: NDArray[np.float64] = solution[self.behind[np.arange(len(first)), first]]
        return max(self.problem.compute_seconds, float(seconds)), parts

    def _made_once(self) -> None:
        """What is made again at a place or later is no less than what is made again later."""
        for earlier, later in zip(self.behind.T[:-1], self.behind.T[1:]):
            for columns in np.stack([later, earlier], axis=1)[(earlier >= 0) & (later >= 0)]:
                self.rows.add(columns, [1.0, -1.0], 0.0)

    def _makers(self, c: Candidate) -> list[int]:
        if c.final:
            return []
        v = c.drop.variable
        return self.history.repeats([self.history.version(v, c.before)], c.drop.after + 1, v.__eq__) or []

    def _in_order(self) -> None:
        """Where h is made again behind a place, nothing was made of it between its drop and there, or it fleeted."""
        gaps: dict[tuple[int, int], list[int]] = {}  # candidates by the version that is dropped
        for h, c in enumerate(self.candidates):
            gaps.setdefault(self.history.version(c.drop.variable, c.before), []).append(h)
        for g, functions in enumerate(self.functions):
            read = {(v, number) for f in functions for v, number, _ in self.history.needs[f]}
            for h in (h for version in sorted(read) for h in gaps.get(version, ())):
                begin = int(np.searchsorted(self.places, self.after[h]))
                for k in range(begin, self.m - 1):
                    made, later, lost = self.behind[g, begin : k + 1], self.behind[g, k + 1], self.behind[h, k + 1]
                    if lost < 0 or made.max() > made[-1]:
                        break
                    if made[-1] >= 0:
                        less = [column for column in (later, self._fleeting(h, k)) if column >= 0]
                        self.rows.add([made[made >= 0][0], lost, *less], [1.0, 1.0, *[-1.0] * len(less)], 1.0)
        for columns in self.fleeting:
            for earlier, later in pairwise(columns[columns >= 0]):
                self.rows.add([earlier, later], [1.0, -1.0], 0.0)

    def _fleeting(self, h: int, k: int) -> int:
        """The unknown; there is none for a final drop, of which nothing is made again."""
        if self.returns[h] and self.fleeting[h, k] < 0:
            self.fleeting[h, k], self.unknown = self.unknown, self.unknown + 1
        return int(self.fleeting[h, k])

    def _made_of(self) -> dict[int, list[int]]:
        """Of each variable that may linger: the candidates that are made of what it holds at its end."""
        history, found = self.history, dict[int, list[int]]()
        for g, functions in enumerate(self.functions):
            read = {(v, number) for f in functions for v, number, _ in history.needs[f] if v in history.may_linger}
            for v, number in sorted(read):
                if number == len(history.writers[v]) - 1:
                    found.setdefault(v, []).append(g)
        return found

    def _lingering(self) -> None:
        """What is made again behind the end of what it is made of: that lingers until then, or is made again too."""
        last = np.array([self.history.uses[v][-1] for v in self.made_of], np.int64)
        idle = np.searchsorted(self.places, last, side="right")  # places behind its last use
        for i, gs in enumerate(self.made_of.values()):
            # All that is made again behind these places is made behind its end.
            behind = np.maximum(self.after[gs][:, None], self.places) >= self.ended[i]
            needed = (self.behind[gs] >= 0) & behind
            if not needed.any():
                continue
            places = np.flatnonzero(needed.any(axis=0))
            for unknowns, first in ((self.stays, min(idle[i], places[0])), (self.again, places[0])):
                if unknowns is self.again and self.remakers[i] is None:
                    continue
                count = int(places[-1] + 1 - first)
                unknowns[i, first : places[-1] + 1] = np.arange(self.unknown, self.unknown + count)
                self.unknown += count
                for earlier, later in pairwise(unknowns[i, first : places[-1] + 1]):
                    self.rows.add([later, earlier], [1.0, -1.0], 0.0)
            for g, k in zip(*needed.nonzero()):
                kept = [column for column in (self.stays[i, k], self.again[i, k]) if column >= 0]
                self.rows.add([self.behind[gs[g], k], *kept], [1.0, *[-1.0] * len(kept)], 0.0)

    def _computing(self) -> None:
        """From each place to the next all functions run between them, those too that run again."""
        begin, cost = self.forced.begin, self._seconds()
        here = np.append(self.behind, self.again, axis=0)
        later = np.append(here[:, 1:], np.full((len(cost), 1), -1), axis=1)
        fleeting = np.append(self.fleeting, np.full(self.again.shape, -1), axis=0)
        fled = np.full(len(cost), -1)  # the last unknown of each that fleets
        for k in range(self.m):
            made, fleets = here[:, k] >= 0, fleeting[:, k] >= 0
            then, before = made & (later[:, k] >= 0), fleets & (fled >= 0)
            columns = here[made, k], later[then, k], fleeting[fleets, k], fled[before]
            seconds = [-1.0], cost[made], -cost[then], cost[fleets], -cost[before]
            self.rows.add(np.concatenate([[k], *columns]), np.concatenate(seconds), begin[k] - begin[k + 1])
            fled = np.where(fleets, fleeting[:, k], fled)

    def _copying(self) -> None:
        """Each stretch lasts as long as what it must bring in, and as what it must send out."""
        forced, machine = self.forced, self.problem.machine
        latency = machine.latency_seconds / forced.largest
        into = self.problem.chunk_bytes / machine.in_bytes_per_second + latency  # seconds of a chunk
        out = self.problem.chunk_bytes / machine.out_bytes_per_second + latency
        written = self._written()
        sizes = self.problem.sizes[self.lingers]
        used = np.array([self.history.uses[v][-1] for v in self.made_of], np.int64)
        made = np.array([self.history.writers[v][-1] for v in self.made_of], np.int64)
        for a, i in enumerate(self.places):
            first = self.problem.seconds[i]
            for d in range(self.m):
                end, stop = (a + d + 1) % self.m, forced.unwrapped[a + d + 1]
                j = self.places[end]
                inside = self.returns & (self.after < i) & (i < self.before) & (self.before <= stop)
                left = (self.after < j) & (j < self.before) & ((written >= i) | (stop > j))
                # Of what lingers: what is not used but to make something again, and for how long it stays.
                begins, ends = self.stays[:, a] >= 0, self.stays[:, end] >= 0
                idle = begins & (used < i) & forced.into_crowded[a, d]
                over = idle & ends & (stop == j)
                kept = ends & (self.ended < j) & ((made >= i) | (stop > j)) & forced.out_crowded[a, d]
                for seconds, each, spared, more, less, at in (
                    (first + forced.into[a, d] * into, into, inside, idle, over, a),
                    (first + forced.out[a, d] * out, out, left, kept, np.zeros_like(kept), end),
                ):
                    # Else the stretch lasts so long anyway.
                    if seconds + each * sizes[more].sum() > forced.begin[a + d + 1] - forced.begin[a]:
                        unknown = self.behind[spared, at], self.stays[more, at], self.stays[less, end]
                        factors = -self.sizes[spared], sizes[more], -sizes[less]
                        columns = np.concatenate([(a + np.arange(d + 1)) % self.m, *unknown])
                        self.rows.add(columns, np.append(-np.ones(d + 1), each * np.concatenate(factors)), -seconds)

    def _written(self) -> NDArray[np.int64]:
        """The last function before each gap that writes the variable, as the problem has it."""
        uses = self.problem.uses
        result = np.zeros(len(self.candidates), np.int64)
        for g, c in enumerate(self.candidates):
            rows = slice(uses.offsets[c.drop.variable], uses.offsets[c.drop.variable + 1])
            writers = uses.function[rows][uses.write[rows]]
            result[g] = writers[writers <= c.drop.after].max()
        return result

    def _seconds(self) -> NDArray[np.float64]:
        """What each costs at least: its share of the functions that run wherever it is made again; all g, then l."""
        users: dict[int, list[int]] = {}
        for g, functions in enumerate((*self.functions, *self.remakers)):
            for f in functions or ():
                users.setdefault(f, []).append(g)
        begin = np.append(self.after, self.ended)
        end = np.append(self.before, np.full(len(self.ended), self.problem.functions))
        sizes = np.append(self.sizes, self.problem.sizes[self.lingers])
        result = np.zeros(len(sizes))
        for f, gs in users.items():
            start, stop = begin[gs], end[gs]
            together = (start[:, None] <= start) & (start < stop[:, None])  # rows: candidates; columns: as others begin
            loads = together.T @ sizes[gs]  # of all that one run could serve as each begins
            most = np.where(together, loads, 0.0).max(axis=1)
            result[gs] += self.history.trace.function_seconds[f] * sizes[gs] / most
        return result
