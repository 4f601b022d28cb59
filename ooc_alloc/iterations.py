"""The iterations' part of `Core`: their boundaries, their traces as arrays, and plans for those to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc_alloc.library import as_dict, check, ffi, numpy_type

_ITERATION = ffi.typeof("ooc_iteration *")
_TRACE = ffi.typeof("ooc_trace_arrays *")
_PLAN = ffi.typeof("ooc_plan *")
_INDEXES = ffi.typeof("int32_t[]")

_TRACE_ARRAYS = {
    name: (numpy_type(field.type.item), ffi.typeof(f"{field.type.item.cname}[]")) for name, field in _TRACE.item.fields
}
# The plan's arrays for each kind of move, by the prefix of their names: variable, first chunk and so on.
_MOVES: dict[str, tuple[str, ...]] = {
    prefix: tuple(name for name, _ in _PLAN.item.fields if name.startswith(f"{prefix}_"))
    for prefix in ("out", "in", "back", "down", "up")
}


@dataclass(frozen=True)
class Iteration:
    """An iteration that a boundary ended; see `ooc_iteration` in `ooc_alloc.h`."""

    fingerprint: int
    functions: int
    variables: int
    uses: int
    planned: bool
    followed_plan: bool
    contains_first: bool
    timed: bool
    seen_count: int
    live_peak_bytes: int
    slab_peak_bytes: int
    swapped_bytes: int
    seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class TraceArrays:
    """A recorded iteration as arrays; lengths and meanings as in `ooc_trace_arrays`."""

    function_name: npt.NDArray[np.uint32]
    function_start: npt.NDArray[np.float64]
    function_seconds: npt.NDArray[np.float64]
    variable_bytes: npt.NDArray[np.uint64]
    variable_born: npt.NDArray[np.int32]
    variable_died: npt.NDArray[np.int32]
    variable_previous: npt.NDArray[np.int32]
    use_function: npt.NDArray[np.uint32]
    use_variable: npt.NDArray[np.uint32]
    use_access: npt.NDArray[np.uint32]
    use_first_chunk: npt.NDArray[np.uint32]
    use_chunk_count: npt.NDArray[np.uint32]


class IterationCalls:
    """Mixed into `Core`; see the part of `ooc_alloc.h` about iterations and plans."""

    _library: Any
    _core: Any

    def boundary(self) -> Iteration:
        """Ends the iteration; the calling thread's functions are recorded from now on."""
        ended = ffi.new(_ITERATION)
        check(self._library.ooc_core_boundary(self._core, ended))
        values = as_dict(ended)
        for flag in ("planned", "followed_plan", "contains_first", "timed"):
            values[flag] = bool(values[flag])
        return Iteration(**values)

    def _answer(self, call: Any, *arguments: Any) -> bool:
        """What a call of the library writes to its last argument. Raises what its status says."""
        answer = ffi.new("int*")
        check(call(self._core, *arguments, answer))
        return bool(answer[0])

    def set_apart(self, on: bool) -> bool:
        """Whether the calling thread's functions are no part of the sequence. Returns what it was."""
        return self._answer(self._library.ooc_core_set_apart, on)

    def take_sequence(self) -> bool:
        """Lets the calling thread's functions make the sequence if no other's do; see `ooc_core_take_sequence`."""
        return self._answer(self._library.ooc_core_take_sequence)

    def watch_repeats(self, found: int = 0, first: int = 0, second: int = 0) -> None:
        """Whom to tell, by the function's address, where the calling thread's functions repeat; 0 for nobody."""
        call = ffi.cast("int(*)(uintptr_t, uintptr_t)", found)
        check(self._library.ooc_core_watch_repeats(self._core, call, first, second))

    def trace_arrays(self, iteration: Iteration) -> TraceArrays:
        """The recorded sequence of an iteration that `boundary` returned. Raises OocError if it is no longer kept."""
        lengths = {"function": iteration.functions, "variable": iteration.variables, "use": iteration.uses}
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(lengths[name.split("_")[0]], dtype) for name, (dtype, _) in _TRACE_ARRAYS.items()
        }
        pointers = {name: ffi.from_buffer(_TRACE_ARRAYS[name][1], array) for name, array in arrays.items()}
        check(self._library.ooc_core_trace_copy(self._core, iteration.fingerprint, ffi.new(_TRACE, pointers)))
        return TraceArrays(**arrays)

    def install_plan(
        self,
        fingerprint: int,
        outs: Sequence[npt.NDArray[np.int32]],
        ins: Sequence[npt.NDArray[np.int32]],
        write_backs: Sequence[npt.NDArray[np.int32]] = (),
        *,
        downs: Sequence[npt.NDArray[np.int32]] = (),
        ups: Sequence[npt.NDArray[np.int32]] = (),
        exclusive: bool = False,
    ) -> None:
        """Installs a plan for the iterations with a fingerprint.

        Args:
            outs: four columns of one length: variable, first chunk, chunk count, after function.
            ins: the same four, then the number of outs to wait for, and the function that needs the variable.
            write_backs: the same columns as `outs`.
            downs: of host copies to the disk below host memory, two columns: variable, after function.
            ups: of host copies from there, the same two.
            exclusive: what came in has no host copy any more.
        """
        plan: dict[str, Any] = {"fingerprint": fingerprint, "exclusive": exclusive}
        for kind, names, given in (
            ("outs", _MOVES["out"], outs),
            ("ins", _MOVES["in"], ins),
            ("write_backs", _MOVES["back"], write_backs),
            ("downs", _MOVES["down"], downs),
            ("ups", _MOVES["up"], ups),
        ):
            given = given or [np.zeros(0, np.int32)] * len(names)
            columns = [np.ascontiguousarray(column, dtype=np.int32) for column in given]
            if len(columns) != len(names) or len({len(column) for column in columns}) != 1:
                raise ValueError(f"{kind} are {len(names)} columns of one length: {', '.join(names)}")
            plan[kind] = len(columns[0])
            plan |= {name: ffi.from_buffer(_INDEXES, column) for name, column in zip(names, columns)}
        check(self._library.ooc_core_install_plan(self._core, ffi.new(_PLAN, plan)))

    def forget_plans(self) -> None:
        self._library.ooc_core_forget_plans(self._core)
