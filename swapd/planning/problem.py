"""Problem: what a policy has to solve. It is a trace in chunks, a capacity in chunks, and the speed of the link.

Vocabulary of this file: a *use* of a variable is a function that reads, writes or allocates it; while a function
runs, everything that it uses is *pinned*. The iteration repeats: a variable that survives it (``died == n``) comes
back as the entry variable ``successor`` of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from swapd.trace.trace import WRITE, Machine, Trace, live_profile

MIB = 1 << 20
DEFAULT_CHUNK_BYTES = 2 * MIB
MOST_CHUNKS = 1 << 28  # of all variables: half a pebibyte in chunks of 2 MiB. Several masks have a bit for each


@dataclass(eq=False)
class InfeasibleError(ValueError):
    """One function needs more than the budget, or small tensors more than half of it. Only a larger budget can help."""

    function: int
    function_name: str
    need_bytes: int
    budget_bytes: int
    min_budget_bytes: int  # 0 if not known

    @property
    def only_slabs_need_more(self) -> bool:
        """Whether every function fits beside the small tensors, but these get at most half of the budget."""
        return self.need_bytes <= self.budget_bytes < self.min_budget_bytes

    def __str__(self) -> str:
        needs = f"function {self.function} ({self.function_name}) needs {self.need_bytes} bytes at once"
        if self.only_slabs_need_more:
            needs = f"small tensors need {self.min_budget_bytes // 2} bytes and get at most half"
        return (
            f"{needs}, the budget is {self.budget_bytes} bytes; the smallest budget that works is "
            f"{self.min_budget_bytes} bytes"
        )


@dataclass(eq=False)
class PolicyInfeasibleError(InfeasibleError):
    """A policy finds no plan within the budget, although every function fits by itself; another policy may."""

    policy: str

    def __str__(self) -> str:
        would_do = f"; it works from {self.min_budget_bytes} bytes on" if self.min_budget_bytes else ""
        return (
            f"policy {self.policy} finds no plan: function {self.function} ({self.function_name}) would run beside "
            f"{self.need_bytes} bytes in all, the budget is {self.budget_bytes} bytes{would_do}"
        )


@dataclass(frozen=True, eq=False)
class UseTable:
    """The uses: each (variable, function) pair once, sorted by variable and then by function."""

    variable: NDArray[np.int64]
    function: NDArray[np.int64]
    write: NDArray[np.bool_]
    offsets: NDArray[np.int64]  # [V + 1] the rows of variable v are offsets[v] to offsets[v + 1]


@dataclass(frozen=True, eq=False)
class Problem:
    """One iteration of n functions over V variables, in chunks. Make it with `from_trace`."""

    names: tuple[str, ...]
    seconds: NDArray[np.float64]  # [n] of each function, including the host's time before it
    chunks: NDArray[np.int64]  # [V]
    variable_bytes: NDArray[np.int64]  # [V] for policies whose memory is not in chunks
    born: NDArray[np.int32]  # [V] as in Trace
    died: NDArray[np.int32]  # [V] as in Trace
    previous: NDArray[np.int32]  # [V] as in Trace
    use_offsets: NDArray[np.int64]  # [n + 1] as in Trace
    use_variables: NDArray[np.int32]  # as in Trace
    use_flags: NDArray[np.uint8]  # as in Trace
    capacity_chunks: int  # chunks that variables may hold: the budget's, less the slabs'
    chunk_bytes: int
    slab_chunks: int
    budget_bytes: int
    machine: Machine
    fingerprint: int
    labels: tuple[str, ...] | None = None  # [V] what people call the variables; if None, "variable v"
    moves_whole: bool = False  # what lies below the host moves whole variables, so it gains nothing by parts of them

    @classmethod
    def from_trace(
        cls,
        trace: Trace,
        budget_bytes: int,
        *,
        chunk_bytes: int | None = None,
        slab_chunks_peak: int | None = None,
        machine: Machine | None = None,
    ) -> Problem:
        """The problem of running `trace` within `budget_bytes`.

        An argument that is not given is taken from the trace, or from the defaults if the trace does not have it; its
        slabs keep their bytes in chunks of another size. When functions started does not count: a trace recorded under
        memory pressure has stalls between the end of one and the start of the next.
        """
        chunk = chunk_bytes or trace.chunk_bytes or DEFAULT_CHUNK_BYTES
        slabs = slab_chunks_peak
        if slabs is None:
            slabs = -(-trace.slab_chunks_peak * (trace.chunk_bytes or chunk) // chunk)
        if budget_bytes < 0 or chunk <= 0 or slabs < 0:
            raise ValueError("the budget, the chunk and the slabs must not be negative, nor the chunk zero")
        count = float(np.ceil(trace.variable_bytes / chunk).sum())
        if count > MOST_CHUNKS or slabs > MOST_CHUNKS:
            raise ValueError(
                f"the trace's variables are {max(count, slabs):.0f} chunks of {chunk} bytes, and {MOST_CHUNKS} can be "
                f"planned; choose larger chunks"
            )
        problem = cls(
            names=trace.function_names,
            seconds=trace.function_seconds.copy(),
            chunks=-(-trace.variable_bytes // chunk),
            variable_bytes=trace.variable_bytes,
            born=trace.born,
            died=trace.died,
            previous=trace.previous,
            use_offsets=trace.use_offsets,
            use_variables=trace.use_variables,
            use_flags=trace.use_flags,
            capacity_chunks=budget_bytes // chunk - slabs,
            chunk_bytes=chunk,
            slab_chunks=slabs,
            budget_bytes=int(budget_bytes),
            machine=machine or trace.machine or Machine(),
            fingerprint=trace.fingerprint,
            labels=None if trace.part_of is None else tuple(trace.label(v) for v in range(trace.variables)),
        )
        for array in (problem.seconds, problem.chunks):
            array.flags.writeable = False
        return problem

    @cached_property
    def link(self) -> Machine:
        """The machine with links as fast as chunks can follow each other, which is what policies go by."""
        return self.machine.paced(self.chunk_bytes)

    @property
    def functions(self) -> int:
        """Number of functions, n."""
        return len(self.names)

    @property
    def variables(self) -> int:
        """Number of variables, V."""
        return len(self.chunks)

    def label(self, variable: int) -> str:
        """What people call a variable, such as ``variable 12`` or ``variable 12, chunks 64..127``."""
        return f"variable {variable}" if self.labels is None else self.labels[variable]

    @cached_property
    def successor(self) -> NDArray[np.int32]:
        """int32[V]: the entry variable that each variable becomes in the next iteration; -1 if there is none."""
        result = np.full(self.variables, -1, np.int32)
        known = np.flatnonzero(self.previous >= 0)
        result[self.previous[known]] = known
        return result

    @cached_property
    def uses(self) -> UseTable:
        """All uses. An allocation counts as a write by the function in which it happens."""
        n, count = self.functions, self.variables
        inside = np.flatnonzero((self.born >= 0) & (self.born < n))
        functions = np.concatenate([np.repeat(np.arange(n), np.diff(self.use_offsets)), self.born[inside]])
        variables = np.concatenate([self.use_variables, inside]).astype(np.int64)
        writes = np.concatenate([(self.use_flags & WRITE) != 0, np.ones(len(inside), bool)])
        keys, index = np.unique(variables * max(n, 1) + functions, return_inverse=True)
        write = np.zeros(len(keys), bool)
        np.logical_or.at(write, index, writes)
        variable = keys // max(n, 1)
        return UseTable(variable, keys % max(n, 1), write, np.searchsorted(variable, np.arange(count + 1)))

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        """float64[V]: bytes, in chunks. Memory is taken in whole chunks; of a last one only its bytes are copied."""
        result: NDArray[np.float64] = self.variable_bytes / self.chunk_bytes
        return result

    @cached_property
    def last_eighths(self) -> NDArray[np.int64]:
        """int64[V]: how full the last chunk of each variable is, in eighths and rounded up; 8 if there is none."""
        used = self.variable_bytes - (self.chunks - 1) * self.chunk_bytes
        result: NDArray[np.int64] = np.where(self.chunks > 0, -(-8 * used // self.chunk_bytes), 8)
        return result

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """int64[n]: chunks that would be live at each function if nothing were swapped, without dormant variables."""
        sizes = np.where(self.dormant, 0, self.chunks)
        return live_profile(self.born, self.died, sizes, self.functions)

    @cached_property
    def dormant(self) -> NDArray[np.bool_]:
        """bool[V]: variables that no iteration uses. They leave once and take no room from then on."""
        unused: NDArray[np.bool_] = np.diff(self.uses.offsets) == 0
        own: NDArray[np.bool_] = self.previous == np.arange(self.variables)
        return unused & own

    @cached_property
    def pinned(self) -> NDArray[np.int64]:
        """int64[n]: chunks that each function pins."""
        result = np.zeros(self.functions, np.int64)
        np.add.at(result, self.uses.function, self.chunks[self.uses.variable])
        return result

    @property
    def live_peak_chunks(self) -> int:
        """Chunks live at the worst function, beside those of slabs."""
        return int(self.live.max(initial=0))

    @property
    def live_peak_function(self) -> int:
        """The first function at which the most chunks are live. It ends the forward phase of `bound`."""
        return int(self.live.argmax()) if self.functions else 0

    @property
    def fits(self) -> bool:
        """Whether nothing needs to move."""
        return max(self.live_peak_chunks, self.slab_chunks) <= self.capacity_chunks

    @property
    def compute_seconds(self) -> float:
        """The time of one iteration when everything fits."""
        return float(self.seconds.sum())

    @property
    def fit_budget_bytes(self) -> int:
        """What is needed in-core: the smallest budget in which nothing needs to move, slabs included."""
        return (max(self.live_peak_chunks, self.slab_chunks) + self.slab_chunks) * self.chunk_bytes

    @property
    def min_budget_bytes(self) -> int:
        """The smallest budget in which every function can run, and slabs, which get half at most, hold what they do."""
        return (max(int(self.pinned.max(initial=0)), self.slab_chunks) + self.slab_chunks) * self.chunk_bytes

    def require_feasible(self) -> None:
        """Raise InfeasibleError when a function alone exceeds the budget, or small tensors do half of it."""
        if self.min_budget_bytes > (self.capacity_chunks + self.slab_chunks) * self.chunk_bytes:
            function = int(self.pinned.argmax())
            need = (int(self.pinned[function]) + self.slab_chunks) * self.chunk_bytes
            raise InfeasibleError(function, self.names[function], need, self.budget_bytes, self.min_budget_bytes)

    def within_slabs(self) -> Problem:
        """The same for a run whose small tensors have more than half of the budget already, as it was lowered."""
        return replace(self, slab_chunks=max(0, min(self.slab_chunks, self.capacity_chunks)))
