"""Lower bound: a step time that no schedule beats, computed from the trace itself.

Cut the repeating iteration into stretches of functions. The stretch [i, j) lasts from the start of function i to the
start of function j, and at least as long as

    its computation                          C(i, j), the sum of its functions' times
    function i, and what it must bring in    c_i + (P_i + U(i, j) - M) / b_in
    function i, and what it must send out    c_i + (P_j + D(i, j) - M) / b_out

with M the capacity and, in chunks,

    P_k       what function k uses, its own allocations included: all of it is resident until k ends
    U(i, j)   storages that live when function i starts, that i does not use, and that functions i + 1 to j use:
              beside P_i there is room for M - P_i of them when i ends; all else has to come before j starts
    D(i, j)   storages that functions i to j - 1 write, that live when function j starts and that j does not use: beside
              P_j there is room for M - P_j of them when j starts; all else must have been copied out after the write

P counts whole chunks, as memory is taken in these; U and D count bytes, as of a last chunk only its own are copied.

Stretches that do not overlap add up, so every way to cut one whole iteration gives a bound; `lower_bound` takes the
best that dynamic programming over a limited set of cuts finds. With a disk under the host, `two_link_bound` takes the
longer of two times for each stretch. A copy is of one variable, so what must move takes at least as many latencies as
there are variables of the largest size in it. Proof and limits: docs/lower-bound.md.

`bound` is simpler: a step time that no schedule beats if data leaves once, before the turn, and comes back once, after
it.

    T >= max(C_f, S / b_out) + max(C_b, S / b_in),    S = max(0, P - M)

P is the live peak in bytes and M the capacity, in whole chunks; the function at the peak is where the forward phase
(compute C_f, that function included) turns into the backward one (C_b). What exceeds M at the peak must have left
before it and come back after it. The bound does not know the size of single functions, so it can be out of reach
when they are large; and state that lives across iterations (weights, optimizer state) may leave in the backward
phase and come back in the forward one, so a schedule that moves mostly such state can fall below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from swapd.planning.problem import Problem
from swapd.trace.trace import Machine, live_profile

CUTS = 384  # functions at which stretches may meet, at most
PLANNING_CUTS = 128  # enough to tell whether a plan of many functions is good
_MANY = 4000  # functions
ANCHORS = 6  # functions tried as the start of the whole iteration
_NEVER = np.iinfo(np.int64).max // 4
_ROUNDING = 1e-9  # of sums of sizes, whose last bits depend on their order


_known: WeakKeyDictionary[Problem, dict[int, float]] = WeakKeyDictionary()


def lower_bound(problem: Problem, cuts: int = CUTS) -> float:
    """The best bound in seconds over at most `cuts` places to cut. It is the compute time when nothing else is slower.

    The first call for a problem takes O(cuts * (functions + variables) + cuts^2) time; the result is kept.
    """
    if not problem.functions:
        return 0.0
    known = _known.setdefault(problem, {})
    if cuts not in known:
        known[cuts] = _best(problem, [problem], cuts)
    return known[cuts]


def two_link_bound(problem: Problem, host_chunks: int, disk: Machine, cuts: int = CUTS) -> float:
    """The bound where the host has room for `host_chunks`, and all else lies on a disk (its writes are outs).

    Device and host together are one memory over the disk's link. So each stretch also lasts as long as the problem of
    that capacity and that link says, and of the two the longer time counts, stretch by stretch. Proof:
    docs/lower-bound.md.
    """
    if not problem.functions:
        return 0.0
    both = replace(problem, capacity_chunks=problem.capacity_chunks + host_chunks, machine=disk)
    return _best(problem, [problem, both], cuts)


def _best(problem: Problem, links: list[Problem], cuts: int) -> float:
    """The best cut where each stretch takes as long as on the slowest of several links."""
    places = cut_places(problem, cuts)
    forced = [Forced(link, places) for link in links]
    m = len(places)
    tables = np.max([[table.seconds(a) for a in range(m)] for table in forced], axis=0)
    return max(_best_cut(tables, anchor) for anchor in _anchors(problem, places))


def quick_lower_bound(problem: Problem) -> float:
    """The bound from fewer cuts if there are many functions: planning may take only about a second."""
    return lower_bound(problem, planning_cuts(problem))


def planning_cuts(problem: Problem) -> int:
    """How many cuts planning affords."""
    return CUTS if problem.functions <= _MANY else PLANNING_CUTS


def cut_places(problem: Problem, cuts: int) -> NDArray[np.int64]:
    """Functions to cut at: all, or those with the largest pinned sets and others evenly spread in time."""
    n = problem.functions
    if n <= cuts:
        return np.arange(n)
    ends = np.cumsum(problem.seconds)
    even = np.searchsorted(ends, np.linspace(0, ends[-1], cuts // 2, endpoint=False))
    moved = np.zeros(n)
    np.add.at(moved, problem.uses.function, problem.chunks[problem.uses.variable])
    heavy = np.argsort(-moved, kind="stable")[: cuts - cuts // 2 - 1]
    return np.unique(np.concatenate([[problem.live_peak_function], np.minimum(even, n - 1), heavy]))


def _anchors(problem: Problem, places: NDArray[np.int64]) -> list[int]:
    """Indices into `places`: the start of the iteration, the live peak and the function behind it, and others."""
    peak = int(np.searchsorted(places, problem.live_peak_function))
    spread = np.linspace(0, len(places), ANCHORS - 2, endpoint=False).astype(int).tolist()
    return sorted({*spread, min(peak, len(places) - 1), min(peak + 1, len(places) - 1)})


class Forced:
    """The least time of each stretch between two places, in seconds.

    Row a and column d of a table stand for the stretch that starts at place a and ends d + 1 places later, if need be
    in the next iteration.
    """

    def __init__(self, problem: Problem, places: NDArray[np.int64]) -> None:
        self.problem, self.places, self.m = problem, places, len(places)
        n = self.n = problem.functions
        self.largest = max(1.0, float(problem.sizes.max(initial=0)))
        self.unwrapped = np.concatenate([places, places + n, places[:1] + 2 * n])
        total = np.concatenate([[0.0], np.cumsum(problem.seconds)])
        # Start times of all places in two iterations that follow each other, and of the first place in the third.
        self.begin = np.concatenate([total[places], total[places] + total[-1], total[places[:1]] + 2 * total[-1]])
        uses = problem.uses
        order = np.argsort(uses.function, kind="stable")
        self.by_function = uses.variable[order]
        self.user = uses.function[order]
        self.written = uses.write[order]
        self.offsets = np.searchsorted(self.user, np.arange(n + 1))
        # By how many eighths of last chunks are empty, from those that are full on.
        empty, level = np.unique(np.append(0, 8 - problem.last_eighths), return_inverse=True)
        self.holds, self.level = 1 - empty / 8, level[1:]
        self.full = problem.chunks - (self.level > 0)
        self.reach = np.searchsorted(self.unwrapped, np.arange(2 * n + 2))  # the first place there or behind it
        # Whether full chunks take all the room: then what else there is takes time too.
        self.into_crowded, self.out_crowded = np.zeros((2, self.m, self.m), bool)
        self.into = self._into()
        self.out = self._out()

    def _rows(self, first: int, stop: int) -> slice:
        """The uses by some functions that follow each other."""
        return slice(int(self.offsets[first]), int(self.offsets[stop]))

    def _entry_next(self) -> NDArray[np.int64]:
        """int64[V]: n + the function that first uses a surviving variable in the next iteration, else `_NEVER`."""
        problem, n = self.problem, self.n
        uses = problem.uses
        used = np.diff(uses.offsets) > 0
        first = np.full(problem.variables, _NEVER)
        first[used] = uses.function[uses.offsets[:-1][used]]
        result = np.full(problem.variables, _NEVER)
        known = (problem.successor >= 0) & (problem.died == n)
        result[known] = first[problem.successor[known]]
        result[result < _NEVER] += n
        return result

    def _into(self) -> NDArray[np.float64]:
        """float64[m, m]: chunks that each stretch must bring in, for all stretches with the same start at once."""
        problem, n, m = self.problem, self.n, self.m
        following = self._entry_next()  # the function that next uses each variable that exists by then
        following[problem.born == n] = _NEVER  # such a variable appears after the last function
        result = np.zeros((m, m))
        stop = n
        for at in range(m - 1, -1, -1):
            function = int(self.places[at])
            rows = self._rows(function, stop)
            used, user = self.by_function[rows][::-1], self.user[rows][::-1]  # of several uses the first one stays
            following[used] = np.where(problem.born[used] == user, _NEVER, user)
            stop = function
            ahead = following - function
            needed = ((ahead > 0) & (ahead <= n)).nonzero()[0]
            column = self.reach[following[needed]] - (at + 1)  # of the first stretch in which each is needed
            result[at], self.into_crowded[at] = self._without_room(function, needed, column)
        return result

    def _without_room(
        self, function: int, variables: NDArray[np.int64], column: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """What has no room beside what a function uses, of the variables whose column is no later.

        Returns:
            float64[m] in chunks, and bool[m]: whether full chunks alone take all the room.
        """
        problem, m = self.problem, self.m
        level = self.level[variables]
        part = level.nonzero()[0]
        where = np.concatenate([column, level[part] * m + column[part]])
        count = np.concatenate([self.full[variables], np.ones(len(part))])
        chunks = np.bincount(where, count, len(self.holds) * m).reshape(-1, m).cumsum(axis=1)
        room = problem.capacity_chunks - int(problem.pinned[function])
        # The fullest chunks have room first.
        stay = np.minimum(chunks.cumsum(axis=0), max(room, 0))
        stay[1:] -= stay[:-1].copy()
        total = np.bincount(column, problem.sizes[variables], m).cumsum()
        return np.maximum(total - self.holds @ stay - min(room, 0), 0), chunks[0] >= room

    def _last_writes(self) -> NDArray[np.int64]:
        """int64[V]: for each entry variable, its last writer in the iteration before, numbered from -n to -1."""
        problem, n = self.problem, self.n
        uses = problem.uses
        last = np.full(problem.variables, -_NEVER)
        rows = np.flatnonzero(uses.write)
        np.maximum.at(last, uses.variable[rows], uses.function[rows])
        last[problem.born == n] = n - 1
        entry = np.full(problem.variables, -_NEVER)
        inherits = np.flatnonzero(problem.previous >= 0)
        entry[inherits] = last[problem.previous[inherits]] - n
        return entry

    def _out(self) -> NDArray[np.float64]:
        """float64[m, m]: chunks that each stretch must send out, found for all stretches with the same end at once."""
        written = self._last_writes()
        result = np.zeros((self.m, self.m))
        begin = 0
        for at, function in enumerate(self.places.tolist()):
            rows = self._rows(begin, function)
            writes = self.written[rows]
            written[self.by_function[rows][writes]] = self.user[rows][writes]  # of several writes the last one stays
            begin = function
            self._out_before(at, written, result)
        return result

    def _out_before(self, at: int, written: NDArray[np.int64], result: NDArray[np.float64]) -> None:
        """Fill in the stretches that end at place `at`. A live variable is kept even if no later use is known."""
        problem, n, m = self.problem, self.n, self.m
        stop = int(self.places[at])
        live = (problem.born < stop) & (problem.died >= stop) & ~problem.dormant & (written >= stop - n)
        live[self.by_function[self._rows(stop, stop + 1)]] = False
        dirty = live.nonzero()[0]
        column = m + at - self.reach[written[dirty] + n + 1]  # of the shortest stretch in which each was written
        lengths = np.arange(1, m + 1)  # how many places before `at` each stretch starts
        stretches = (at - lengths) % m, lengths - 1
        result[stretches], self.out_crowded[stretches] = self._without_room(stop, dirty, column)

    def seconds(self, a: int) -> NDArray[np.float64]:
        """float64[m]: the least time of each stretch that starts at place a."""
        machine = self.problem.machine
        compute = self.begin[a + 1 : a + self.m + 1] - self.begin[a]
        into = self._copying(self.into[a], machine.in_bytes_per_second)
        out = self._copying(self.out[a], machine.out_bytes_per_second)
        first = self.problem.seconds[self.places[a]]  # this function ends before any of these copies starts
        result: NDArray[np.float64] = np.maximum(compute, first + np.maximum(into, out))
        return result

    def _copying(self, chunks: NDArray[np.float64], bytes_per_second: float) -> NDArray[np.float64]:
        copies = np.ceil(chunks / self.largest * (1 - _ROUNDING))  # at least so many, as each copy is of one variable
        return chunks * (self.problem.chunk_bytes / bytes_per_second) + copies * self.problem.machine.latency_seconds


def _best_cut(seconds: NDArray[np.float64], anchor: int) -> float:
    """The seconds of the best cut of the iteration that starts at place `anchor`; `seconds` as in `Forced.seconds`."""
    m = len(seconds)
    best = np.zeros(m + 1)  # of the stretches up to each place
    for k in range(m):
        through = best[k] + seconds[(anchor + k) % m, : m - k]
        best[k + 1 :] = np.maximum(best[k + 1 :], through)
    return float(best[m])


@dataclass(frozen=True)
class Bound:
    """The terms of the bound."""

    forward_seconds: float  # C_f
    backward_seconds: float  # C_b
    spill_bytes: int  # S
    out_seconds: float  # S / b_out
    in_seconds: float  # S / b_in

    @property
    def seconds(self) -> float:
        """The bound itself."""
        return max(self.forward_seconds, self.out_seconds) + max(self.backward_seconds, self.in_seconds)


def bound(problem: Problem) -> Bound:
    """The bound for `problem`, which is the compute time when everything fits."""
    turn = problem.live_peak_function + 1
    sizes = np.where(problem.dormant, 0, problem.variable_bytes)
    live = live_profile(problem.born, problem.died, sizes, problem.functions)[turn - 1 : turn]
    spill = max(0, int(live.sum()) - problem.capacity_chunks * problem.chunk_bytes)
    machine = problem.machine
    return Bound(
        forward_seconds=float(problem.seconds[:turn].sum()),
        backward_seconds=float(problem.seconds[turn:].sum()),
        spill_bytes=spill,
        out_seconds=spill / machine.out_bytes_per_second,
        in_seconds=spill / machine.in_bytes_per_second,
    )
