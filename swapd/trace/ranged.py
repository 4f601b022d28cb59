"""Parts: a variable that functions use in ranges is planned as several variables.

The core records which chunks of a variable each use touches. `cut` makes a trace in which a variable that some function
uses in part becomes several variables, its *parts*. It is cut at every boundary of a range that any function uses, so
that every use is of whole parts. Policies, the simulator and the validator know nothing of this. `recorded_plan` turns
a plan for parts into one for the variables that the core knows, and `plan_in_parts` turns such a plan into one for
parts.

Rules:

- A storage has a number in each iteration; `previous` links them. It is cut at the same places under all its numbers.
- Chunks that no function uses under any of these numbers belong to no part. They are dormant as long as they exist.
- A chunk that no function has used yet has no bytes in either memory: the variable was allocated absent, as one that
  is allocated on the device is used as a whole by the function that makes it. So if a variable is born in the
  iteration, each part of it is born at the part's first use. If no function of the iteration uses a part, the next
  iteration does not find it as an entry variable: the part is born there, again at its first use.
- A part dies when its variable does, because its bytes have to be kept until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import In, Out, Plan
from swapd.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class RangedTrace:
    """An iteration of whole variables, and which chunks of its variable each use touches."""

    whole: Trace
    first_chunk: NDArray[np.uint32]  # [uses]
    chunk_count: NDArray[np.uint32]  # [uses]
    most_chunks: int | None = None  # that the device holds; None if not known

    def cut(self) -> Trace:
        """The trace with parts."""
        return cut(self.whole, self.first_chunk, self.chunk_count, self.most_chunks)


def cut(
    trace: Trace,
    use_first_chunk: NDArray[np.uint32],
    use_chunk_count: NDArray[np.uint32],
    most_chunks: int | None = None,
) -> Trace:
    """Replace every variable that is used in ranges by its parts; return `trace` itself if there is no such variable.

    Args:
        trace: of whole variables, as recorded, with `chunk_bytes`.
        use_first_chunk: [uses of the trace]; chunks of a range beyond the variable's end are left out.
        use_chunk_count: [uses]; a use from chunk 0 on of as many chunks as the variable has, or more, is of all of it.
        most_chunks: how many chunks the device holds. A larger variable that no function uses was used in host memory;
            it counts as a variable that is in parts, and has no part.
    """
    first, count = use_first_chunk.astype(np.int64), use_chunk_count.astype(np.int64)
    if len(first) != len(trace.use_variables) or len(count) != len(first):
        raise ValueError(f"there are {len(first)} and {len(count)} ranges for {len(trace.use_variables)} uses")
    if trace.chunk_bytes <= 0 or trace.part_of is not None:
        raise ValueError("only a trace of whole variables, with the size of a chunk, can be cut into parts")
    chunks = -(-trace.variable_bytes // trace.chunk_bytes)
    ranged = np.flatnonzero((first > 0) | (count < chunks[trace.use_variables]))
    cut_up = trace.use_variables[ranged]
    if most_chunks is not None and (chunks > most_chunks).any():
        absent = chunks > most_chunks
        absent[trace.use_variables] = False
        cut_up = np.concatenate([cut_up, np.flatnonzero(absent)])
    return trace if len(cut_up) == 0 else _Cut(trace, chunks, first, count, cut_up).trace()


def recorded_plan(plan: Plan, trace: Trace) -> Plan:
    """A plan for `trace`, with its variables and chunks numbered as the core does."""
    if trace.part_of is None or trace.part_first_chunk is None:
        return plan
    number, start = trace.part_of.tolist(), trace.part_first_chunk.tolist()

    def outs(moves: Sequence[Out]) -> tuple[Out, ...]:
        return tuple(
            move._replace(variable=number[move.variable], first_chunk=start[move.variable] + move.first_chunk)
            for move in moves
        )

    ins = tuple(
        move._replace(variable=number[move.variable], first_chunk=start[move.variable] + move.first_chunk)
        for move in plan.ins
    )
    return replace(plan, outs=outs(plan.outs), ins=ins, write_backs=outs(plan.write_backs))


def plan_in_parts(plan: Plan, trace: Trace) -> Plan:
    """A plan with the core's numbers, renumbered for `trace`. A move over several parts becomes several moves."""
    if trace.part_of is None:
        return plan
    table = _Table(trace)
    outs, done = [], [0]  # done[k]: how many outs the first k outs became
    for out in plan.outs:
        outs += [out._replace(variable=v, first_chunk=f, chunk_count=c) for v, f, c in table.pieces(out)]
        done.append(len(outs))
    ins = [
        move._replace(variable=v, first_chunk=f, chunk_count=c, after_outs=done[min(move.after_outs, len(plan.outs))])
        for move in plan.ins
        for v, f, c in table.pieces(move)
    ]
    backs = [
        move._replace(variable=v, first_chunk=f, chunk_count=c)
        for move in plan.write_backs
        for v, f, c in table.pieces(move)
    ]
    return replace(plan, outs=tuple(outs), ins=tuple(ins), write_backs=tuple(backs))


class _Table:
    """The parts of each recorded variable, by chunk."""

    def __init__(self, trace: Trace) -> None:
        self.parts: dict[int, list[tuple[int, int, int]]] = {}  # number, first chunk, chunks
        for v in range(trace.variables):
            first, count = trace.chunk_range(v)
            self.parts.setdefault(trace.recorded(v), []).append((v, first, count))

    def pieces(self, move: Out | In) -> list[tuple[int, int, int]]:
        """(part, first chunk in it, chunks) for each part that a move touches; chunks in no part are left out."""
        begin, end = move.first_chunk, move.first_chunk + move.chunk_count
        found = []
        for v, first, count in self.parts.get(move.variable, ()):
            low, high = max(begin, first), min(end, first + count)
            if low < high:
                found.append((v, low - first, high - low))
        return found


@dataclass(frozen=True)
class _Class:
    """Variables that are the same storage in iterations that follow each other, and where they are cut."""

    starts: NDArray[np.int64]  # of the parts, in chunks, ascending
    ends: NDArray[np.int64]


class _Cut:
    def __init__(
        self,
        trace: Trace,
        chunks: NDArray[np.int64],
        first: NDArray[np.int64],
        count: NDArray[np.int64],
        cut_up: NDArray[Any],
    ) -> None:
        self.source, self.chunks = trace, chunks
        owner = trace.use_variables.astype(np.int64)
        self.first = np.minimum(first, chunks[owner])
        self.end = np.minimum(first + count, chunks[owner])
        self.root = roots(trace.previous)
        self.is_cut = np.isin(self.root, self.root[cut_up])  # [V]
        self.rows = np.flatnonzero(self.is_cut[owner])  # uses of the variables that are cut
        self.members = np.flatnonzero(self.is_cut).tolist()
        self.classes = self._classes()
        self.parts = np.ones(trace.variables, np.int64)  # [V]: how many parts a variable has
        for v in self.members:
            self.parts[v] = int(np.searchsorted(self._class(v).starts, chunks[v]))
        self.base = np.concatenate([[0], np.cumsum(self.parts)])

    def _class(self, v: int) -> _Class:
        return self.classes[int(self.root[v])]

    def _classes(self) -> dict[int, _Class]:
        rows: dict[int, list[int]] = {int(root): [] for root in np.unique(self.root[self.is_cut])}
        for row, owner in zip(self.rows.tolist(), self.source.use_variables[self.rows].tolist()):
            rows[int(self.root[owner])].append(row)
        return {root: _cells(self.first[mine], self.end[mine]) for root, mine in rows.items()}

    def trace(self) -> Trace:
        """The trace of parts."""
        source, total = self.source, int(self.base[-1])
        part_of = np.repeat(np.arange(source.variables), self.parts)
        start, stop = np.zeros(total, np.int64), self.chunks[part_of]
        for v in self.members:
            rows, known = slice(self.base[v], self.base[v + 1]), self._class(v)
            start[rows], stop[rows] = known.starts[: self.parts[v]], known.ends[: self.parts[v]]
        chunk = source.chunk_bytes
        sizes = np.minimum(stop * chunk, source.variable_bytes[part_of]) - start * chunk
        offsets, variables, flags = self._uses()
        born, previous, is_blank = self._lives(part_of, offsets, variables)
        kept = np.flatnonzero(~is_blank)
        number = np.where(is_blank, -1, np.cumsum(~is_blank) - 1)
        part_of, previous = part_of[kept], previous[kept]
        unused = source.dormant_bytes
        for v in self.members:
            if source.born[v] < 0:
                unused += int(source.variable_bytes[v] - sizes[self.base[v] : self.base[v + 1]].sum())
        place = source.variable_place
        return replace(
            source,
            variable_bytes=sizes[kept],
            born=born[kept].astype(np.int32),
            died=source.died[part_of],
            previous=np.where(previous >= 0, number[previous], -1).astype(np.int32),
            use_offsets=offsets.astype(np.int64),
            use_variables=number[variables].astype(np.int32),
            use_flags=flags,
            dormant_bytes=unused,
            variable_place=None if place is None else place[part_of],
            part_of=part_of.astype(np.int32),
            part_first_chunk=start[kept].astype(np.int32),
        )

    def _uses(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Offsets, parts and flags of all uses. The parts of a use are consecutive, as every chunk in it is used."""
        source, n = self.source, self.source.functions
        owner = source.use_variables.astype(np.int64)
        lowest, counts = self.base[owner], np.ones(len(owner), np.int64)
        for row in self.rows.tolist():
            low, high = np.searchsorted(self._class(int(owner[row])).starts, [self.first[row], self.end[row]])
            lowest[row] += low
            counts[row] = high - low
        function = np.repeat(np.repeat(np.arange(n), np.diff(source.use_offsets)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        part = np.repeat(lowest, counts) + within
        # A function may use a part through two ranges; the part is listed once.
        _, place, which = np.unique(function * (self.base[-1] + 1) + part, return_index=True, return_inverse=True)
        flags = np.zeros(len(place), np.uint8)
        np.bitwise_or.at(flags, which, np.repeat(source.use_flags, counts))
        order = np.argsort(place)
        kept = place[order]
        return np.searchsorted(function[kept], np.arange(n + 1)), part[kept], flags[order]

    def _lives(
        self, part_of: NDArray[np.int64], offsets: NDArray[np.int64], variables: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """For each part when it is born, its previous part, and whether it has no bytes throughout the iteration.

        A part of an entry variable is born within the iteration if its previous part has no bytes.
        """
        source, n = self.source, self.source.functions
        before = source.previous[part_of].astype(np.int64)
        index = np.arange(len(part_of)) - self.base[part_of]
        previous = np.where((before >= 0) & (index < self.parts[before]), self.base[before] + index, -1)
        used = np.full(len(part_of), n)
        np.minimum.at(used, variables, np.repeat(np.arange(n), np.diff(offsets)))
        born = source.born[part_of].astype(np.int64)
        late = self.is_cut[part_of] & (born >= 0)
        while True:
            born[late] = used[late]
            is_blank = late & (used == n)
            found = late | (previous >= 0) & is_blank[previous]
            if np.array_equal(found, late):
                return born, previous, is_blank
            late = found


def _cells(first: NDArray[np.int64], end: NDArray[np.int64]) -> _Class:
    """Cut some ranges at all their boundaries. The pieces are those that lie in at least one of the ranges."""
    edges = np.unique(np.concatenate([first, end]))
    depth = np.zeros(len(edges), np.int64)  # at each edge, the ranges that begin less those that end
    np.add.at(depth, np.searchsorted(edges, first), 1)
    np.subtract.at(depth, np.searchsorted(edges, end), 1)
    used = np.flatnonzero(np.cumsum(depth)[:-1] > 0)
    return _Class(edges[used], edges[used + 1])


def roots(previous: NDArray[np.int32]) -> NDArray[np.int64]:
    """[V]: the same number for all variables that a chain of `previous` connects."""
    root = list(range(len(previous)))

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = v = root[root[v]]
        return v

    for v in np.flatnonzero((previous >= 0) & (previous != np.arange(len(previous)))).tolist():
        root[find(v)] = find(int(previous[v]))
    return np.array([find(v) for v in range(len(previous))], np.int64)
