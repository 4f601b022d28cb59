"""The native core (`csrc/ooc_alloc.h`) as a Python class.

All sizes are bytes, all times seconds. Every call gives up the GIL while it is in the library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc_alloc.library import (
    BYTES,
    NUMBER,
    READ,
    WRITE,
    OocError,
    OutOfMemory,
    as_dict,
    check,
    constants,
    error_of,
    ffi,
    load_library,
    numpy_type,
    text_of,
)
from ooc_alloc.timeline import TimelineCalls

_ADDRESS = ffi.typeof("uintptr_t *")
_CONFIG = ffi.typeof("ooc_config *")
_OPERANDS = ffi.typeof("ooc_operand[]")
_ITERATION = ffi.typeof("ooc_iteration *")
_STATS = ffi.typeof("ooc_stats *")
_TRACE = ffi.typeof("ooc_trace_arrays *")
_PLAN = ffi.typeof("ooc_plan *")
_INDEXES = ffi.typeof("int32_t[]")

_LAYOUT = numpy_type(_STATS.item)
_NAMES = _LAYOUT.names or ()
STATISTICS: tuple[str, ...] = _NAMES[2:]  # after version and struct_bytes
# NumPy and `struct` call a type by the same letter. To unpack all numbers at once is faster than to ask for each.
_unpack_stats = Struct("".join(_LAYOUT[name].char for name in _NAMES)).unpack
_TRACE_ARRAYS = {
    name: (numpy_type(field.type.item), ffi.typeof(f"{field.type.item.cname}[]")) for name, field in _TRACE.item.fields
}
# The plan's arrays for each kind of move, by the prefix of their names: variable, first chunk and so on.
_MOVES: dict[str, tuple[str, ...]] = {
    prefix: tuple(name for name, _ in _PLAN.item.fields if name.startswith(f"{prefix}_"))
    for prefix in ("out", "in", "back", "down", "up")
}

# (address, READ | WRITE): the variable there; (address, READ | WRITE, bytes): only that range of it.
Operand = tuple[int, int] | tuple[int, int, int]


def _operand_array(operands: Iterable[Operand]) -> Any:
    return ffi.new(_OPERANDS, [{"address": o[0], "access": o[1], "bytes": o[2] if len(o) > 2 else 0} for o in operands])


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


class Core(TimelineCalls):
    """One device, one budget, one address range; see `ooc_alloc.h` for every call's contract.

    Args:
        driver_library: "libcuda.so.1" or the path of the emulated driver.
        budget_bytes: device bytes to use; 0 means 90% of what is free.
        host_budget_bytes: host bytes for swapped data.
        chunk_bytes: size of a physical chunk, rounded up to the driver's granularity.
        small_limit_bytes: allocations up to this size go to slabs, which stay resident, up to half of the budget.
        strict: evict everything before every function and verify clean copies.
        run_daemon: start the swap threads.
        asynchronous: functions run on streams of the device, and the host does not wait for them.
        safe: there, the host waits for every copy and every function.
        disk_folder: swapped data go to a file there, and not to host memory; "" for none.
        disk_budget_bytes: bytes of that file.
        disk_depth: pieces of 2 MiB that are read at once, and as many that are written.

    Raises:
        OocError: the driver cannot be loaded or initialised, or a number is impossible; the message says which.
    """

    def __init__(
        self,
        driver_library: str,
        *,
        budget_bytes: int = 0,
        host_budget_bytes: int,
        chunk_bytes: int = 2 << 20,
        small_limit_bytes: int = 1 << 20,
        small_alignment: int = 0,
        address_space_bytes: int = 0,
        copy_piece_bytes: int = 0,
        device_ordinal: int = 0,
        strict: bool = False,
        run_daemon: bool = True,
        asynchronous: bool = False,
        safe: bool = False,
        wait_limit_seconds: float = 0.0,
        disk_folder: str = "",
        disk_budget_bytes: int = 0,
        disk_depth: int = 4,
    ) -> None:
        self._library = load_library()
        path = ffi.new("char[]", driver_library.encode())
        folder = ffi.new("char[]", os.fsencode(disk_folder))
        config = {
            "struct_bytes": ffi.sizeof(_CONFIG.item),
            "device_ordinal": device_ordinal,
            "driver_library": path,
            "budget_bytes": budget_bytes,
            "host_budget_bytes": host_budget_bytes,
            "chunk_bytes": chunk_bytes,
            "small_limit_bytes": small_limit_bytes,
            "small_alignment": small_alignment,
            "address_space_bytes": address_space_bytes,
            "copy_piece_bytes": copy_piece_bytes,
            "strict": strict,
            "run_daemon": run_daemon,
            "asynchronous": asynchronous,
            "safe": safe,
            "wait_limit_seconds": wait_limit_seconds,
            "disk_folder": folder,
            "disk_budget_bytes": disk_budget_bytes,
            "disk_depth": disk_depth,
        }
        self._core = self._library.ooc_core_create(ffi.new(_CONFIG, config))
        if not self._core:
            raise error_of(constants.OOC_INVALID)
        self.handle = int(ffi.cast("uintptr_t", self._core))  # for C++; 0 once the core is closed

    def _allocated(self, address: int) -> int:
        """The address of an allocation, or the error that says why there is none."""
        if not address:
            raise error_of(self._library.ooc_last_status(), OutOfMemory)
        return address

    @property
    def device_name(self) -> str:
        return text_of(self._library.ooc_core_device_name(self._core))

    def address_range(self) -> tuple[int, int]:
        """First address and bytes of the range that holds every allocation."""
        base, size = ffi.new(_ADDRESS), ffi.new(_ADDRESS)
        self._library.ooc_core_address_range(self._core, base, size)
        return base[0], size[0]

    def malloc(self, size_bytes: int) -> int:
        """Address of fresh device memory. Raises OutOfMemory."""
        return self._allocated(self._library.ooc_core_malloc(self._core, size_bytes))

    def malloc_absent(self, size_bytes: int) -> int:
        """Allocates a variable of which nothing is on the device yet, and returns its address. Raises OutOfMemory.

        It may be larger than the budget, as functions use it in ranges. What was never written has no defined contents.
        """
        return self._allocated(self._library.ooc_core_malloc_absent(self._core, size_bytes))

    def malloc_pinned(self, size_bytes: int, stream: int = 0, access: int = READ | WRITE) -> tuple[int, int]:
        """Allocates memory that stays on the device, for users who announce no functions. Returns address and token.

        Args:
            stream: a CUstream on which it may be used at once (0: the default one).
            access: what :meth:`unpin` has to be given with the token.

        Raises:
            OutOfMemory: the memory and what is pinned already do not fit the budget.
        """
        token = ffi.new(NUMBER)
        address = self._library.ooc_core_malloc_pinned(self._core, size_bytes, stream, access, token)
        return self._allocated(address), token[0]

    def free(self, address: int) -> None:
        self._library.ooc_core_free(self._core, address)

    def free_on(self, address: int, stream: int) -> None:
        """Frees memory when the work enqueued on a stream (a CUstream) is done."""
        self._library.ooc_core_free_on(self._core, address, stream)

    def record_use(self, address: int, stream: int) -> None:
        """Says that work enqueued so far on a stream (a CUstream), which no function announced, uses the memory."""
        self._library.ooc_core_record_use(self._core, address, stream)

    def set_default(self) -> None:
        """Makes this the core behind `ooc_malloc` and `ooc_free` (`csrc/ooc_alloc.h`), until it is closed."""
        self._library.ooc_set_default_core(self._core)

    def function_id(self, name: str) -> int:
        return int(self._library.ooc_core_function_id(self._core, name.encode()))

    def function_name(self, identifier: int) -> str:
        return text_of(self._library.ooc_core_function_name(self._core, identifier))

    def function_begin(self, identifier: int, operands: Iterable[Operand], stream: int | None = None) -> None:
        """Brings the operands onto the device and pins them until `function_end`.

        An operand is (address, READ | WRITE): the whole variable that the address lies in; or
        (address, READ | WRITE, bytes): only the chunks of it that this range of addresses touches.

        `stream` is the CUstream that the function's work is enqueued on (0: the default one), or None if the function
        runs on the host. It matters only if the core was made `asynchronous`.
        """
        array = _operand_array(operands)
        check(self._library.ooc_core_function_begin_on(self._core, identifier, array, len(array), stream or 0))

    def function_begin_host(self, identifier: int, operands: Iterable[Operand], stream: int | None = None) -> None:
        """As `function_begin`, for a function that fits no budget: what is not on the device is used in host memory.

        Raises OocError where the driver cannot map host memory in place of device memory.
        """
        array = _operand_array(operands)
        check(self._library.ooc_core_function_begin_host(self._core, identifier, array, len(array), stream or 0))

    def set_measuring(self, on: bool) -> None:
        """Sets whether a function that only reads and does not fit runs to its end in host memory, to learn its need.

        It is on at first, if kernels can use host memory. If it is off, the allocation that does not fit fails at once.
        """
        self._library.ooc_core_set_measuring(self._core, on)

    def function_end(self, keep_allocations: bool = False) -> None:
        check(self._library.ooc_core_function_end(self._core, keep_allocations))

    def in_function(self) -> bool:
        return bool(self._library.ooc_core_in_function(self._core))

    def pin(self, address: int, access: int = READ, stream: int | None = None) -> int:
        """Keeps the variable at an address on the device. Returns a token for `unpin`.

        With the handle of a stream, that stream waits for what is still to arrive, and not the host: whoever uses the
        variable does so there, or after it.
        """
        token = ffi.new(NUMBER)
        if stream is None:
            check(self._library.ooc_core_pin(self._core, address, access, token))
        else:
            check(self._library.ooc_core_pin_on(self._core, address, access, stream, token))
        return int(token[0])

    def unpin(self, token: int, access: int = READ) -> None:
        """Ends a pin, with the access it was made with. Nothing happens if the variable was freed."""
        check(self._library.ooc_core_unpin(self._core, token, access))

    def detach(self) -> None:
        """Turns everything into plain host memory and stops using the device (emulated device only)."""
        check(self._library.ooc_core_detach(self._core))

    def evict_all(self) -> None:
        check(self._library.ooc_core_evict_all(self._core))

    def sleep(self) -> int:
        """Sends everything that nobody pins to the host, or the disk, and gives the device's memory back to its driver.

        Whatever begins a function, allocates or pins wakes the device. Returns the bytes that stay, as they are pinned.
        Raises OutOfMemory if the host has no room for all of it; then everything is as it was.
        """
        held = ffi.new(NUMBER)
        check(self._library.ooc_core_sleep(self._core, held))
        return int(held[0])

    def wake(self) -> int:
        """Brings back what was on the device when it fell asleep, what is used next first. Returns the bytes copied."""
        back = ffi.new(NUMBER)
        check(self._library.ooc_core_wake(self._core, back))
        return int(back[0])

    def settle(self) -> None:
        """Waits until the swap threads have done all that the plan under way lets them do now."""
        self._library.ooc_core_settle(self._core)

    def residency(self, address: int, chunks: int) -> npt.NDArray[np.bool_]:
        """bool[chunks]: whether each of the first chunks of a variable is on the device, and no copy of it under way.

        Raises OocError for an address that is no variable of one chunk or more.
        """
        found = np.zeros(chunks, np.uint8)
        if self._library.ooc_core_residency(self._core, address, ffi.from_buffer(BYTES, found), chunks) == 0:
            raise OocError("no variable of one chunk or more lies at this address")
        return found.astype(bool)

    def release_cached(self) -> None:
        self._library.ooc_core_release_cached(self._core)

    def set_budget(self, size_bytes: int) -> None:
        """Lowers the budget, or raises it again up to the first one. It returns when what is beyond it has left.

        Raises OutOfMemory if what is in use does not fit the new budget; then nothing has changed.
        """
        check(self._library.ooc_core_set_budget(self._core, size_bytes))

    def synchronize(self) -> None:
        """Waits for everything that is enqueued on the device."""
        check(self._library.ooc_core_synchronize(self._core))

    def boundary(self) -> Iteration:
        """Ends the iteration; the calling thread's functions are recorded from now on."""
        ended = ffi.new(_ITERATION)
        check(self._library.ooc_core_boundary(self._core, ended))
        values = as_dict(ended)
        for flag in ("planned", "followed_plan", "contains_first"):
            values[flag] = bool(values[flag])
        return Iteration(**values)

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

    def stats(self) -> dict[str, int | float]:
        """A snapshot of `ooc_stats` by field name."""
        stats = ffi.new(_STATS)
        self._library.ooc_core_read_stats(self._core, stats)
        return dict(zip(STATISTICS, _unpack_stats(ffi.buffer(stats))[2:]))

    def audit(self) -> None:
        """Recounts everything by a second route. Raises OocError with the differences."""
        check(self._library.ooc_core_audit(self._core))

    def stop_daemon(self) -> None:
        self._library.ooc_core_stop_daemon(self._core)

    def close(self) -> None:
        """Frees the device. Memory still allocated from it becomes invalid."""
        if self.handle:
            self._library.ooc_core_destroy(self._core)
            self._core, self.handle = ffi.NULL, 0
