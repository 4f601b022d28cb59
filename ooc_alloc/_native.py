"""The only file that speaks ctypes: `libooc_alloc.so` (see `csrc/ooc_alloc.h`) as a Python class.

All sizes are bytes, all times seconds. Calls that wait (swap-ins, evictions) give up the GIL.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.resources
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc_alloc.timeline import TimelineCalls

READ = 1
WRITE = 2
ABI_VERSION = 6


class OocError(RuntimeError):
    """A call of the native core failed; the message says what to do."""


class OutOfMemory(OocError, MemoryError):
    """The pinned set of one function does not fit the budget, or host memory, for swapped data or books, is used up."""


class DriverFailure(OocError):
    """A driver call failed although it was retried. Data are safe in one of the two memories."""


class StrictViolation(OocError):
    """Strict mode found a function that wrote a variable it had declared as read only."""


_ERRORS: dict[int, type[OocError]] = {
    1: OutOfMemory,
    2: DriverFailure,
    3: StrictViolation,
    4: OocError,
    6: OutOfMemory,
}


def set_built_in(owner: type, name: str, value: Any) -> None:
    """Sets an attribute of a class that is written in C, which `setattr` refuses to."""
    (members,) = gc.get_referents(vars(owner))
    members[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


class _Config(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint32),
        ("device_ordinal", ctypes.c_int32),
        ("driver_library", ctypes.c_char_p),
        ("budget_bytes", ctypes.c_uint64),
        ("host_budget_bytes", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint64),
        ("small_limit_bytes", ctypes.c_uint64),
        ("small_alignment", ctypes.c_uint64),
        ("address_space_bytes", ctypes.c_uint64),
        ("copy_piece_bytes", ctypes.c_uint64),
        ("strict", ctypes.c_int32),
        ("run_daemon", ctypes.c_int32),
        ("asynchronous", ctypes.c_int32),
        ("wait_limit_seconds", ctypes.c_double),
    ]


class _Operand(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_void_p),
        ("access", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("bytes", ctypes.c_uint64),
    ]


# (address, READ | WRITE): the variable there; (address, READ | WRITE, bytes): only that range of it.
Operand = tuple[int, int] | tuple[int, int, int]


def _operand_array(operands: Iterable[Operand]) -> ctypes.Array[_Operand]:
    given = list(operands)
    return (_Operand * len(given))(*[_Operand(o[0], o[1], 0, o[2] if len(o) > 2 else 0) for o in given])


_COUNTERS = """
    chunk_bytes budget_bytes host_budget_bytes device_total_bytes live_bytes live_peak_bytes region_live_bytes
    small_live_bytes device_bytes device_peak_bytes free_bytes cached_bytes slab_bytes slab_used_bytes resident_bytes
    pinned_bytes host_bytes host_used_bytes host_peak_bytes min_budget_bytes waste_at_live_peak_bytes swap_out_bytes
    swap_in_bytes swap_out_count swap_in_count demand_swap_in_count demand_swap_in_bytes demand_swap_out_bytes
    clean_drop_count clean_drop_bytes cancelled_swap_out_count write_back_bytes divergence_count plan_switch_count
    plan_count planned_iteration_count functions iterations allocations frees cache_hits driver_failure_count
    driver_calls_map driver_calls_unmap driver_calls_set_access driver_calls_create external_pin_count
    event_create_count chunks_resident chunks_leaving chunks_arriving chunks_cached chunks_free chunks_slab
    chunks_slab_empty chunks_lost waste_bytes host_unpinned_bytes driver_failures_mem_create driver_failures_mem_map
    driver_failures_mem_set_access driver_failures_mem_unmap driver_failures_copy_out driver_failures_copy_in
    driver_failures_host_register driver_failures_event_create driver_failures_event_record
    driver_failures_event_synchronize driver_failures_stream_synchronize driver_failures_stream_wait_event
    host_backed_function_count
""".split()
_TIMES = "stall_seconds stall_swap_in_seconds stall_room_seconds copy_out_seconds copy_in_seconds".split()


class _Stats(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("struct_bytes", ctypes.c_uint32),
        *[(name, ctypes.c_uint64) for name in _COUNTERS],
        *[(name, ctypes.c_double) for name in _TIMES],
    ]


class _Iteration(ctypes.Structure):
    _fields_ = [
        ("fingerprint", ctypes.c_uint64),
        ("functions", ctypes.c_uint32),
        ("variables", ctypes.c_uint32),
        ("uses", ctypes.c_uint32),
        ("planned", ctypes.c_uint32),
        ("followed_plan", ctypes.c_uint32),
        ("contains_first", ctypes.c_uint32),
        ("seen_count", ctypes.c_uint64),
        ("live_peak_bytes", ctypes.c_uint64),
        ("slab_peak_bytes", ctypes.c_uint64),
        ("swapped_bytes", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("stall_seconds", ctypes.c_double),
    ]


_TRACE_FIELDS: list[tuple[str, Any]] = [
    ("function_name", np.uint32),
    ("function_start", np.float64),
    ("function_seconds", np.float64),
    ("variable_bytes", np.uint64),
    ("variable_born", np.int32),
    ("variable_died", np.int32),
    ("variable_previous", np.int32),
    ("use_function", np.uint32),
    ("use_variable", np.uint32),
    ("use_access", np.uint32),
    ("use_first_chunk", np.uint32),
    ("use_chunk_count", np.uint32),
]


class _TraceArrays(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name, _ in _TRACE_FIELDS]


_OUT_FIELDS = ("variable", "first_chunk", "chunk_count", "after_function")
_IN_FIELDS = (*_OUT_FIELDS, "after_outs", "before_function")


class _Plan(ctypes.Structure):
    _fields_ = [
        ("fingerprint", ctypes.c_uint64),
        ("outs", ctypes.c_uint32),
        ("ins", ctypes.c_uint32),
        ("write_backs", ctypes.c_uint32),
        *[(f"out_{name}", ctypes.c_void_p) for name in _OUT_FIELDS],
        *[(f"in_{name}", ctypes.c_void_p) for name in _IN_FIELDS],
        *[(f"back_{name}", ctypes.c_void_p) for name in _OUT_FIELDS],
    ]


@dataclass(frozen=True)
class Iteration:
    """What a boundary ended; see `ooc_iteration` in `ooc_alloc.h`."""

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


def library_path(name: str = "libooc_alloc.so") -> Path:
    """Path of one of the package's native libraries.

    Raises OocError if it is not there: the package was neither installed nor built in place.
    """
    folder = os.environ.get("_OOC_LIBRARIES")  # those of another build, such as one with sanitizers
    path = Path(folder or str(importlib.resources.files("ooc_alloc").joinpath("lib"))) / name
    if not path.exists():
        raise OocError(f"{name} is missing from {path.parent}: install the package, or `make native` in the checkout")
    return path


_HANDLE = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ooc_last_error": (ctypes.c_char_p, []),
    "ooc_last_status": (ctypes.c_int, []),
    "ooc_abi_version": (ctypes.c_uint32, []),
    "ooc_device_memory": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)],
    ),
    "ooc_core_create": (_HANDLE, [ctypes.POINTER(_Config)]),
    "ooc_core_destroy": (None, [_HANDLE]),
    "ooc_core_stop_daemon": (None, [_HANDLE]),
    "ooc_core_device_name": (ctypes.c_char_p, [_HANDLE]),
    "ooc_core_address_range": (
        None,
        [_HANDLE, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
    ),
    "ooc_core_malloc": (ctypes.c_void_p, [_HANDLE, ctypes.c_uint64]),
    "ooc_core_malloc_absent": (ctypes.c_void_p, [_HANDLE, ctypes.c_uint64]),
    "ooc_core_malloc_pinned": (
        ctypes.c_void_p,
        [_HANDLE, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint64)],
    ),
    "ooc_core_free": (None, [_HANDLE, ctypes.c_void_p]),
    "ooc_core_free_on": (None, [_HANDLE, ctypes.c_void_p, ctypes.c_void_p]),
    "ooc_core_function_id": (ctypes.c_uint32, [_HANDLE, ctypes.c_char_p]),
    "ooc_core_function_name": (ctypes.c_char_p, [_HANDLE, ctypes.c_uint32]),
    "ooc_core_function_begin": (ctypes.c_int, [_HANDLE, ctypes.c_uint32, ctypes.POINTER(_Operand), ctypes.c_uint32]),
    "ooc_core_function_begin_on": (
        ctypes.c_int,
        [_HANDLE, ctypes.c_uint32, ctypes.POINTER(_Operand), ctypes.c_uint32, ctypes.c_void_p],
    ),
    "ooc_core_function_begin_host": (
        ctypes.c_int,
        [_HANDLE, ctypes.c_uint32, ctypes.POINTER(_Operand), ctypes.c_uint32],
    ),
    "ooc_core_set_measuring": (None, [_HANDLE, ctypes.c_int]),
    "ooc_core_function_end": (ctypes.c_int, [_HANDLE, ctypes.c_int]),
    "ooc_core_in_function": (ctypes.c_int, [_HANDLE]),
    "ooc_core_pin": (ctypes.c_int, [_HANDLE, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint64)]),
    "ooc_core_unpin": (ctypes.c_int, [_HANDLE, ctypes.c_uint64, ctypes.c_uint32]),
    "ooc_core_detach": (ctypes.c_int, [_HANDLE]),
    "ooc_core_evict_all": (ctypes.c_int, [_HANDLE]),
    "ooc_core_settle": (None, [_HANDLE]),
    "ooc_core_residency": (ctypes.c_uint32, [_HANDLE, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]),
    "ooc_core_release_cached": (None, [_HANDLE]),
    "ooc_core_set_budget": (ctypes.c_int, [_HANDLE, ctypes.c_uint64]),
    "ooc_core_synchronize": (ctypes.c_int, [_HANDLE]),
    "ooc_core_boundary": (ctypes.c_int, [_HANDLE, ctypes.POINTER(_Iteration)]),
    "ooc_core_trace_copy": (ctypes.c_int, [_HANDLE, ctypes.c_uint64, ctypes.POINTER(_TraceArrays)]),
    "ooc_core_install_plan": (ctypes.c_int, [_HANDLE, ctypes.POINTER(_Plan)]),
    "ooc_core_forget_plans": (None, [_HANDLE]),
    "ooc_core_read_stats": (None, [_HANDLE, ctypes.POINTER(_Stats)]),
    "ooc_core_audit": (ctypes.c_int, [_HANDLE]),
    "ooc_core_timeline_start": (ctypes.c_int, [_HANDLE, ctypes.c_uint64]),
    "ooc_core_timeline_stop": (None, [_HANDLE]),
    "ooc_core_timeline_read": (
        ctypes.c_uint32,
        [_HANDLE, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p],
    ),
    "ooc_core_ranges_load": (ctypes.c_int, [_HANDLE, ctypes.c_char_p]),
    "ooc_core_place_id": (ctypes.c_uint32, [_HANDLE, ctypes.c_char_p]),
    "ooc_core_place_text": (ctypes.c_char_p, [_HANDLE, ctypes.c_uint32]),
    "ooc_core_set_place": (None, [_HANDLE, ctypes.c_void_p, ctypes.c_uint32]),
    "ooc_core_trace_places": (ctypes.c_int, [_HANDLE, ctypes.c_uint64, ctypes.c_void_p]),
    "ooc_core_regions": (ctypes.c_uint32, [_HANDLE, ctypes.c_void_p, ctypes.c_uint32]),
    "ooc_set_default_core": (None, [_HANDLE]),
}

_library: Any = None


def load_library() -> Any:
    """The library with its signatures declared; loaded once."""
    global _library
    if _library is None:
        library = ctypes.CDLL(str(library_path()))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if library.ooc_abi_version() != ABI_VERSION:
            raise OocError("libooc_alloc.so and the Python package have different versions: build them together")
        _library = library
    return _library


def device_memory(driver_library: str, ordinal: int = 0) -> tuple[int, int]:
    """Bytes of a device, in all and free now. Raises OocError if the driver or the device cannot be had."""
    total, free = ctypes.c_uint64(), ctypes.c_uint64()
    library = load_library()
    status = library.ooc_device_memory(driver_library.encode(), ordinal, ctypes.byref(total), ctypes.byref(free))
    if status != 0:
        raise OocError(library.ooc_last_error().decode(errors="replace"))
    return total.value, free.value


def refused_settings(emulated_driver_library: str) -> str:
    """Why the emulated device did not take its settings, a moment ago in this thread; empty if that was not it."""
    said = ctypes.CDLL(emulated_driver_library).ooc_emulated_error
    said.restype = ctypes.c_char_p
    text: bytes = said()
    return text.decode(errors="replace")


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
        wait_limit_seconds: float = 0.0,
    ) -> None:
        self._library = load_library()
        config = _Config(
            struct_bytes=ctypes.sizeof(_Config),
            device_ordinal=device_ordinal,
            driver_library=driver_library.encode(),
            budget_bytes=budget_bytes,
            host_budget_bytes=host_budget_bytes,
            chunk_bytes=chunk_bytes,
            small_limit_bytes=small_limit_bytes,
            small_alignment=small_alignment,
            address_space_bytes=address_space_bytes,
            copy_piece_bytes=copy_piece_bytes,
            strict=int(strict),
            run_daemon=int(run_daemon),
            asynchronous=int(asynchronous),
            wait_limit_seconds=wait_limit_seconds,
        )
        handle = self._library.ooc_core_create(ctypes.byref(config))
        if not handle:
            raise OocError(self._last_error())
        self.handle: int = handle

    def _last_error(self) -> str:
        text: bytes = self._library.ooc_last_error()
        return text.decode(errors="replace")

    def _refusal(self) -> OocError:
        """Why an allocation gave no address."""
        return _ERRORS.get(self._library.ooc_last_status(), OutOfMemory)(self._last_error())

    def _check(self, status: int) -> None:
        if status != 0:
            raise _ERRORS.get(status, OocError)(self._last_error())

    @property
    def device_name(self) -> str:
        name: bytes = self._library.ooc_core_device_name(self.handle)
        return name.decode(errors="replace")

    def address_range(self) -> tuple[int, int]:
        """First address and bytes of the range that holds every allocation."""
        base, size = ctypes.c_size_t(), ctypes.c_size_t()
        self._library.ooc_core_address_range(self.handle, ctypes.byref(base), ctypes.byref(size))
        return base.value, size.value

    def malloc(self, size_bytes: int) -> int:
        """Address of fresh device memory. Raises OutOfMemory."""
        address = self._library.ooc_core_malloc(self.handle, size_bytes)
        if not address:
            raise self._refusal()
        return int(address)

    def malloc_absent(self, size_bytes: int) -> int:
        """Address of a variable of which nothing is on the device, larger than the budget if need be.

        For functions that use it in ranges. Contents are not specified until they are written. Raises OutOfMemory.
        """
        address = self._library.ooc_core_malloc_absent(self.handle, size_bytes)
        if not address:
            raise self._refusal()
        return int(address)

    def malloc_pinned(self, size_bytes: int, stream: int = 0, access: int = READ | WRITE) -> tuple[int, int]:
        """Address of fresh device memory that stays there, for users who announce no functions, and the pin's token.

        Args:
            stream: a CUstream on which it may be used at once (0: the default one).
            access: what :meth:`unpin` has to be given with the token.

        Raises:
            OutOfMemory: with what is pinned already it does not fit the budget.
        """
        token = ctypes.c_uint64()
        address = self._library.ooc_core_malloc_pinned(self.handle, size_bytes, stream, access, ctypes.byref(token))
        if not address:
            raise self._refusal()
        return int(address), token.value

    def free(self, address: int) -> None:
        self._library.ooc_core_free(self.handle, address)

    def free_on(self, address: int, stream: int) -> None:
        """Frees when what is enqueued on a stream (a CUstream) is done."""
        self._library.ooc_core_free_on(self.handle, address, stream)

    def set_default(self) -> None:
        """Makes this the core behind `ooc_malloc` and `ooc_free` (`csrc/ooc_alloc.h`), until it is closed."""
        self._library.ooc_set_default_core(self.handle)

    def function_id(self, name: str) -> int:
        return int(self._library.ooc_core_function_id(self.handle, name.encode()))

    def function_name(self, identifier: int) -> str:
        name: bytes = self._library.ooc_core_function_name(self.handle, identifier)
        return name.decode()

    def function_begin(self, identifier: int, operands: Iterable[Operand], stream: int | None = None) -> None:
        """Brings the operands onto the device and pins them until `function_end`.

        An operand is (address, READ | WRITE): the whole variable that the address lies in; or
        (address, READ | WRITE, bytes): only the chunks of it that this range of addresses touches.

        `stream` is the CUstream that the function's work is enqueued on (0: the default one); None where it runs on the
        host. It counts where the core was made `asynchronous`.
        """
        array = _operand_array(operands)
        if stream is None:
            status = self._library.ooc_core_function_begin(self.handle, identifier, array, len(array))
        else:
            status = self._library.ooc_core_function_begin_on(self.handle, identifier, array, len(array), stream)
        self._check(status)

    def function_begin_host(self, identifier: int, operands: Iterable[Operand]) -> None:
        """As `function_begin`, for a function that fits no budget: what is not on the device is used in host memory.

        Raises OocError where the driver cannot map host memory in place of device memory.
        """
        array = _operand_array(operands)
        self._check(self._library.ooc_core_function_begin_host(self.handle, identifier, array, len(array)))

    def set_measuring(self, on: bool) -> None:
        """Whether a function that only reads and does not fit is run to its end in host memory to learn what it needs.

        At first it is, where kernels can use host memory. Without, the allocation that does not fit fails at once.
        """
        self._library.ooc_core_set_measuring(self.handle, int(on))

    def function_end(self, keep_allocations: bool = False) -> None:
        self._check(self._library.ooc_core_function_end(self.handle, int(keep_allocations)))

    def in_function(self) -> bool:
        return bool(self._library.ooc_core_in_function(self.handle))

    def pin(self, address: int, access: int = READ) -> int:
        """Keeps the variable at an address on the device. Returns a token for `unpin`."""
        token = ctypes.c_uint64()
        self._check(self._library.ooc_core_pin(self.handle, address, access, ctypes.byref(token)))
        return token.value

    def unpin(self, token: int, access: int = READ) -> None:
        """Ends a pin, with the access it was made with. Nothing happens if the variable was freed."""
        self._check(self._library.ooc_core_unpin(self.handle, token, access))

    def detach(self) -> None:
        """Turns everything into plain host memory and stops using the device (emulated device only)."""
        self._check(self._library.ooc_core_detach(self.handle))

    def evict_all(self) -> None:
        self._check(self._library.ooc_core_evict_all(self.handle))

    def settle(self) -> None:
        """Waits until the swap threads have done all that the plan under way lets them do now."""
        self._library.ooc_core_settle(self.handle)

    def residency(self, address: int, chunks: int) -> npt.NDArray[np.bool_]:
        """bool[chunks]: which of the first chunks of the variable at an address are on the device, none under way.

        Raises OocError for an address that is no variable of one chunk or more.
        """
        found = np.zeros(chunks, np.uint8)
        if self._library.ooc_core_residency(self.handle, address, found.ctypes.data, chunks) == 0:
            raise OocError("no variable of one chunk or more lies at this address")
        return found.astype(bool)

    def release_cached(self) -> None:
        self._library.ooc_core_release_cached(self.handle)

    def set_budget(self, size_bytes: int) -> None:
        """Lowers the budget, or raises it again up to the first one; what is beyond it has left the device afterwards.

        Raises OutOfMemory if what is in use does not fit it; then nothing has changed.
        """
        self._check(self._library.ooc_core_set_budget(self.handle, size_bytes))

    def synchronize(self) -> None:
        """Waits for everything that is enqueued on the device."""
        self._check(self._library.ooc_core_synchronize(self.handle))

    def boundary(self) -> Iteration:
        """Ends the iteration; the calling thread's functions are recorded from now on."""
        ended = _Iteration()
        self._check(self._library.ooc_core_boundary(self.handle, ctypes.byref(ended)))
        values = {name: getattr(ended, name) for name, *_ in _Iteration._fields_}
        for flag in ("planned", "followed_plan", "contains_first"):
            values[flag] = bool(values[flag])
        return Iteration(**values)

    def trace_arrays(self, iteration: Iteration) -> TraceArrays:
        """The recorded sequence of an iteration that `boundary` returned. Raises OocError if it is no longer kept."""
        lengths = {"function": iteration.functions, "variable": iteration.variables, "use": iteration.uses}
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(lengths[name.split("_")[0]], dtype=dtype) for name, dtype in _TRACE_FIELDS
        }
        pointers = _TraceArrays(**{name: array.ctypes.data for name, array in arrays.items()})
        self._check(self._library.ooc_core_trace_copy(self.handle, iteration.fingerprint, ctypes.byref(pointers)))
        return TraceArrays(**arrays)

    def install_plan(
        self,
        fingerprint: int,
        outs: Sequence[npt.NDArray[np.int32]],
        ins: Sequence[npt.NDArray[np.int32]],
        write_backs: Sequence[npt.NDArray[np.int32]] = (),
    ) -> None:
        """Installs a plan for the iterations with a fingerprint.

        Args:
            outs: variable, first chunk, chunk count, after function; equally long.
            ins: the same four, then the number of outs to wait for, and the function that needs the variable.
            write_backs: as `outs`.
        """
        write_backs = write_backs or [np.zeros(0, np.int32)] * len(_OUT_FIELDS)
        kept, counts = [], {}
        pointers: dict[str, int] = {}
        for kind, prefix, fields, given in (
            ("outs", "out", _OUT_FIELDS, outs),
            ("ins", "in", _IN_FIELDS, ins),
            ("write_backs", "back", _OUT_FIELDS, write_backs),
        ):
            columns = [np.ascontiguousarray(column, dtype=np.int32) for column in given]
            if len(columns) != len(fields) or len({len(column) for column in columns}) != 1:
                raise ValueError(f"{kind} are {len(fields)} columns of one length: {', '.join(fields)}")
            counts[kind] = len(columns[0])
            pointers |= {f"{prefix}_{name}": column.ctypes.data for name, column in zip(fields, columns)}
            kept.append(columns)  # until the call has copied them
        plan = _Plan(fingerprint=fingerprint, **counts, **pointers)
        self._check(self._library.ooc_core_install_plan(self.handle, ctypes.byref(plan)))

    def forget_plans(self) -> None:
        self._library.ooc_core_forget_plans(self.handle)

    def stats(self) -> dict[str, int | float]:
        """A snapshot of `ooc_stats` by field name."""
        stats = _Stats()
        self._library.ooc_core_read_stats(self.handle, ctypes.byref(stats))
        return {name: getattr(stats, name) for name in (*_COUNTERS, *_TIMES)}

    def audit(self) -> None:
        """Recounts everything by a second route. Raises OocError with the differences."""
        self._check(self._library.ooc_core_audit(self.handle))

    def stop_daemon(self) -> None:
        self._library.ooc_core_stop_daemon(self.handle)

    def close(self) -> None:
        """Frees the device. Memory still allocated from it becomes invalid."""
        if self.handle:
            self._library.ooc_core_destroy(self.handle)
            self.handle = 0


# The probe: see `csrc/probe.h`.


class _ProbeDevice(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("total_bytes", ctypes.c_uint64),
        ("free_bytes", ctypes.c_uint64),
        ("granularity_bytes", ctypes.c_uint64),
        ("copy_engines", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
    ]


class _Seconds(ctypes.Structure):
    """Base of the structures that hold nothing but doubles."""

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name, *_ in self._fields_}


class _ProbeMemory(_Seconds):
    _fields_ = [(f"{call}_seconds", ctypes.c_double) for call in ("create", "map", "release", "set_access", "unmap")]


class _ProbeCopy(_Seconds):
    _fields_ = [(f"{name}_seconds", ctypes.c_double) for name in ("out", "in", "both_out", "both_in")]


class _ProbePinning(_Seconds):
    _fields_ = [(f"{name}_seconds", ctypes.c_double) for name in ("register", "unregister")]


_PROBE_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ooc_probe_open": (_HANDLE, [ctypes.c_char_p, ctypes.c_int32]),
    "ooc_probe_close": (None, [_HANDLE]),
    "ooc_probe_describe": (ctypes.c_int, [_HANDLE, ctypes.POINTER(_ProbeDevice)]),
    "ooc_probe_measure_memory": (
        ctypes.c_int,
        [_HANDLE, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(_ProbeMemory)],
    ),
    "ooc_probe_measure_copy": (
        ctypes.c_int,
        [_HANDLE, ctypes.c_uint64, ctypes.c_uint32, ctypes.POINTER(_ProbeCopy)],
    ),
    "ooc_probe_measure_pinning": (
        ctypes.c_int,
        [_HANDLE, ctypes.c_uint64, ctypes.c_uint32, ctypes.POINTER(_ProbePinning)],
    ),
}


class Probe:
    """Measures a device through the driver table. Every method gives medians of `repeats` runs, in seconds.

    Raises OocError, on opening and on every measurement, with the driver's words.
    """

    def __init__(self, driver_library: str, device_ordinal: int = 0) -> None:
        self._library = load_library()
        for name, (result, arguments) in _PROBE_SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._handle = self._library.ooc_probe_open(driver_library.encode(), device_ordinal)
        if not self._handle:
            raise OocError(self._library.ooc_last_error().decode(errors="replace"))

    def _measure(self, call: str, cost: _Seconds, *arguments: int) -> dict[str, float]:
        status = getattr(self._library, call)(self._handle, *arguments, ctypes.byref(cost))
        if status != 0:
            raise _ERRORS.get(status, OocError)(self._library.ooc_last_error().decode(errors="replace"))
        return cost.as_dict()

    def describe(self) -> dict[str, int | str]:
        """The device: name, total_bytes, free_bytes, granularity_bytes, copy_engines, driver_version."""
        device = _ProbeDevice()
        if self._library.ooc_probe_describe(self._handle, ctypes.byref(device)) != 0:
            raise OocError(self._library.ooc_last_error().decode(errors="replace"))
        values = {name: getattr(device, name) for name, *_ in _ProbeDevice._fields_}
        return {**values, "name": device.name.decode(errors="replace")}

    def memory(self, chunk_bytes: int, chunks: int, repeats: int) -> dict[str, float]:
        """create, map, release: per chunk; set_access, unmap: per range of `chunks` chunks (keys end in _seconds)."""
        return self._measure("ooc_probe_measure_memory", _ProbeMemory(), chunk_bytes, chunks, repeats)

    def copy(self, size_bytes: int, repeats: int) -> dict[str, float]:
        """out, in: one direction alone; both_out, both_in: while the other runs too (keys end in _seconds)."""
        return self._measure("ooc_probe_measure_copy", _ProbeCopy(), size_bytes, repeats)

    def pinning(self, size_bytes: int, repeats: int) -> dict[str, float]:
        """register, unregister: of `size_bytes` bytes of host memory (keys end in _seconds)."""
        return self._measure("ooc_probe_measure_pinning", _ProbePinning(), size_bytes, repeats)

    def close(self) -> None:
        if self._handle:
            self._library.ooc_probe_close(self._handle)
            self._handle = None
