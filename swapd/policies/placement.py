"""Placement: makes the two ordered lists of a plan from how many chunks leave over each interval.

It works on the resident profile, which has the chunks that are on the device while each function runs. There, chunks
count as gone once their interval has started, and as back once their in may have started. Every in is placed so that
the profile stays within the capacity. That also makes the order safe at any speed of the link: a function that lacks
room waits for outs that depend on nothing later than that function.

The chunks of one interval are moved in several copies, its pieces, so that a function need not wait for all of them.

Write-backs are copies made ahead of the moment at which a variable leaves, while the link out has nothing else to do. A
gradient, say, is written in the backward pass and idle until the optimizer reads it; from then on it is in the way. If
it was copied while it was idle, it is dropped at once when room is short. So what leaves dirty is written back over the
longest idle interval that it has had since it was last written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals, host_valid, start_times
from swapd.policies.usage import make_usage

Move = TypeVar("Move", Out, In)
PIECES = 8  # at most, of one interval's chunks
LATENCIES = 32  # a piece takes at least so many times the latency of a copy
_CAPACITY_SHARE = 256  # a piece has at least one part in so many of the capacity
_LEAD = 1 / 50  # of an iteration: how much ahead of the latest sufficient start an in may start


@dataclass(frozen=True)
class Piece:
    """Some chunks of the variable of an interval."""

    interval: int
    first: int
    count: int
    at: int  # the function before which it may start, in the coordinates of `intervals`


def place(
    problem: Problem, intervals: Intervals, taken: NDArray[np.int64], policy: str, latencies: int = LATENCIES
) -> Plan:
    """The plan in which the last ``taken[i]`` chunks leave over interval i: of a very last one less may be copied.

    `taken` must bring every function within the capacity. A piece takes at least `latencies` times a copy's latency.
    """
    outs = _place_outs(problem, intervals, taken, latencies)
    ins = _place_ins(problem, intervals, taken, latencies)
    variables = intervals.out_variable.tolist()
    moves = [Out(variables[p.interval], p.first, p.count, int(intervals.after[p.interval])) for p in outs]
    return Plan(
        outs=_from_the_start(problem, moves),
        ins=_from_the_start(problem, _ordered_ins(problem, intervals, taken, outs, ins)),
        write_backs=_from_the_start(problem, _write_backs(problem, intervals, taken)),
        policy=policy,
    )


def _from_the_start(problem: Problem, moves: list[Move]) -> tuple[Move, ...]:
    """Moves with chunks as a plan counts them. In this module they are counted from a variable's last one on."""
    chunks = problem.chunks.tolist()
    return tuple(m._replace(first_chunk=chunks[m.variable] - m.first_chunk - m.chunk_count) for m in moves)


def _piece_chunks(problem: Problem, count: int, bytes_per_second: float, latencies: int = LATENCIES) -> int:
    """How many chunks each piece has when `count` chunks move at that speed of the link."""
    least = latencies * problem.machine.latency_seconds * bytes_per_second / problem.chunk_bytes
    return max(1, -(-count // PIECES), int(least), problem.capacity_chunks // _CAPACITY_SHARE)


def _place_outs(problem: Problem, intervals: Intervals, taken: NDArray[np.int64], latencies: int) -> list[Piece]:
    """Outs in the order in which their intervals start. At each start, clean chunks come first: they leave at once."""
    clean = np.minimum(host_valid(intervals, taken), taken)
    rate = problem.link.out_bytes_per_second
    rows: list[tuple[int, int, int, Piece]] = []
    for interval in np.flatnonzero(taken).tolist():
        count, dropped = int(taken[interval]), int(clean[interval])
        start, ends = int(intervals.start[interval]), int(intervals.after[interval])
        if dropped:
            rows.append((ends, 0, len(rows), Piece(interval, 0, dropped, start)))
        size = _piece_chunks(problem, count - dropped, rate, latencies)
        for first in range(dropped, count, size):
            rows.append((ends, 1, len(rows), Piece(interval, first, min(size, count - first), start)))
    rows.sort(key=lambda row: row[:3])
    return [row[3] for row in rows]


def _place_ins(problem: Problem, intervals: Intervals, taken: NDArray[np.int64], latencies: int) -> list[Piece]:
    """Ins in the order of need, each at the earliest useful function from which on there is room for it."""
    n, rate = problem.functions, problem.link.in_bytes_per_second
    held = make_usage(problem.live)
    moved = np.flatnonzero(taken)
    starts, stops = intervals.start.tolist(), intervals.stop.tolist()
    for interval in moved.tolist():
        held.add(starts[interval], stops[interval], -int(taken[interval]))
    returning = moved[intervals.in_variable[moved] >= 0]
    order = returning[np.lexsort((returning, intervals.start[returning], intervals.stop[returning]))]
    pieces: list[Piece] = []
    floor = -n
    for interval, useful in zip(order.tolist(), _useful_starts(problem, intervals, taken, order)):
        stop, count = stops[interval], int(taken[interval])
        start = max(starts[interval], stop - n, useful)  # no more than an iteration ahead
        size = _piece_chunks(problem, count, rate, latencies)
        first = 0
        while first < count:
            part = min(size, count - first)
            full = held.last_above(start, stop, problem.capacity_chunks - part)  # no room for the piece there
            at = max(start if full is None else full + 1, floor)
            held.add(at, stop, part)
            if pieces and first and pieces[-1].at == at:
                part += pieces[-1].count
                pieces[-1] = Piece(interval, pieces[-1].first, part, at)
            else:
                pieces.append(Piece(interval, first, part, at))
            first = pieces[-1].first + pieces[-1].count
            floor = at
    return pieces


def _useful_starts(
    problem: Problem, intervals: Intervals, taken: NDArray[np.int64], order: NDArray[np.int64]
) -> list[int]:
    """For each interval in `order`, the function before which it is of no use to start its in.

    An in that starts earlier than the link needs holds room that functions before its own could use. The latest
    sufficient starts are found backwards from the last need; going round the iteration twice closes the cycle.
    """
    times = start_times(problem)
    n, iteration = problem.functions, problem.compute_seconds
    needs = times[intervals.stop[order] + n]
    # Of each chunk that returns; those of a variable count alike.
    variables = intervals.out_variable[order]
    lengths = problem.variable_bytes[variables] / intervals.chunks[order] / problem.link.in_bytes_per_second
    latest = np.zeros(len(order))
    begin = np.inf
    for lap in (iteration, 0.0):
        for index in range(len(order) - 1, -1, -1):
            begin = min(begin, needs[index] + lap - problem.machine.map_seconds) - taken[order[index]] * lengths[index]
            latest[index] = begin - lap
    useful = np.searchsorted(times, latest - _LEAD * iteration, side="right") - 1 - n
    return [int(function) for function in np.minimum(useful, intervals.stop[order])]


def _ordered_ins(
    problem: Problem, intervals: Intervals, taken: NDArray[np.int64], outs: list[Piece], ins: list[Piece]
) -> list[In]:
    """The list of ins: those that serve an iteration, then those that may start before it ends but serve the next."""
    n = problem.functions
    outs_of: dict[int, list[int]] = {}  # interval: the places of its outs in the list
    for index, piece in enumerate(outs):
        outs_of.setdefault(piece.interval, []).append(index)
    for_room = _outs_for_room(problem, intervals, taken, outs, ins, outs_of)
    moves = []
    for piece in sorted(ins, key=lambda piece: piece.at < 0):
        early = piece.at < 0
        variable = (intervals.out_variable if early else intervals.in_variable)[piece.interval]
        function = piece.at + n if early else piece.at
        before = n if early else int(intervals.stop[piece.interval])
        needed = for_room.get(function, 0)
        if early or not intervals.wraps[piece.interval]:  # its own chunks leave in the iteration in which it starts
            stop = piece.first + piece.count
            own = next(index + 1 for index in outs_of[piece.interval] if outs[index].first + outs[index].count >= stop)
            needed = max(needed, own)
        moves.append(In(int(variable), piece.first, piece.count, function - 1, needed, before))
    return moves


def _outs_for_room(
    problem: Problem,
    intervals: Intervals,
    taken: NDArray[np.int64],
    outs: list[Piece],
    ins: list[Piece],
    outs_of: dict[int, list[int]],
) -> dict[int, int]:
    """{function at which ins start: how many outs must be complete so that it has room beside all earlier ins}.

    One sweep over the functions keeps, for each out, how many of its chunks are away (`_PrefixSums`). A chunk is away
    from the start of its interval until its in may have started or the interval has ended.
    """
    n = problem.functions
    wraps: list[bool] = intervals.wraps.tolist()
    stops: list[int] = intervals.stop.tolist()
    excess: list[int] = (problem.live - problem.capacity_chunks).tolist()
    wanted = {piece.at % n for piece in ins if piece.at < n}
    events: list[list[tuple[str, int]]] = [[] for _ in range(n + 1)]
    for index, piece in enumerate(outs):
        events[min(piece.at + n if wraps[piece.interval] else piece.at, n)].append(("out", index))
    left = {k: int(taken[k]) for k in outs_of if wraps[k] and stops[k] > 0}
    earlier = sum(left.values())  # chunks that left in the iteration before, and are not back
    for k in outs_of:
        if stops[k] > 0:
            events[min(stops[k], n)].append(("end", k))
    for index, piece in enumerate(ins):
        events[min(max(piece.at, 0), n)].append(("in", index))
        if wraps[piece.interval] and piece.at < 0:
            events[piece.at + n].append(("in again", index))
    away = _PrefixSums(len(outs))
    active, back = [False] * len(outs), dict.fromkeys(outs_of, 0)

    def renew(k: int) -> None:
        for index in outs_of[k]:
            piece = outs[index]
            gone = piece.first + piece.count - max(piece.first, back[k])
            away.set(index, max(gone, 0) if active[index] else 0)

    found: dict[int, int] = {}
    for function in range(n):
        for kind, index in events[function]:
            if kind == "out":
                active[index] = True
                renew(outs[index].interval)
            elif kind == "end":
                earlier -= left.pop(index, 0)
                if not wraps[index]:
                    for out in outs_of[index]:
                        active[out] = False
                    renew(index)
            else:
                k, count = ins[index].interval, ins[index].count
                if kind == "in" and wraps[k]:
                    amount = min(count, left.get(k, 0))
                    earlier -= amount
                    left[k] = left.get(k, 0) - amount
                else:
                    back[k] += count
                    renew(k)
        if function in wanted:
            missing = excess[function] - earlier
            found[function] = away.count_for(missing) if missing > 0 else 0
    return found


class _PrefixSums:
    """Numbers with O(log n) to change one, and to find the shortest prefix with a given sum (Fenwick 1994)."""

    def __init__(self, count: int) -> None:
        self.values = [0] * count
        self.sums = [0] * (count + 1)
        self.top = 1 << count.bit_length() >> 1

    def set(self, index: int, value: int) -> None:
        change = value - self.values[index]
        if change:
            self.values[index] = value
            at = index + 1
            while at < len(self.sums):
                self.sums[at] += change
                at += at & -at

    def count_for(self, total: int) -> int:
        """How many numbers from the start add up to `total` or more; one more than there are if all of them do not."""
        at, step = 0, self.top
        while step:
            if at + step < len(self.sums) and self.sums[at + step] < total:
                at += step
                total -= self.sums[at]
            step >>= 1
        return at + 1


def _write_backs(problem: Problem, intervals: Intervals, taken: NDArray[np.int64]) -> list[Out]:
    """The write-backs of a plan in which the first ``taken[i]`` chunks leave over interval i."""
    clean = np.minimum(host_valid(intervals, taken), taken)
    found: list[Out] = []
    written: dict[int, int] = {}  # interval: how many of its first chunks are written back already
    for leaving in np.flatnonzero((taken > clean) & (intervals.clean_after >= 0)).tolist():
        over = _longest_since_written(intervals, leaving)
        start, stop = max(int(clean[leaving]), written.get(over, 0)), int(taken[leaving])
        if stop <= start:
            continue
        written[over] = stop
        variable, function = int(intervals.out_variable[over]), int(intervals.after[over])
        size = _piece_chunks(problem, stop - start, problem.link.out_bytes_per_second)
        found += [Out(variable, first, min(size, stop - first), function) for first in range(start, stop, size)]
    return sorted(found, key=lambda move: move.after_function)


def _longest_since_written(intervals: Intervals, interval: int) -> int:
    """The longest interval since the variable was last written; of equal ones the latest. The chain may be a circle."""
    longest = at = int(intervals.clean_after[interval])
    seen = {interval}
    while at >= 0 and at not in seen:
        seen.add(at)
        longest = at if intervals.seconds[at] > intervals.seconds[longest] else longest
        at = int(intervals.clean_after[at])
    return longest
