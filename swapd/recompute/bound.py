"""Bound: a step time that no plan beats that swaps and carries out some of the candidates' drops.

The stretches of `swapd.planning.lower_bound` last as long as that says, but a chunk that is made again needs no copy.
So a stretch lasts at least each of

    its computation, and what runs again within it    C(i, j) + R
    function i, and what it must still bring in       c_i + (P_i + U(i, j) - M - (made again within it)) / b_in
    function i, and what it must still send out       c_i + (P_j + D(i, j) - M - (made again behind it)) / b_out

and so at least any mean of the three. Of one cut of the iteration into stretches and one mean for each stretch follows
a bound: what remains is linear in how much of each candidate is made again in each stretch, so it is made again wholly
or not at all, whichever gives less. The search takes the cuts and the means that give the most; every one of them gives
a bound. What a function takes is divided among the candidates that one run of it can serve. Proof:
docs/lower-bound.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swapd.planning.lower_bound import Forced, cut_places
from swapd.planning.problem import Problem
from swapd.recompute.candidates import Candidate
from swapd.recompute.history import History

PLACES = 24  # at which the search may cut
STRETCHES = 6  # at most, of one cut
_COARSE = np.linspace(0.0, 1.0, 5)
_STEPS = (1.0, 0.25, 0.1, 0.04, 0.015, 0.005)

Weights = NDArray[np.float64]  # [stretches, 3]: of computation, in, out; each row adds up to 1


def recompute_bound(problem: Problem, history: History, candidates: Sequence[Candidate], places: int = PLACES) -> float:
    """The best bound in seconds that the search finds. Without candidates it is below `lower_bound`, as fewer cuts are
    tried.

    Args:
        problem: of the trace, without drops.
        history: of the same trace.
        candidates: all drops that plans may carry out.
        places: how many functions the iteration may be cut at.
    """
    if not problem.functions:
        return 0.0
    return max(problem.compute_seconds, _Search(problem, _Items(problem, history, candidates), places).best())


class _Items:
    """What may be made again, an entry for each candidate."""

    def __init__(self, problem: Problem, history: History, candidates: Sequence[Candidate]) -> None:
        self.after = np.array([c.drop.after for c in candidates], np.int64)
        self.before = np.array([c.before for c in candidates], np.int64)
        variables = [c.drop.variable for c in candidates]
        self.chunks = problem.chunks[variables].astype(np.float64) if candidates else np.zeros(0)
        self.written = self._written(problem, variables)
        self.seconds = self._seconds(history, candidates)

    def _written(self, problem: Problem, variables: list[int]) -> NDArray[np.int64]:
        """The last function before each gap that writes the variable, as the problem has it."""
        result = np.zeros(len(variables), np.int64)
        for item, v in enumerate(variables):
            rows = slice(problem.uses.offsets[v], problem.uses.offsets[v + 1])
            writers = problem.uses.function[rows][problem.uses.write[rows]]
            result[item] = writers[writers <= self.after[item]].max()
        return result

    def _seconds(self, history: History, candidates: Sequence[Candidate]) -> NDArray[np.float64]:
        """What each costs at least: its share of the functions that run again wherever in the gap it is made."""
        users: dict[int, list[int]] = {}
        for item, c in enumerate(candidates):
            v = c.drop.variable
            needed = history.repeats([history.version(v, c.before)], c.drop.after + 1, v.__eq__)
            for f in needed or ():
                users.setdefault(f, []).append(item)
        result = np.zeros(len(candidates))
        for f, items in users.items():
            start, stop = self.after[items], self.before[items]
            together = (start[:, None] <= start) & (start < stop[:, None])  # row: an item; column: as another begins
            loads = together.T @ self.chunks[items]  # chunks of all items that one run could serve as each begins
            most = np.where(together, loads, 0.0).max(axis=1)
            result[items] += history.trace.function_seconds[f] * self.chunks[items] / most
        return result


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to cut the iteration: what each stretch takes, and what making each item again in it changes."""

    constant: NDArray[np.float64]  # [stretches, 3] seconds without anything made again
    cost: NDArray[np.float64]  # [items]
    saved_in: NDArray[np.float64]  # [stretches, items] seconds that making an item again in a stretch saves its link in
    saved_out: NDArray[np.float64]  # [stretches (of the run), stretches (of the copy that is saved), items]

    def bound(self, weights: Weights) -> float:
        change = weights[:, :1] * self.cost - weights[:, 1:2] * self.saved_in
        change -= np.einsum("c,rci->ri", weights[:, 2], self.saved_out)
        return float((weights * self.constant).sum() + np.minimum(change, 0.0).sum())


class _Search:
    def __init__(self, problem: Problem, items: _Items, places: int) -> None:
        self.problem, self.items, self.n = problem, items, problem.functions
        self.places = cut_places(problem, places)
        self.forced = Forced(problem, self.places)
        machine = problem.machine
        latency = machine.latency_seconds / self.forced.largest
        self.in_seconds = problem.chunk_bytes / machine.in_bytes_per_second + latency  # of a chunk
        self.out_seconds = problem.chunk_bytes / machine.out_bytes_per_second + latency

    def best(self) -> float:
        """Two stretches from all pairs of places; then the best few with better means and with more stretches."""
        m = len(self.places)
        coarse = []
        for first in range(m):
            for second in range(first + 1, m):
                cut = self._cut((first, second))
                coarse.append((*self._coarse(cut), (first, second)))
        coarse.sort(key=lambda found: -found[0])
        best = 0.0
        for _, weights, marks in coarse[:4]:
            best = max(best, self._extended(marks, weights))
        return best

    def _coarse(self, cut: _Cut) -> tuple[float, Weights]:
        """The best of a few means of computation and the slower link of each stretch."""
        links = 1 + np.argmax(cut.constant[:, 1:], axis=1)
        found: tuple[float, Weights] = (0.0, np.tile([1.0, 0.0, 0.0], (2, 1)))
        for a in _COARSE:
            for b in _COARSE:
                weights = np.zeros((2, 3))
                weights[:, 0] = 1 - a, 1 - b
                weights[[0, 1], links] = a, b
                found = max(found, (cut.bound(weights), weights), key=lambda pair: pair[0])
        return found

    def _extended(self, marks: tuple[int, ...], weights: Weights) -> float:
        """The bound of a cut with better means, and with more places to cut at as long as that gives more."""
        best, weights = _climb(self._cut(marks), weights)
        while len(marks) < STRETCHES:
            tried = []
            for mark in sorted(set(range(len(self.places))) - set(marks)):
                at = int(np.searchsorted(marks, mark))
                finer = (*marks[:at], mark, *marks[at:])
                inherited = np.insert(weights, at, weights[at - 1], axis=0)  # a stretch is cut in two
                tried.append((self._cut(finer).bound(inherited), finer, inherited))
            tried.sort(key=lambda found: -found[0])
            climbed = [(*_climb(self._cut(finer), start), finer) for _, finer, start in tried[:2]]
            if not climbed:
                break
            found, finer_weights, finer = max(climbed, key=lambda result: result[0])
            if found <= best * 1.002:
                break
            best, weights, marks = found, finer_weights, finer
        return best

    def _cut(self, marks: tuple[int, ...]) -> _Cut:
        """Stretches from each of some places to the next; the last one ends at the first place, an iteration later."""
        items, n, m, count = self.items, self.n, len(self.places), len(marks)
        start = self.places[list(marks)]
        stop = np.append(start[1:], start[0] + n)
        constant = np.zeros((count, 3))
        for t, mark in enumerate(marks):
            column = (marks[(t + 1) % count] - mark - 1) % m
            first = self.problem.seconds[self.places[mark]]
            constant[t, 0] = self.forced.begin[mark + column + 1] - self.forced.begin[mark]
            constant[t, 1] = first + self.forced.into[mark, column] * self.in_seconds
            constant[t, 2] = first + self.forced.out[mark, column] * self.out_seconds
        saved_in = np.zeros((count, len(items.chunks)))
        saved_out = np.zeros((count, count, len(items.chunks)))
        for t in range(count):
            for shift in (0, n):  # the gaps of this iteration and of the next one
                after, before, written = items.after + shift, items.before + shift, items.written + shift
                inside = (after < start[t]) & (start[t] < before) & (before <= stop[t])
                saved_in[t] += inside * items.chunks * self.in_seconds
                left = (after < stop[t]) & (stop[t] < before) & (written >= start[t])
                for later in range(1, count + 1):  # the stretches in which it can be made again
                    run = (t + later) % count
                    begins = start[run] + n * ((t + later) // count)
                    saved_out[run, t] += (left & (begins < before)) * items.chunks * self.out_seconds
        return _Cut(constant, items.seconds, saved_in, saved_out)


def _climb(cut: _Cut, weights: Weights) -> tuple[float, Weights]:
    """Shift weight within each stretch as long as the bound rises."""
    best = cut.bound(weights)
    for step in _STEPS:
        rising = True
        while rising:
            rising = False
            for t in range(len(weights)):
                for source in range(3):
                    for target in range(3):
                        amount = min(step, weights[t, source])
                        if source == target or amount <= 0:
                            continue
                        trial = weights.copy()
                        trial[t, source] -= amount
                        trial[t, target] += amount
                        found = cut.bound(trial)
                        if found > best * (1 + 1e-9):
                            best, weights, rising = found, trial, True
    return best, weights
