"""Sequence: writes down one iteration after the other as traces, for recorders that have no native core beside them.

The conventions are those of the native recorder (`ooc_alloc/csrc/recorder.h`): variables are numbered by first
appearance in an iteration, `previous` links the numbers of two iterations that did the same, and frees are no part of
the fingerprint. Small storages are no variables: the most bytes that they take at a time become the trace's slabs.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from itertools import accumulate

from swapd.trace.trace import READ, WRITE, Machine, Trace

_GRANULE = 512  # bytes; sizes of small storages are rounded up to a multiple of it


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory, from its allocation to its release. The recorder keeps the storage's number in it."""

    bytes: int
    small: bool = False
    iteration: int = -1  # the last iteration in which it appeared
    variable: int = -1  # its number in that iteration


@dataclass
class _Variable:
    bytes: int
    born: int
    previous: int = -1
    died: int | None = None


@dataclass
class _Iteration:
    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    uses: list[dict[int, int]] = field(default_factory=list)  # per function: variable and how it is used
    variables: list[_Variable] = field(default_factory=list)
    only_freed: list[_Variable] = field(default_factory=list)  # freed without a use: numbered last
    slab_bytes: int = 0


class SequenceRecorder:
    """Records functions, their storages and when these are released.

    Call `begin_function`, then `use` for each storage that the function is given and `allocate` for each that it makes,
    then `end_function`. Call `free` at any time, and `finish` at the end of each iteration.
    """

    def __init__(self, chunk_bytes: int, small_limit_bytes: int, machine: Machine | None = None) -> None:
        self.chunk_bytes, self.small_limit_bytes, self.machine = chunk_bytes, small_limit_bytes, machine
        self.iteration = 0
        self._now = _Iteration()
        self._slab_bytes = 0
        self._large_bytes = 0
        self._last_fingerprint: int | None = None

    @property
    def functions(self) -> int:
        """Functions of the iteration so far."""
        return len(self._now.names)

    def begin_function(self, name: str) -> None:
        self._now.names.append(name)
        self._now.seconds.append(0.0)
        self._now.uses.append({})

    def end_function(self, seconds: float) -> None:
        self._now.seconds[-1] = seconds

    def use(self, storage: Storage, flags: int) -> None:
        """The running function reads or writes `storage`."""
        if storage.small:
            return
        v = storage.variable if storage.iteration == self.iteration else self._add(storage, -1)
        row = self._now.uses[-1]
        row[v] = row.get(v, 0) | flags

    def known(self, storage: Storage) -> None:
        """`storage` exists, but which function allocated it is not known."""
        storage.small = storage.bytes <= self.small_limit_bytes
        self._count(storage, 1)

    def allocate(self, storage: Storage) -> None:
        """The running function allocates `storage`."""
        self.known(storage)
        if not storage.small:
            self._now.uses[-1][self._add(storage, self.functions - 1)] = WRITE

    def allocate_outside(self, storage: Storage) -> None:
        """`storage` is allocated between two functions."""
        self.known(storage)
        if not storage.small:
            self._add(storage, self.functions)

    def free(self, storage: Storage) -> None:
        """`storage` is released. It counts as live until the function that began last has ended."""
        self._count(storage, -1)
        if storage.small:
            return
        last = self.functions - 1
        if storage.iteration == self.iteration:
            variable = self._now.variables[storage.variable]
            variable.died = max(last, variable.born)
        elif storage.iteration + 1 == self.iteration and storage.variable >= 0 and last >= 0:
            self._now.only_freed.append(_Variable(storage.bytes, -1, storage.variable, last))

    def finish(self) -> Trace:
        """Return the iteration as a trace, and begin the next one."""
        ended = self._now
        fingerprint = _fingerprint(ended)
        used_bytes = sum(v.bytes for v in ended.variables if v.died is None)
        ended.variables += ended.only_freed
        n = len(ended.names)
        for variable in ended.variables:
            variable.born = min(variable.born, n - 1)
            variable.died = n if variable.died is None else min(variable.died, n)
        self._link(ended, fingerprint == self._last_fingerprint)
        trace = self._trace(ended, fingerprint, self._large_bytes - used_bytes)
        self._last_fingerprint = fingerprint
        self.iteration += 1
        self._now = _Iteration(slab_bytes=self._slab_bytes)
        return trace

    def _add(self, storage: Storage, born: int) -> int:
        follows = storage.iteration + 1 == self.iteration and born < 0
        variable = _Variable(storage.bytes, born, storage.variable if follows else -1)
        storage.iteration, storage.variable = self.iteration, len(self._now.variables)
        self._now.variables.append(variable)
        return storage.variable

    def _count(self, storage: Storage, sign: int) -> None:
        if not storage.small:
            self._large_bytes += sign * storage.bytes
            return
        self._slab_bytes += sign * -(-storage.bytes // _GRANULE) * _GRANULE
        self._now.slab_bytes = max(self._now.slab_bytes, self._slab_bytes)

    def _link(self, ended: _Iteration, repeats: bool) -> None:
        """Settle each `previous`, which means something only if the iteration before did the same.

        Otherwise an entry variable that survives gets its own number, as it would have that if this iteration repeated.
        """
        n = len(ended.names)
        for v, variable in enumerate(ended.variables):
            before = variable.previous
            if not repeats:
                variable.previous = v if variable.born < 0 and variable.died == n else -1
            elif before >= 0 and (before >= len(ended.variables) or ended.variables[before].died != n):
                variable.previous = -1

    def _trace(self, ended: _Iteration, fingerprint: int, dormant_bytes: int) -> Trace:
        offsets = list(accumulate(map(len, ended.uses), initial=0))
        starts = list(accumulate(ended.seconds, initial=0.0))
        return Trace(
            function_names=tuple(ended.names),
            function_start=starts[:-1],  # type: ignore[arg-type]  # Trace makes arrays of all of these
            function_seconds=ended.seconds,  # type: ignore[arg-type]
            variable_bytes=[v.bytes for v in ended.variables],  # type: ignore[arg-type]
            born=[v.born for v in ended.variables],  # type: ignore[arg-type]
            died=[v.died for v in ended.variables],  # type: ignore[arg-type]
            previous=[v.previous for v in ended.variables],  # type: ignore[arg-type]
            use_offsets=offsets,  # type: ignore[arg-type]
            use_variables=[v for row in ended.uses for v in row],  # type: ignore[arg-type]
            use_flags=[flags for row in ended.uses for flags in row.values()],  # type: ignore[arg-type]
            fingerprint=fingerprint,
            dormant_bytes=dormant_bytes,
            chunk_bytes=self.chunk_bytes,
            slab_chunks_peak=-(-ended.slab_bytes // self.chunk_bytes),
            machine=self.machine,
        )


def _fingerprint(iteration: _Iteration) -> int:
    """64 bits that depend on what functions do to which variables and on their sizes, not on times or frees."""
    digest = hashlib.blake2b(digest_size=8)
    for name, row in zip(iteration.names, iteration.uses):
        digest.update(name.encode() + b"\0")
        digest.update(b"".join(struct.pack("<iB", v, flags & (READ | WRITE)) for v, flags in row.items()))
    digest.update(b"".join(struct.pack("<qi", v.bytes, v.born) for v in iteration.variables))
    return int.from_bytes(digest.digest(), "little")
