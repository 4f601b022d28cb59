"""Host blocks: the second level's problem, made of what the first level copies.

    function    a copy of the first level, in the order of their starts; it lasts until the next copy starts
    variable    a *block*: room for a whole first-level variable, from the copy out that first writes it to the last
                moment at which the host has to have any of it
    capacity    the host budget
    machine     the disk: its writes are outs, its reads are ins

A copy out allocates its block, a copy in reads it; both also count as uses by the copies that start while they are
under way. A block is dead after the last copy in of what it holds: then the device has the bytes. It lives on only
while the first level goes without them: until the next copy in, or until the variable is freed. A clean drop is no
copy, so it is no function. Variables that no function uses (dormant ones) leave both memories once, and are left out.

Blocks are whole variables because the allocator moves them whole (`host_tiers.cpp`): a copy out of some chunks into a
block that is there needs the rest of it, so it reads the block as well as it writes it.

A block that is there as the iteration starts is the successor of the one that is there as it ends, as with variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from swapd.planning.problem import Problem
from swapd.simulation.steps import steps_of
from swapd.tiers.first_level import FirstLevel, UnsteadyError
from swapd.trace.trace import READ, WRITE, Machine

_LAPS, _STEADY = 5, 2  # iterations that are gone through, and the one that is described
_BEFORE = -(1 << 60)


@dataclass(slots=True, eq=False)
class _Block:
    storage: int  # of the first level
    chunks: int
    variable: int  # of the first level, as numbered where the block is first seen
    born: int  # the copy that writes it, counted on through the iterations
    last: int  # the last copy while which it has to be there
    uses: dict[int, int] = field(default_factory=dict)  # copy: flags


@dataclass(frozen=True, eq=False)
class HostBlocks(Problem):
    """The second level's problem. Variables are the host's blocks."""

    owner: tuple[int, ...] = ()  # [V] the first level's variable whose bytes they are


def host_blocks(level: FirstLevel, host_budget_bytes: int, disk: Machine) -> HostBlocks:
    """The problem of keeping the host's blocks within `host_budget_bytes`, with a disk under them.

    Raises:
        UnsteadyError: the first level reads blocks that it has not written; more iterations may help.
    """
    return _Walk(level).problem(host_budget_bytes, disk)


class _Walk:
    """Goes through the first level's iteration several times and follows each block."""

    def __init__(self, level: FirstLevel) -> None:
        self.level, self.copies = level, len(level.copies)
        self.happens = self._happenings()
        self.current: dict[int, _Block] = {}  # what the host has of each storage
        self.blocks: dict[int, list[_Block]] = {}
        self.named: list[list[int]] = []  # per iteration, the storage of each variable
        storages = 0
        for lap in range(_LAPS):
            row = []
            for before in level.problem.previous.tolist():
                row.append(self.named[-1][before] if lap and before >= 0 else storages)
                storages += not (lap and before >= 0)
            self.named.append(row)
            self._go_through(lap)

    def _happenings(self) -> list[tuple[float, int, int]]:
        """Ends of functions (0), losses (1) and copies (2) with their indices, in the order in which they count."""
        level = self.level
        rows = [(run.end, 0, run.function) for run in level.runs]
        rows += [(lost.start, 1, index) for index, lost in enumerate(level.lost)]
        rows += [(copy.start, 2, index) for index, copy in enumerate(level.copies)]
        return sorted(rows)

    def _go_through(self, lap: int) -> None:
        level, names = self.level, self.named[lap]
        writes = steps_of(level.problem).writes
        for time, kind, index in self.happens:
            if kind == 0:
                for v in writes[index]:
                    self.current.pop(names[v], None)
            elif kind == 1:
                lost = level.lost[index]
                at = lap * self.copies + level.copies_before(time) - 1
                block = self.current.pop(names[lost.variable], None)
                if block is not None:
                    block.last = max(block.last, at)
            else:
                self._copy(lap, index)

    def _copy(self, lap: int, index: int) -> None:
        copy, at = self.level.copies[index], lap * self.copies + index
        storage, until = self.named[lap][copy.variable], at + self.level.outlasts[index]
        block = self.current.get(storage)
        flags = WRITE if copy.is_out else READ
        if block is None:
            if not copy.is_out and lap:
                raise UnsteadyError(f"copy {index} reads what the host does not have")
            size = int(self.level.problem.chunks[copy.variable])
            block = _Block(storage, size, copy.variable, at if copy.is_out else _BEFORE, until)
            self.current[storage] = block
            self.blocks.setdefault(storage, []).append(block)
        elif copy.mask.bit_count() < block.chunks:
            flags |= READ
        block.last = max(block.last, until)
        for user in range(at, until + 1):
            block.uses[user] = block.uses.get(user, 0) | flags

    def problem(self, host_budget_bytes: int, disk: Machine) -> HostBlocks:
        """The steady iteration as a problem."""
        level, k = self.level, self.copies
        begin, end = _STEADY * k, (_STEADY + 1) * k
        final = {storage: lap for lap, row in enumerate(self.named) for storage in row}
        there = []
        for row in self.blocks.values():
            for block in row:  # one that is under way as its variable's last iteration ends is gone by then
                block.last = min(block.last, (final[block.storage] + 1) * k - 1)
                if block.born < end and block.last >= begin:
                    there.append(block)
        number = {block: v for v, block in enumerate(there)}
        variable = {storage: v for v, storage in enumerate(self.named[_STEADY])}
        previous = [self._previous(b, variable[b.storage], end, number) if b.born < begin else -1 for b in there]
        uses: list[list[tuple[int, int]]] = [[] for _ in range(k)]
        for block, v in number.items():
            for at, flags in block.uses.items():
                if begin <= at < end:
                    uses[at - begin].append((v, flags))
        chunk, first = level.problem.chunk_bytes, level.starts[0] if k else 0.0
        label = level.problem.label
        return HostBlocks(
            names=tuple(f"copy {'out' if copy.is_out else 'in'} of {label(copy.variable)}" for copy in level.copies),
            seconds=np.diff([*level.starts, first + level.seconds]) if k else np.zeros(0),
            chunks=np.array([block.chunks for block in there], np.int64),
            variable_bytes=level.problem.variable_bytes[[block.variable for block in there]],
            born=np.array([max(block.born - begin, -1) for block in there], np.int32),
            died=np.array([min(block.last, end) - begin for block in there], np.int32),
            previous=np.array(previous, np.int32),
            use_offsets=np.cumsum([0, *map(len, uses)]),
            use_variables=np.array([v for row in uses for v, _ in row], np.int32),
            use_flags=np.array([flags for row in uses for _, flags in row], np.uint8),
            capacity_chunks=host_budget_bytes // chunk,
            chunk_bytes=chunk,
            slab_chunks=0,
            budget_bytes=int(host_budget_bytes),
            machine=disk,
            fingerprint=level.problem.fingerprint,
            labels=tuple(f"block of {label(block.variable)}" for block in there),
            moves_whole=True,
            owner=tuple(variable[block.storage] for block in there),
        )

    def _previous(self, block: _Block, v: int, end: int, number: dict[_Block, int]) -> int:
        """The block that is at the iteration's end what `block`, of variable v, is at its start."""
        for later in self.blocks.get(self.named[_STEADY + 1][v], ()):
            if later.born < end <= later.last and later in number:
                return number[later]
        raise UnsteadyError(f"the iteration ends without {self.level.problem.label(v)} on the host, and begins with it")
