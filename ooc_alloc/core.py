"""The native core (`csrc/ooc_alloc.h`) as a Python class.

All sizes are bytes, all times seconds. Every call gives up the GIL while it is in the library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from ooc_alloc.iterations import IterationCalls
from ooc_alloc.library import (
    BYTES,
    NUMBER,
    READ,
    WRITE,
    OocError,
    OutOfMemory,
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
_STATS = ffi.typeof("ooc_stats *")

_LAYOUT = numpy_type(_STATS.item)
_NAMES = _LAYOUT.names or ()
STATISTICS: tuple[str, ...] = _NAMES[2:]  # after version and struct_bytes
# NumPy and `struct` call a type by the same letter. To unpack all numbers at once is faster than to ask for each.
_unpack_stats = Struct("".join(_LAYOUT[name].char for name in _NAMES)).unpack
# (address, READ | WRITE): the variable there; (address, READ | WRITE, bytes): only that range of it.
Operand = tuple[int, int] | tuple[int, int, int]


def _operand_array(operands: Iterable[Operand]) -> Any:
    return ffi.new(_OPERANDS, [{"address": o[0], "access": o[1], "bytes": o[2] if len(o) > 2 else 0} for o in operands])


class Core(TimelineCalls, IterationCalls):
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

    def _number(self, call: Any, *arguments: int) -> int:
        """What a call of the library writes to its last argument. Raises what its status says."""
        number = ffi.new(NUMBER)
        check(call(self._core, *arguments, number))
        return int(number[0])

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
        if stream is None:
            return self._number(self._library.ooc_core_pin, address, access)
        return self._number(self._library.ooc_core_pin_on, address, access, stream)

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
        return self._number(self._library.ooc_core_sleep)

    def wake(self) -> int:
        """Brings back what was on the device when it fell asleep, what is used next first. Returns the bytes copied."""
        return self._number(self._library.ooc_core_wake)

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
