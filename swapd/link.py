"""The link between device and host that the emulated device, and a simulation, hold their copies to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swapd.units import KIB, UnitError, exact_bytes, parse_bandwidth, parse_duration

_SLOWEST = KIB  # bytes per second; the emulated driver treats a lower speed as a typing mistake


@dataclass(frozen=True)
class Link:
    """The speed that the emulated device's copies are held to. Infinite speed and no latency are as fast as memcpy."""

    h2d_bytes_per_second: float = math.inf
    d2h_bytes_per_second: float = math.inf
    h2d_latency_seconds: float = 0.0
    d2h_latency_seconds: float = 0.0

    def __str__(self) -> str:
        def rate(value: float) -> str:
            text = exact_bytes(round(value)) if math.isfinite(value) else ""
            return "unlimited" if not text else f"{text}B/s" if text.isdecimal() else f"{text}/s"

        parts = [f"h2d={rate(self.h2d_bytes_per_second)}", f"d2h={rate(self.d2h_bytes_per_second)}"]
        for name, seconds in (("h2d", self.h2d_latency_seconds), ("d2h", self.d2h_latency_seconds)):
            if seconds:
                parts.append(f"{name}_latency={seconds * 1e9:.0f}ns")
        return ",".join(parts)


def parse_link(value: str | float | Link) -> Link:
    """Speed of the emulated link: ``10GiB/s``, or a list such as ``h2d=8GiB/s,d2h=6GiB/s,latency=20us``."""
    if isinstance(value, Link):
        return value
    if not isinstance(value, str):
        return Link(*[_rate(value)] * 2)
    fields: dict[str, float] = {}
    for part in value.split(","):
        key, equals, text = (piece.strip() for piece in part.rpartition("="))
        is_latency = key == "latency" or key.endswith("_latency")
        direction = key.removesuffix("latency").rstrip("_") if is_latency else key
        if direction not in ("", "h2d", "d2h") or (equals and not key):
            raise UnitError(value, f"has the unknown key {key!r}", "10GiB/s, or h2d=8GiB/s,d2h=6GiB/s,latency=20us")
        number = parse_duration(text) if is_latency else _rate(text)
        for name in (direction,) if direction else ("h2d", "d2h"):
            fields[f"{name}_latency_seconds" if is_latency else f"{name}_bytes_per_second"] = number
    return Link(**fields)


def _rate(value: str | float) -> float:
    rate = parse_bandwidth(value)
    if rate < _SLOWEST:
        raise UnitError(value, "is slower than 1KiB/s", "10GiB/s")
    return rate
