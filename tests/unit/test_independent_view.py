"""The emulated driver's page tables against the core's books; `tests/gpu` has the same on a GPU, by cuda-python."""

from __future__ import annotations

import ctypes

import pytest
from mapped_view import check, make_core

from ooc_alloc import Core, library_path

CHUNK = 64 << 10


def test_the_driver_and_the_core_agree_on_what_is_mapped() -> None:
    driver = str(library_path("libooc_emulated_cuda.so"))
    library = ctypes.CDLL(driver)
    library.ooc_emulated_access.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    core = make_core(driver, CHUNK)
    try:
        check(core, CHUNK, lambda address: library.ooc_emulated_access(address, CHUNK) == 3)
    finally:
        core.close()


def test_a_disagreement_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: with books that count one chunk too few, or a driver that maps nothing."""
    driver = str(library_path("libooc_emulated_cuda.so"))
    core = make_core(driver, CHUNK)
    with pytest.raises(AssertionError):
        check(core, CHUNK, lambda address: False)
    core.close()
    core = make_core(driver, CHUNK)
    library = ctypes.CDLL(driver)
    library.ooc_emulated_access.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    honest = Core.stats

    def one_too_few(self: Core) -> dict[str, int | float]:
        stats = honest(self)
        return {**stats, "resident_bytes": max(0, stats["resident_bytes"] - CHUNK)}

    monkeypatch.setattr(Core, "stats", one_too_few)
    with pytest.raises(AssertionError):
        check(core, CHUNK, lambda address: library.ooc_emulated_access(address, CHUNK) == 3)
    core.close()
