"""Bound: a step time that no plan beats that swaps and carries out some of the candidates' drops.

The stretches of `swapd.planning.lower_bound` last as long as that says, but a chunk that is made again needs no copy.
The iteration is cut at some places. What is unknown is how long it takes from each to the next, d_k, and to what part
each candidate g, of x_g bytes in chunks, is made again meanwhile, z_gk. In the least step

    from each place to the next      d_k >= C_k + sum over g of m_g z_gk
    from any place i to any place j  sum of d_k >= c_i + (P_i + U - M - sum of x_g made again within) / b_in
                                     sum of d_k >= c_i + (P_j + D - M - sum of x_g made again later) / b_out
    if g is made again from h        no g by a place behind which h is made again, if h was dropped and did not fleet by

What fleets is made again for g, and once more later.

All of this is linear. So a linear programme finds the least sum of all d_k, with each candidate made again wholly, in
part or not at all; the least step of whole ones is no shorter, and takes longer to find. m_g is what the functions take
that make g again, each of them divided among the candidates that one run of it can serve. What lingers costs nothing.
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
    """The least step of the linear programme.

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
    return _Programme(problem, history, candidates, places).least()


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

    def __init__(self, problem: Problem, history: History, candidates: Sequence[Candidate], places: int | None) -> None:
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
        self.rows = _Rows()

    def least(self, whole_seconds: float | None = None) -> tuple[float, NDArray[np.float64]]:
        """The least sum of all d_k, in seconds, and how much of each candidate is made again then.

        With `whole_seconds` it is that of whole candidates, or what it is at least as far as was found out by then.
        """
        from scipy.optimize import linprog  # takes a quarter of a second
        from scipy.sparse import csr_array

        self._made_once()
        self._in_order()
        self._computing()
        self._copying()
        rows, duration = self.rows, np.arange(self.unknown) < self.m
        offsets = np.cumsum([0, *map(len, rows.columns)])
        entries = np.concatenate(rows.factors), np.concatenate(rows.columns), offsets
        matrix = csr_array(entries, shape=(len(rows.most), self.unknown))
        bounds = np.stack([np.zeros(self.unknown), np.where(duration, np.inf, 1.0)], axis=1)
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

    def _computing(self) -> None:
        """From each place to the next all functions run between them, those too that run again."""
        begin, cost = self.forced.begin, self._seconds()
        later = np.append(self.behind[:, 1:], np.full((len(cost), 1), -1), axis=1)
        fled = np.full(len(cost), -1)  # the last unknown of each that fleets
        for k in range(self.m):
            here, fleets = self.behind[:, k] >= 0, self.fleeting[:, k] >= 0
            then, before = here & (later[:, k] >= 0), fleets & (fled >= 0)
            made = self.behind[here, k], later[then, k], self.fleeting[fleets, k], fled[before]
            seconds = [-1.0], cost[here], -cost[then], cost[fleets], -cost[before]
            self.rows.add(np.concatenate([[k], *made]), np.concatenate(seconds), begin[k] - begin[k + 1])
            fled = np.where(fleets, self.fleeting[:, k], fled)

    def _copying(self) -> None:
        """Each stretch lasts as long as what it must bring in, and as what it must send out."""
        forced, machine = self.forced, self.problem.machine
        latency = machine.latency_seconds / forced.largest
        into = self.problem.chunk_bytes / machine.in_bytes_per_second + latency  # seconds of a chunk
        out = self.problem.chunk_bytes / machine.out_bytes_per_second + latency
        written = self._written()
        for a, i in enumerate(self.places):
            first = self.problem.seconds[i]
            for d in range(self.m):
                end, stop = (a + d + 1) % self.m, forced.unwrapped[a + d + 1]
                j = self.places[end]
                inside = self.returns & (self.after < i) & (i < self.before) & (self.before <= stop)
                left = (self.after < j) & (j < self.before) & ((written >= i) | (stop > j))
                for seconds, each, spared, at in (
                    (first + forced.into[a, d] * into, into, inside, a),
                    (first + forced.out[a, d] * out, out, left, end),
                ):
                    if seconds > forced.begin[a + d + 1] - forced.begin[a]:  # else the stretch lasts so long anyway
                        columns = np.append((a + np.arange(d + 1)) % self.m, self.behind[spared, at])
                        factors = np.append(-np.ones(d + 1), -each * self.sizes[spared])
                        self.rows.add(columns, factors, -seconds)

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
        """m_g: what each costs at least, its share of the functions that run again wherever in the gap it is made."""
        users: dict[int, list[int]] = {}
        for g, functions in enumerate(self.functions):
            for f in functions:
                users.setdefault(f, []).append(g)
        result = np.zeros(len(self.candidates))
        for f, gs in users.items():
            start, stop = self.after[gs], self.before[gs]
            together = (start[:, None] <= start) & (start < stop[:, None])  # rows: candidates; columns: as others begin
            loads = together.T @ self.sizes[gs]  # of all that one run could serve as each begins
            most = np.where(together, loads, 0.0).max(axis=1)
            result[gs] += self.history.trace.function_seconds[f] * self.sizes[gs] / most
        return result
