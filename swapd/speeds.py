"""Speeds and costs as a process's own transfers and calls have shown them, and as expected until they have."""

from __future__ import annotations

from collections.abc import Mapping

from swapd.tiers.three_tiers import DISK_LATENCY_SECONDS, LowerTiers
from swapd.trace.trace import Machine

_FALLBACK_BYTES_PER_SECOND = 8e9  # of a link that was never measured
LINK_UNKNOWN = Machine(_FALLBACK_BYTES_PER_SECOND, _FALLBACK_BYTES_PER_SECOND)
DISK_UNKNOWN = Machine(1e9, 1e9, DISK_LATENCY_SECONDS)
_ENOUGH_BYTES = 16 << 20  # moved one way before the speed counts: less would be the speed of a few small copies
_ENOUGH_DISK_BYTES = 64 << 20
_MOST_LATENCY = 0.5  # of the time of copies, whatever latency is expected: as in a profile
_ENOUGH_CHUNKS = 8  # mapped or unmapped before the time of each counts

Stats = Mapping[str, int | float]  # as of `Core.stats`


def link(stats: Stats, expected: Machine, *, asynchronous: bool = False) -> Machine:
    """The link between the device and the level below it. Its speeds are without the latency, which plans count too."""

    def speed(way: str, known: float) -> float:
        busy = stats[f"copy_{way}_seconds"]
        busy -= min(stats[f"swap_{way}_count"] * expected.latency_seconds, _MOST_LATENCY * busy)
        return _speed(stats[f"swap_{way}_bytes"], busy, _ENOUGH_BYTES, known)

    def cost(call: str, chunks: float, known: float) -> float:
        return stats[f"{call}_seconds"] / chunks if chunks >= _ENOUGH_CHUNKS else known

    mapping = cost("map", stats["driver_calls_map"], expected.map_seconds)
    unmapping = cost("unmap", stats["unmapped_bytes"] / stats["chunk_bytes"], expected.unmap_seconds)
    if asynchronous:  # a chunk is unmapped when its address is wanted again, ahead of the next map
        mapping, unmapping = mapping + unmapping, 0.0
    out_speed, in_speed = speed("out", expected.out_bytes_per_second), speed("in", expected.in_bytes_per_second)
    return Machine(out_speed, in_speed, expected.latency_seconds, mapping, unmapping)


def lower_tiers(stats: Stats, expected: Machine) -> LowerTiers:
    """What lies under the device where host memory has a disk below it, which is expected to be so fast."""

    def speed(way: str, bytes_key: str, known: float) -> float:
        return _speed(stats[bytes_key], stats[f"disk_{way}_seconds"], _ENOUGH_DISK_BYTES, known)

    out_speed = speed("write", "disk_written_bytes", expected.out_bytes_per_second)
    in_speed = speed("read", "disk_read_bytes", expected.in_bytes_per_second)
    return LowerTiers(int(stats["host_budget_bytes"]), Machine(out_speed, in_speed, expected.latency_seconds))


def _speed(moved: float, busy: float, enough: int, known: float) -> float:
    return moved / busy if moved >= enough and busy > 0 else known
