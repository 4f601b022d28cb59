"""The native probe (`csrc/probe.h`) as a Python class: how long a device's operations take."""

from __future__ import annotations

from functools import cache
from typing import Any

from ooc_alloc.library import as_dict, check, declarations, error_of, library_path, load_library, open_library, text_of

_probe = declarations("csrc/probe.h")


@cache
def _load() -> Any:
    """The probe's functions. Raises OocError as `load_library` does, which checks the library first."""
    load_library()
    return open_library(_probe, str(library_path()))


class Probe:
    """Measures a device through the driver table. Every measurement is a median of `repeats` runs, in seconds.

    Opening and measuring raise OocError with the driver's message.
    """

    def __init__(self, driver_library: str, device_ordinal: int = 0) -> None:
        self._library = _load()
        self._handle = self._library.ooc_probe_open(driver_library.encode(), device_ordinal)
        if not self._handle:
            raise error_of(load_library().ooc_last_status())

    def describe(self) -> dict[str, int | str]:
        """The device: name, total_bytes, free_bytes, granularity_bytes, copy_engines, driver_version."""
        device = _probe.new("ooc_probe_device *")
        check(self._library.ooc_probe_describe(self._handle, device))
        return {**as_dict(device), "name": text_of(device.name)}

    def memory(self, chunk_bytes: int, chunks: int, repeats: int) -> dict[str, float]:
        """create, map, release: per chunk; set_access, unmap: per range of `chunks` chunks (keys end in _seconds)."""
        cost = _probe.new("ooc_probe_memory *")
        check(self._library.ooc_probe_measure_memory(self._handle, chunk_bytes, chunks, repeats, cost))
        return as_dict(cost)

    def copy(self, size_bytes: int, repeats: int) -> dict[str, float]:
        """Seconds of a copy: `out_seconds`, `in_seconds` alone; `both_*_seconds` while the other direction copies."""
        cost = _probe.new("ooc_probe_copy *")
        check(self._library.ooc_probe_measure_copy(self._handle, size_bytes, repeats, cost))
        return as_dict(cost)

    def pinning(self, size_bytes: int, repeats: int) -> dict[str, float]:
        """register, unregister: of `size_bytes` bytes of host memory (keys end in _seconds)."""
        cost = _probe.new("ooc_probe_pinning *")
        check(self._library.ooc_probe_measure_pinning(self._handle, size_bytes, repeats, cost))
        return as_dict(cost)

    def close(self) -> None:
        if self._handle:
            self._library.ooc_probe_close(self._handle)
            self._handle = None
