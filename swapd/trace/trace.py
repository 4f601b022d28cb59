"""Trace: what one iteration of a program does to memory. `swapd.trace.trace_file` keeps it in a file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapd.files import write_whole
from swapd.trace import trace_file
from swapd.trace.trace_file import ARRAYS, COSTS, OPTIONAL, PARTS, TraceError, lengths

READ = 1
WRITE = 2
LARGEST_BYTES = 1 << 60  # sums stay exact, in 64 bits too
LARGEST_SECONDS = 1e9


@dataclass(frozen=True)
class Machine:
    """Speed of the link between device and host; the two directions do not slow each other down.

    A chunk is mapped before it is copied in, and unmapped after it was copied out or dropped. That happens while other
    chunks are copied, as far as there are any.
    """

    out_bytes_per_second: float = 12e9
    in_bytes_per_second: float = 12e9
    latency_seconds: float = 0.0  # of one copy, before its first byte
    map_seconds: float = 0.0  # of one chunk, with the access
    unmap_seconds: float = 0.0  # of one chunk

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_second", "in_bytes_per_second"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be a positive number, not {getattr(self, name)!r}")
        for name in ("latency_seconds", *COSTS):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")

    def paced(self, chunk_bytes: int) -> Machine:
        """The same with links that are no faster than chunks of this size are mapped and unmapped."""

        def pace(bytes_per_second: float, seconds: float) -> float:
            return min(bytes_per_second, chunk_bytes / seconds) if seconds else bytes_per_second

        return replace(
            self,
            out_bytes_per_second=pace(self.out_bytes_per_second, self.unmap_seconds),
            in_bytes_per_second=pace(self.in_bytes_per_second, self.map_seconds),
        )


@dataclass(frozen=True, eq=False)
class Trace:
    """One iteration: n functions in order, V variables (storages) numbered by first appearance.

    A variable v is live at function i when ``born[v] <= i <= died[v]``. ``born`` is the function during which it was
    allocated (which is also a write by that function), -1 when it exists as the iteration starts (an *entry*
    variable), n when it was allocated after the last function. ``died`` is the last function at which it is live,
    n when it survives the iteration, -1 for an entry variable that is freed before the first function. ``previous``
    of an entry variable is the number that the same storage had in the previous iteration, if that iteration ran the
    same sequence; it is -1 when the number is not known.

    Raises:
        TraceError: the arrays contradict each other.
    """

    function_names: tuple[str, ...]
    function_start: NDArray[np.float64]
    function_seconds: NDArray[np.float64]
    variable_bytes: NDArray[np.int64]
    born: NDArray[np.int32]
    died: NDArray[np.int32]
    previous: NDArray[np.int32]
    use_offsets: NDArray[np.int64]
    use_variables: NDArray[np.int32]
    use_flags: NDArray[np.uint8]
    fingerprint: int = 0  # of the sequence, 64 bits
    dormant_bytes: int = 0  # bytes that exist, but that no function of the iteration uses
    chunk_bytes: int = 0  # of the recording allocator; 0 when not known
    slab_chunks_peak: int = 0  # chunks of that size that held small allocations, which never move
    machine: Machine | None = field(default=None)
    places: tuple[str, ...] = ()  # in the user's program, where variables were allocated
    variable_place: NDArray[np.int32] | None = None  # int32[V]: index into `places`, or -1; None if no place is known
    # Of parts (ranged.py): the recorded variable that each is a part of, and the part's first chunk in it; else None.
    part_of: NDArray[np.int32] | None = None  # int32[V], ascending
    part_first_chunk: NDArray[np.int32] | None = None  # int32[V], ascending within a recorded variable

    def __post_init__(self) -> None:
        object.__setattr__(self, "function_names", tuple(self.function_names))
        object.__setattr__(self, "places", tuple(self.places))
        for name, dtype in {**ARRAYS, **dict.fromkeys(OPTIONAL, np.int32)}.items():
            if getattr(self, name) is not None:
                array: NDArray[Any] = np.array(getattr(self, name), dtype=dtype, order="C")
                array.flags.writeable = False
                object.__setattr__(self, name, array)
        _check(self)

    @property
    def functions(self) -> int:
        """Number of functions, n."""
        return len(self.function_names)

    @property
    def variables(self) -> int:
        """Number of variables, V."""
        return len(self.variable_bytes)

    @property
    def live_bytes(self) -> NDArray[np.int64]:
        """int64[n]: bytes that would be live at each function if nothing were swapped, without dormant ones."""
        return live_profile(self.born, self.died, self.variable_bytes, self.functions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return all(np.array_equal(value, getattr(other, name)) for name, value in vars(self).items())

    def place(self, variable: int) -> str:
        """Where in the user's program a variable was allocated; empty where that was not recorded."""
        at = -1 if self.variable_place is None else int(self.variable_place[variable])
        return self.places[at] if at >= 0 else ""

    def recorded(self, variable: int) -> int:
        """The number that the recorder gave to a variable, or to the one that it is a part of."""
        return variable if self.part_of is None else int(self.part_of[variable])

    def parts_of(self, recorded: int) -> range:
        """The variables into which a recorded variable is cut, in the order of its bytes; itself if it is not cut."""
        if self.part_of is None:
            return range(recorded, recorded + (0 <= recorded < self.variables))
        low, high = np.searchsorted(self.part_of, [recorded, recorded + 1])
        return range(int(low), int(high))

    def chunk_range(self, variable: int) -> tuple[int, int]:
        """The first chunk of the recorded variable that belongs to this one, and how many do. Needs `chunk_bytes`."""
        first = 0 if self.part_first_chunk is None else int(self.part_first_chunk[variable])
        return first, -(-int(self.variable_bytes[variable]) // self.chunk_bytes)

    def label(self, variable: int) -> str:
        """What people call a variable: ``variable 12``, or ``variable 12, chunks 64..127``."""
        name = f"variable {self.recorded(variable)}"
        if len(self.parts_of(self.recorded(variable))) == 1 and self.chunk_range(variable)[0] == 0:
            return name
        first, count = self.chunk_range(variable)
        return f"{name}, chunks {first}..{first + count - 1}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to `path`, whole or not at all."""
        write_whole(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """The file's content; the same trace gives the same bytes."""
        return trace_file.write(vars(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace from `path`.

        Raises:
            TraceError: the file is no trace, is damaged or truncated, or was written by a newer version.
            OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            return cls.from_bytes(file.read(trace_file.LARGEST_FILE + 1), os.fspath(path))

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "trace") -> Trace:
        """Read a trace from its file's content; `name` is what the errors call it."""
        try:
            fields = trace_file.read(content)
            machine = fields.pop("machine")
            return cls(machine=None if machine is None else Machine(**machine), **fields)
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{name}: damaged header ({error!r:.200})") from None

    def describe(self) -> str:
        """A text dump for people: one line per function, then one per variable. The same trace gives the same text."""
        live = self.live_bytes
        lines = [
            f"trace {self.fingerprint:016x}: {self.functions} functions, {self.variables} variables, "
            f"live peak {max(live, default=0)} bytes, dormant {self.dormant_bytes} bytes"
        ]
        for i, name in enumerate(self.function_names):
            rows = range(self.use_offsets[i], self.use_offsets[i + 1])
            uses = " ".join(f"{self.use_variables[row]}{'?rwm'[self.use_flags[row]]}" for row in rows)
            lines.append(f"f{i} {name} {self.function_seconds[i]:.9f}s live={live[i]} uses: {uses}")
        for v in range(self.variables):
            before = f" previous={self.previous[v]}" if self.previous[v] >= 0 else ""
            before += f" at {self.place(v)}" if self.place(v) else ""
            part = f" ({self.label(v)})" if self.part_of is not None else ""
            lines.append(f"v{v}{part} {self.variable_bytes[v]} bytes born={self.born[v]} died={self.died[v]}{before}")
        return "\n".join(lines) + "\n"


def live_profile(
    born: NDArray[np.int32], died: NDArray[np.int32], sizes: NDArray[np.int64], functions: int
) -> NDArray[np.int64]:
    """int64[functions]: the sum of `sizes` over the variables live at each function."""
    steps = np.zeros(functions + 2, np.int64)
    seen = (born < functions) & (died >= 0)
    np.add.at(steps, np.maximum(born[seen], 0), sizes[seen])
    np.subtract.at(steps, np.minimum(died[seen], functions) + 1, sizes[seen])
    return np.cumsum(steps)[:functions]


def _require(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise TraceError(message)


def _check(trace: Trace) -> None:
    for name, length in lengths(trace.functions, trace.variables, len(trace.use_variables)).items():
        array = getattr(trace, name)
        if array is not None and array.shape != (length,):
            raise TraceError(f"{name} has {array.size} entries where {length} are needed")
    start, seconds = trace.function_start, trace.function_seconds
    _require(np.isfinite(start).all() and np.isfinite(seconds).all(), "a time is not finite")
    _require((seconds >= 0).all(), "a function takes negative time")
    longest = max(seconds.max(initial=0), np.abs(start).max(initial=0))
    _require(longest <= LARGEST_SECONDS, "a time is longer than thirty years")
    least = min(trace.variable_bytes.min(initial=0), trace.dormant_bytes, trace.chunk_bytes, trace.slab_chunks_peak)
    _require(least >= 0, "a size is negative")
    sizes = float(trace.variable_bytes.sum(dtype=np.float64))
    most = max(sizes, trace.dormant_bytes, trace.slab_chunks_peak * trace.chunk_bytes)
    _require(most <= LARGEST_BYTES, "the sizes add up to more than any machine has")
    _require(0 <= trace.fingerprint < 1 << 64, "the fingerprint does not fit in 64 bits")
    _check_lives(trace)
    _check_uses(trace)
    if trace.variable_place is None:
        _require(not trace.places, "there are places, but no variable_place says whose")
    else:
        inside = (trace.variable_place >= -1) & (trace.variable_place < len(trace.places))
        _require(inside.all(), "a variable's place is none of the places")
    _require((trace.part_of is None) == (trace.part_first_chunk is None), f"{' and '.join(PARTS)} belong together")
    if trace.part_of is not None and trace.part_first_chunk is not None:
        _check_parts(trace, trace.part_of, trace.part_first_chunk)


def _check_parts(trace: Trace, owner: NDArray[np.int32], start: NDArray[np.int32]) -> None:
    """Check that parts of a variable lie one behind the other, die together, and continue parts of one variable."""
    chunk = trace.chunk_bytes
    _require(chunk > 0, "parts need the size of a chunk")
    ascend = (owner >= 0).all() and (start >= 0).all() and (np.diff(owner) >= 0).all()
    _require(ascend, "part_of must ascend, and neither it nor part_first_chunk be negative")
    ends = start * float(chunk) + trace.variable_bytes
    _require((ends <= LARGEST_BYTES).all(), "a variable that parts belong to is larger than any machine has")
    same = np.flatnonzero(np.diff(owner) == 0)  # parts that another part of the same variable follows
    begin = start.astype(np.int64) * chunk
    apart = begin[same] + trace.variable_bytes[same] <= begin[same + 1]
    _require(apart.all(), "two parts of a variable overlap")
    _require((trace.died[same] == trace.died[same + 1]).all(), "parts of a variable must die together")
    known = np.flatnonzero(trace.previous >= 0)
    before = trace.previous[known]
    _require((start[known] == start[before]).all(), "a part's previous must begin at the same chunk")
    pairs = np.unique(np.stack([owner[known], owner[before]]), axis=1)
    single = all(len(np.unique(row)) == len(row) for row in pairs)
    _require(single, "parts of a variable must have been parts of one variable in the iteration before")


def _check_lives(trace: Trace) -> None:
    n, born, died = trace.functions, trace.born, trace.died
    ordered = (born >= -1) & (born <= died) & (died <= n)
    _require(ordered.all(), f"a variable's born and died must be ordered and within -1 to {n}")
    known = np.flatnonzero(trace.previous != -1)
    before = trace.previous[known]
    exists = (before >= 0) & (before < trace.variables)
    _require(exists.all(), "a variable's previous is no variable")
    leads = (born[known] == -1).all() and (died[before] == n).all()
    _require(leads, "previous must lead from an entry variable to one that survives")
    _require(len(np.unique(before)) == len(before), "two variables have the same previous")


def _check_uses(trace: Trace) -> None:
    offsets, variables, flags = trace.use_offsets, trace.use_variables, trace.use_flags
    rises = offsets[0] == 0 and offsets[-1] == len(variables) and (np.diff(offsets) >= 0).all()
    _require(rises, "use_offsets must rise from 0 to the number of uses")
    exists = (variables >= 0) & (variables < trace.variables)
    _require(exists.all(), "a use names a variable that does not exist")
    _require(((flags >= READ) & (flags <= READ | WRITE)).all(), "a use is neither a read nor a write")
    functions = np.repeat(np.arange(trace.functions), np.diff(offsets))
    wrong = np.flatnonzero((functions < trace.born[variables]) | (functions > trace.died[variables]))
    if len(wrong):
        row = int(wrong[0])
        raise TraceError(f"function {functions[row]} uses variable {variables[row]}, which is not live then")
