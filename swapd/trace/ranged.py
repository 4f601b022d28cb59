"""Parts: a variable that functions use in ranges is planned as several variables.

The core records which chunks of a variable each use touches. `RangedTrace.cut` makes a trace in which a variable that
some function uses in part becomes several variables, its *parts*. It is cut at every boundary of a range that any
function uses, so that every use is of whole parts. Policies, the simulator and the validator know nothing of this.
`recorded_plan` turns a plan for parts into one for the variables that the core knows, and `plan_in_parts` turns such a
plan into one for parts.

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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import In, Out, Plan
from swapd.trace.trace import Trace

Move = TypeVar("Move", Out, In)


@dataclass(frozen=True, eq=False)
class RangedTrace:
    """An iteration of whole variables, as recorded, and which chunks of its variable each use touches.

    Chunks of a range beyond the variable's end are left out. A use from chunk 0 on of as many chunks as the variable
    has, or more, is of all of it. A variable that is larger than the device and that no function uses was used in host
    memory; it counts as a variable that is in parts, and has no part.
    """

    whole: Trace
    first_chunk: NDArray[np.uint32]  # [uses]
    chunk_count: NDArray[np.uint32]  # [uses]
    most_chunks: int | None = None  # that the device holds; None if not known

    def cut(self) -> Trace:
        """The trace with every variable that is used in ranges replaced by its parts; `whole` if there is none."""
        trace = self.whole
        first, count = self.first_chunk.astype(np.int64), self.chunk_count.astype(np.int64)
        if not len(first) == len(count) == len(trace.use_variables):
            raise ValueError(f"there are {len(first)} and {len(count)} ranges for {len(trace.use_variables)} uses")
        if trace.chunk_bytes <= 0 or trace.part_of is not None:
            raise ValueError("only a trace of whole variables, with the size of a chunk, can be cut into parts")
        chunks = -(-trace.variable_bytes // trace.chunk_bytes)
        ranged = np.flatnonzero((first > 0) | (count < chunks[trace.use_variables]))
        cut_up = trace.use_variables[ranged]
        if self.most_chunks is not None and (chunks > self.most_chunks).any():
            absent = chunks > self.most_chunks
            absent[trace.use_variables] = False
            cut_up = np.concatenate([cut_up, np.flatnonzero(absent)])
        return trace if len(cut_up) == 0 else _Cut(trace, chunks, first, count, cut_up).trace()


def recorded_plan(plan: Plan, trace: Trace) -> Plan:
    """A plan for `trace`, with its variables and chunks numbered as the core does."""
    if trace.part_of is None or trace.part_first_chunk is None:
        return plan
    number, start = trace.part_of.tolist(), trace.part_first_chunk.tolist()

    def recorded(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(
            move._replace(variable=number[move.variable], first_chunk=start[move.variable] + move.first_chunk)
            for move in moves
        )

    return replace(plan, outs=recorded(plan.outs), ins=recorded(plan.ins), write_backs=recorded(plan.write_backs))


def plan_in_parts(plan: Plan, trace: Trace) -> Plan:
    """A plan with the core's numbers, renumbered for `trace`. A move over several parts becomes several moves."""
    if trace.part_of is None:
        return plan
    parts: dict[int, list[tuple[int, int, int]]] = {}  # recorded variable: number, first chunk and chunks of each part
    for v in range(trace.variables):
        parts.setdefault(trace.recorded(v), []).append((v, *trace.chunk_range(v)))

    def pieces(move: Move) -> Iterator[Move]:
        """The move of each part that a move touches; chunks in no part are left out."""
        begin, end = move.first_chunk, move.first_chunk + move.chunk_count
        for v, first, count in parts.get(move.variable, ()):
            low, high = max(begin, first), min(end, first + count)
            if low < high:
                yield move._replace(variable=v, first_chunk=low - first, chunk_count=high - low)

    outs: list[Out] = []
    done = [0]  # done[k]: how many outs the first k outs became
    for out in plan.outs:
        outs += pieces(out)
        done.append(len(outs))
    ins = [
        piece._replace(after_outs=done[min(move.after_outs, len(plan.outs))])
        for move in plan.ins
        for piece in pieces(move)
    ]
    backs = [piece for move in plan.write_backs for piece in pieces(move)]
    return replace(plan, outs=tuple(outs), ins=tuple(ins), write_backs=tuple(backs))


class _Cut:
    """Where storages are cut. A chunk of a storage, whatever its number, has one key: all are cut in one sweep."""

    def __init__(
        self,
        trace: Trace,
        chunks: NDArray[np.int64],
        first: NDArray[np.int64],
        count: NDArray[np.int64],
        cut_up: NDArray[Any],
    ) -> None:
        self.source, self.chunks = trace, chunks
        self.owner = owner = trace.use_variables.astype(np.int64)
        first = np.minimum(first, chunks[owner])
        end = np.minimum(first + count, chunks[owner])
        root = roots(trace.previous)
        self.is_cut = np.isin(root, root[cut_up])  # [V]
        self.origin = root * (int(chunks.max(initial=0)) + 1)  # [V]: the key of the variable's first chunk
        self.rows = np.flatnonzero(self.is_cut[owner])  # uses of the variables that are cut
        self.first, self.end = (self.origin[owner[self.rows]] + edge[self.rows] for edge in (first, end))
        self.starts, self.ends = _cells(self.first, self.end)
        self.lowest = np.searchsorted(self.starts, self.origin)  # [V]: the first cell of the variable's storage
        cells = np.searchsorted(self.starts, self.origin + chunks) - self.lowest
        self.parts = np.where(self.is_cut, cells, 1)  # [V]: how many parts a variable has
        self.base = np.concatenate([[0], np.cumsum(self.parts)])

    def trace(self) -> Trace:
        """The trace of parts."""
        source, chunk = self.source, self.source.chunk_bytes
        part_of = np.repeat(np.arange(source.variables), self.parts)
        index = np.arange(len(part_of)) - self.base[part_of]  # of a part among those of its variable
        start, stop = np.zeros(len(part_of), np.int64), self.chunks[part_of]
        inside = np.flatnonzero(self.is_cut[part_of])
        cell, origin = (self.lowest[part_of] + index)[inside], self.origin[part_of[inside]]
        start[inside], stop[inside] = self.starts[cell] - origin, self.ends[cell] - origin
        sizes = np.minimum(stop * chunk, source.variable_bytes[part_of]) - start * chunk
        offsets, variables, flags = self._uses()
        born, previous, is_blank = self._lives(part_of, index, offsets, variables)
        kept = np.flatnonzero(~is_blank)
        number = np.where(is_blank, -1, np.cumsum(~is_blank) - 1)
        covered = np.zeros(source.variables, np.int64)
        np.add.at(covered, part_of, sizes)
        unused = int((source.variable_bytes - covered)[source.born < 0].sum())
        part_of, previous = part_of[kept], previous[kept]
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
            dormant_bytes=source.dormant_bytes + unused,
            variable_place=None if place is None else place[part_of],
            part_of=part_of.astype(np.int32),
            part_first_chunk=start[kept].astype(np.int32),
        )

    def _uses(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Offsets, parts and flags of all uses. The parts of a use are consecutive, as every chunk in it is used."""
        source, n, owner = self.source, self.source.functions, self.owner
        lowest, counts = self.base[owner], np.ones(len(owner), np.int64)
        low, high = np.searchsorted(self.starts, self.first), np.searchsorted(self.starts, self.end)
        lowest[self.rows] += low - self.lowest[owner[self.rows]]
        counts[self.rows] = high - low
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
        self,
        part_of: NDArray[np.int64],
        index: NDArray[np.int64],
        offsets: NDArray[np.int64],
        variables: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """For each part when it is born, its previous part, and whether it has no bytes throughout the iteration.

        A part of an entry variable is born within the iteration if its previous part has no bytes.
        """
        source, n = self.source, self.source.functions
        before = source.previous[part_of].astype(np.int64)
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


def _cells(first: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut ranges at all their boundaries. Returns where the pieces begin and end that lie in at least one of them."""
    edges = np.unique(np.concatenate([first, end]))
    depth = np.zeros(len(edges), np.int64)  # at each edge, the ranges that begin less those that end
    np.add.at(depth, np.searchsorted(edges, first), 1)
    np.subtract.at(depth, np.searchsorted(edges, end), 1)
    used = np.flatnonzero(np.cumsum(depth)[:-1] > 0)
    return edges[used], edges[used + 1]


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
