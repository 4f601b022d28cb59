"""Resizing: a recorded iteration, rewritten as if its operators in parts had been run in parts of another size.

The functions of a group (`swapd.splitting.groups`) repeat: a *part* is the shortest sequence of names that the group is
made of, and its functions are its *slots*. Over the parts, what a slot uses is one of three:

    fixed       the same chunks in each part: an input that every part needs
    moving      one run of chunks of a variable, another one in each part
    temporary   a variable that is born within the part, used by it alone, and freed before the next part ends: a loop
                in Python frees one part's temporary when it has that of the next part

A group of p parts is taken as the stretch from 0 to p, and q new parts are even pieces of that stretch. A piece uses
what the parts that it covers use. If it covers half of a part, it uses half of that part's moving chunks and of its
temporaries, and takes half of its time. One function takes `FUNCTION_SECONDS` at least however small it is (or all it
took, if that was less). A group that does not look like that stays as it is, and so does its time. What a kernel loses
on small parts is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from swapd.splitting.groups import Group
from swapd.trace.ranged import RangedTrace
from swapd.trace.trace import Trace

FUNCTION_SECONDS = 100e-6  # the host's work for one function of a part, about
_MOST_PARTS = 4096


@dataclass(frozen=True)
class _Use:
    variable: int
    flags: int
    first: int  # chunks
    end: int


@dataclass(frozen=True)
class _Operand:
    """What a slot uses in each part. `temporary` is its number within the part, or -1 if it is no temporary."""

    uses: tuple[_Use, ...]
    temporary: int = -1

    @property
    def chunks(self) -> int:
        """The chunks of all parts together; if they are fixed, the chunks that each part uses."""
        return sum(use.end - use.first for use in (self.uses[:1] if self.is_fixed else self.uses))

    @property
    def is_fixed(self) -> bool:
        return self.temporary < 0 and len({(use.first, use.end) for use in self.uses}) == 1

    def piece(self, covers: list[tuple[int, float, float]]) -> tuple[int, int, int, int]:
        """Variable, flags, the lowest chunk that a new part touches, and how many up to the highest; at least one."""
        lows, ends = [], []
        backwards = self.uses[0].first > self.uses[-1].first
        for part, low, high in covers:
            use = self.uses[part]
            if self.is_fixed:
                low, high = 0.0, 1.0
            elif backwards:
                low, high = 1.0 - high, 1.0 - low
            lows.append(use.first + math.floor((use.end - use.first) * low + 1e-9))
            ends.append(use.first + math.ceil((use.end - use.first) * high - 1e-9))
        return self.uses[0].variable, self.uses[0].flags, min(lows), max(max(ends) - min(lows), 1)


@dataclass(frozen=True)
class _Slot:
    """One function of a part."""

    operands: tuple[_Operand, ...]
    seconds: tuple[float, ...]  # in each part


@dataclass(frozen=True)
class Divisible:
    """A group whose number of parts can be changed."""

    first: int  # its first function
    parts: int
    slots: tuple[_Slot, ...]
    temporaries: tuple[tuple[int, ...], ...]  # by number within the part: the temporary's variable in each part
    bytes: tuple[tuple[int, ...], ...]  # likewise: its size in each part
    # Likewise: the slots of its birth and its death (counted on into the next part), and of its death in the last part
    lives: tuple[tuple[int, int, int], ...]

    @property
    def functions(self) -> int:
        return self.parts * len(self.slots)

    def need_bytes(self, parts: int, chunk_bytes: int) -> int:
        """About how many bytes the largest of so many parts uses at once, in whole chunks."""
        needs = []
        for i, slot in enumerate(self.slots):
            given = [operand for operand in slot.operands if operand.temporary < 0]
            chunks = sum(o.chunks if o.is_fixed else -(-o.chunks // parts) for o in given)
            for sizes, (born, died, _) in zip(self.bytes, self.lives):
                alive = (born <= i <= died) + (i + len(self.slots) <= died)  # this part's, and that of the part before
                chunks += alive * -(-sum(sizes) // (parts * chunk_bytes))
            needs.append(chunks * chunk_bytes)
        return max(needs)

    def parts_within(self, limit_bytes: int, chunk_bytes: int) -> int | None:
        """The fewest parts that use at most `limit_bytes` each; None if no number of parts does."""
        low, high = 1, _MOST_PARTS
        if self.need_bytes(high, chunk_bytes) > limit_bytes:
            return None
        while low < high:
            middle = (low + high) // 2
            if self.need_bytes(middle, chunk_bytes) > limit_bytes:
                low = middle + 1
            else:
                high = middle
        return low


def divisible(source: RangedTrace, group: Group) -> Divisible | None:
    """The parts of a group; None if there is only one, if parts do not repeat, or if they use no runs of chunks."""
    names = source.whole.function_names[group.first : group.stop]
    if not names or group.stop > source.whole.functions:
        return None
    length = next(q for q in range(1, len(names) + 1) if len(names) % q == 0 and names[q:] == names[: len(names) - q])
    if length == len(names):
        return None
    return _Reader(source, group.first, len(names) // length, length).read()


def resized(source: RangedTrace, wanted: Sequence[tuple[Divisible, int]]) -> RangedTrace:
    """Rewrite an iteration so that each group runs in its number of parts. Groups must not overlap."""
    return _Writer(source, sorted(wanted, key=lambda pair: pair[0].first)).write()


class _Reader:
    def __init__(self, source: RangedTrace, first: int, parts: int, length: int) -> None:
        self.source, self.trace = source, source.whole
        self.first, self.parts, self.length = first, parts, length

    def _uses(self, part: int, slot: int) -> list[_Use] | None:
        """What a function uses, each variable once; None where that is no run of chunks."""
        function = self.first + part * self.length + slot
        found: dict[int, _Use] = {}
        for row in range(int(self.trace.use_offsets[function]), int(self.trace.use_offsets[function + 1])):
            v, first = int(self.trace.use_variables[row]), int(self.source.first_chunk[row])
            end, flags = first + int(self.source.chunk_count[row]), int(self.trace.use_flags[row])
            known = found.get(v)
            if known is None:
                found[v] = _Use(v, flags, first, end)
            elif first <= known.end and known.first <= end:
                found[v] = _Use(v, flags | known.flags, min(first, known.first), max(end, known.end))
            else:
                return None
        return list(found.values())

    def _within(self, v: int, part: int) -> bool:
        """Whether a variable is a part's temporary."""
        born, died = self._life(v, part)
        return 0 <= born < self.length and died < 2 * self.length

    def read(self) -> Divisible | None:
        numbers: list[dict[int, int]] = [{} for _ in range(self.parts)]  # temporary: its number within the part
        slots = []
        for slot in range(self.length):
            rows = [row for part in range(self.parts) if (row := self._uses(part, slot)) is not None]
            if len(rows) < self.parts or len({len(row) for row in rows}) != 1:
                return None
            operands = [self._operand(column, numbers) for column in zip(*rows)]
            found = [operand for operand in operands if operand is not None]
            if len(found) < len(operands):
                return None
            slots.append(_Slot(tuple(found), tuple(self._seconds(part, slot) for part in range(self.parts))))
        counts = {len(known) for known in numbers}
        if len(counts) != 1:
            return None
        temporaries = tuple(zip(*([*known] for known in numbers)))
        lives = []
        for variables in temporaries:
            spans = [self._life(v, part) for part, v in enumerate(variables)]
            if len(set(spans[:-1])) != 1 or spans[-1][0] != spans[0][0]:
                return None
            lives.append((*spans[0], spans[-1][1]))
        sizes = tuple(tuple(int(self.trace.variable_bytes[v]) for v in variables) for variables in temporaries)
        return Divisible(self.first, self.parts, tuple(slots), temporaries, sizes, tuple(lives))

    def _seconds(self, part: int, slot: int) -> float:
        return float(self.trace.function_seconds[self.first + part * self.length + slot])

    def _life(self, v: int, part: int) -> tuple[int, int]:
        begin = self.first + part * self.length
        return int(self.trace.born[v]) - begin, int(self.trace.died[v]) - begin

    def _operand(self, column: tuple[_Use, ...], numbers: list[dict[int, int]]) -> _Operand | None:
        """What the parts use at the same place, as one operand; None if it cannot be divided."""
        if len({use.flags for use in column}) != 1:
            return None
        if all(self._within(use.variable, part) for part, use in enumerate(column)):
            which = {known.setdefault(use.variable, len(known)) for known, use in zip(numbers, column)}
            return _Operand(column, which.pop()) if len(which) == 1 else None
        return _Operand(column) if len({use.variable for use in column}) == 1 else None


@dataclass
class _Variables:
    """The variables of the trace that is written: the recorded ones, then the temporaries of new parts."""

    sizes: list[int]
    born: list[int]
    died: list[int]

    def add(self, size: int, born: int, died: int) -> int:
        self.sizes.append(size)
        self.born.append(born)
        self.died.append(died)
        return len(self.sizes) - 1


class _Writer:
    def __init__(self, source: RangedTrace, wanted: list[tuple[Divisible, int]]) -> None:
        self.source, self.trace, self.wanted = source, source.whole, wanted
        trace = self.trace
        self.functions: list[int] = []  # for each new function, the recorded one whose name it has
        self.seconds: list[float] = []
        self.rows: list[tuple[int, int, int, int]] = []  # variable, flags, first chunk, chunks
        self.offsets = [0]
        self.begins = np.zeros(trace.functions + 1, np.int64)  # recorded function: the first new one that stands for it
        self.ends = np.zeros(trace.functions + 1, np.int64)  # recorded function: the last new one that stands for it
        self.variables = _Variables(trace.variable_bytes.tolist(), [], [])
        self.gone = {v for group, _ in wanted for variables in group.temporaries for v in variables}

    def write(self) -> RangedTrace:
        at = 0
        for group, parts in self.wanted:
            self._copy(at, group.first)
            self._group(group, parts)
            at = group.first + group.functions
        self._copy(at, self.trace.functions)
        return self._built()

    def _copy(self, first: int, stop: int) -> None:
        trace, source = self.trace, self.source
        for f in range(first, stop):
            self.begins[f] = self.ends[f] = len(self.functions)
            for row in range(int(trace.use_offsets[f]), int(trace.use_offsets[f + 1])):
                use = (int(trace.use_variables[row]), int(trace.use_flags[row]))
                self.rows.append((*use, int(source.first_chunk[row]), int(source.chunk_count[row])))
            self._function(f, float(trace.function_seconds[f]))

    def _function(self, like: int, seconds: float) -> None:
        self.functions.append(like)
        self.seconds.append(seconds)
        self.offsets.append(len(self.rows))

    def _group(self, group: Divisible, parts: int) -> None:
        begin, length = len(self.functions), len(group.slots)
        for old in range(group.parts):
            low, high = old * parts // group.parts, -(-(old + 1) * parts // group.parts) - 1
            for place in range(length):
                self.begins[group.first + old * length + place] = begin + low * length + place
                self.ends[group.first + old * length + place] = begin + high * length + place
        for part in range(parts):
            covers = _covered(group.parts, parts, part)
            made = [
                self._temporary(group, number, covers, begin + part * length, part == parts - 1)
                for number in range(len(group.lives))
            ]
            for number, slot in enumerate(group.slots):
                for operand in slot.operands:
                    if operand.temporary < 0:
                        self.rows.append(operand.piece(covers))
                        continue
                    v = made[operand.temporary]
                    chunks = -(-self.variables.sizes[v] // self.trace.chunk_bytes)
                    self.rows.append((v, operand.uses[0].flags, 0, chunks))
                like = group.first + number + (length if part else 0)  # which gives the name, and the time before it
                self._function(like, _seconds(slot, covers))

    def _temporary(
        self, group: Divisible, number: int, covers: list[tuple[int, float, float]], begin: int, is_last: bool
    ) -> int:
        sizes, (born, died, died_last) = group.bytes[number], group.lives[number]
        died = died_last if is_last else died
        size = max(1, math.ceil(sum((high - low) * sizes[old] for old, low, high in covers)))
        return self.variables.add(size, begin + born, begin + died)

    def _built(self) -> RangedTrace:
        trace, n = self.trace, len(self.functions)
        self.begins[trace.functions] = self.ends[trace.functions] = n
        recorded = trace.variables
        born = [int(self.begins[f]) if f >= 0 else -1 for f in trace.born.tolist()] + self.variables.born
        died = [int(self.ends[f]) if f >= 0 else -1 for f in trace.died.tolist()] + self.variables.died
        kept = [v for v in range(len(born)) if v not in self.gone]
        number = {v: at for at, v in enumerate(kept)}
        previous = [number[int(trace.previous[v])] if v < recorded and trace.previous[v] >= 0 else -1 for v in kept]
        columns = np.array(self.rows, np.int64).reshape(len(self.rows), 4).T
        seconds = np.array(self.seconds, np.float64)
        gaps = np.diff(trace.function_start, prepend=0.0)
        gaps[1:] = trace.function_start[1:] - (trace.function_start + trace.function_seconds)[:-1]
        before = np.array([gaps[f] for f in self.functions], np.float64)
        whole = Trace(
            function_names=tuple(trace.function_names[f] for f in self.functions),
            function_start=np.cumsum(before) + np.cumsum(seconds) - seconds,
            function_seconds=seconds,
            variable_bytes=np.array([self.variables.sizes[v] for v in kept], np.int64),
            born=np.array([born[v] for v in kept], np.int32),
            died=np.array([died[v] for v in kept], np.int32),
            previous=np.array(previous, np.int32),
            use_offsets=np.array(self.offsets, np.int64),
            use_variables=np.array([number[int(v)] for v in columns[0]], np.int32),
            use_flags=columns[1].astype(np.uint8),
            fingerprint=trace.fingerprint,
            dormant_bytes=trace.dormant_bytes,
            chunk_bytes=trace.chunk_bytes,
            slab_chunks_peak=trace.slab_chunks_peak,
            machine=trace.machine,
        )
        return replace(
            self.source,
            whole=whole,
            first_chunk=columns[2].astype(np.uint32),
            chunk_count=columns[3].astype(np.uint32),
        )


def _covered(old_parts: int, parts: int, part: int) -> list[tuple[int, float, float]]:
    """Which parts a new part covers, and from where to where in each."""
    begin, end = part * old_parts / parts, (part + 1) * old_parts / parts
    return [
        (old, max(begin - old, 0.0), min(end - old, 1.0))
        for old in range(int(begin), min(math.ceil(end - 1e-9), old_parts))
        if min(end - old, 1.0) - max(begin - old, 0.0) > 1e-9
    ]


def _seconds(slot: _Slot, covers: list[tuple[int, float, float]]) -> float:
    least = min(FUNCTION_SECONDS, *slot.seconds)
    return least + sum((high - low) * (slot.seconds[old] - least) for old, low, high in covers)


