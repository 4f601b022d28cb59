"""Probe: measures a device through the driver table and makes the machine profile of it.

The measurements themselves are native (`ooc_alloc/csrc/probe.h`). This module says which sizes are measured, how often.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from ooc_alloc import OocError, library_path
from ooc_alloc.probe import Probe
from swapd.devices.profile import CopyCost, MemoryCost, Profile
from swapd.link import Link
from swapd.units import KIB, MIB, format_bytes

CUDA_LIBRARY = "libcuda.so.1"
_TINY_BYTES = 8  # its copy is all latency
_SLOW_COPY_SECONDS = 0.5  # after a slower copy, larger sizes are left out

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Effort:
    """What is measured: sizes in bytes, and the number of repeats that a median is taken of."""

    chunk_counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    copy_bytes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    pin_bytes: int = 64 * MIB
    memory_repeats: int = 15
    copy_repeats: int = 7


QUICK = Effort((1, 4, 16), (MIB, 16 * MIB), 8 * MIB, 5, 3)


def open_device(alloc: str = "auto", ordinal: int = 0) -> tuple[Probe, bool]:
    """Opens the device that `alloc` means, and returns it and whether it is emulated.

    `alloc` is a value of ``OOC_ALLOC``; "auto" means a GPU if there is one, else the emulated device.

    Raises:
        OocError: there is no such device, or the native libraries are missing; the message has the driver's words.
    """
    if alloc in ("auto", "cuda"):
        try:
            return Probe(CUDA_LIBRARY, ordinal), False
        except OocError:
            if alloc == "cuda":
                raise
    return Probe(str(library_path("libooc_emulated_cuda.so"))), True


def measure(
    device: Probe,
    *,
    chunk_bytes: int = 2 * MIB,
    link: Link | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure a device.

    Args:
        chunk_bytes: size of the chunks in the table of memory calls, rounded up to the device's granularity.
        link: the speed that an emulated device's copies are held to.
        progress: called as (what comes next, steps done, steps in all).

    Raises:
        OocError: a driver call failed, or there is no memory for the smallest sizes.
    """
    effort = effort or Effort()
    facts = device.describe()
    free, granularity = int(facts["free_bytes"]), int(facts["granularity_bytes"])
    chunk = -(-chunk_bytes // granularity) * granularity
    counts = [count for count in effort.chunk_counts if count == 1 or count * chunk <= free // 2]
    sizes = [size for size in effort.copy_bytes if size <= free // 4] or [granularity]
    total = len(counts) + len(sizes) + 2
    steps = itertools.count()

    def tell(text: str) -> None:
        if progress is not None:
            progress(text, next(steps), total)

    memory = []
    for count in counts:
        tell(f"memory calls, {count} chunks of {format_bytes(chunk)}")
        memory.append(MemoryCost(chunk, count, **device.memory(chunk, count, effort.memory_repeats)))
    tell("latency")
    tiny = device.copy(_TINY_BYTES, effort.memory_repeats)
    copies: list[CopyCost] = []
    for size in sizes:
        if not copies or copies[-1].both_out_seconds + copies[-1].both_in_seconds < _SLOW_COPY_SECONDS:
            tell(f"copies of {format_bytes(size)}")
            copies.append(CopyCost(size, **device.copy(size, effort.copy_repeats)))
    tell("pinning")
    pinning = device.pinning(effort.pin_bytes, effort.copy_repeats)
    tell("done")
    return Profile(
        device=str(facts["name"]),
        measured=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        driver_version=int(facts["driver_version"]),
        total_bytes=int(facts["total_bytes"]),
        granularity_bytes=granularity,
        copy_engines=int(facts["copy_engines"]),
        link="" if link is None else str(link),
        out_latency_seconds=tiny["out_seconds"],
        in_latency_seconds=tiny["in_seconds"],
        pin_seconds_per_mib=pinning["register_seconds"] * MIB / effort.pin_bytes,
        unpin_seconds_per_mib=pinning["unregister_seconds"] * MIB / effort.pin_bytes,
        memory=tuple(memory),
        copies=tuple(copies),
    )
