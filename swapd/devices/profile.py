"""Machine: what was measured of a device and its link, kept in a file that the planner reads.

    $XDG_CACHE_HOME/ooc_alloc/machine-<device>.json        (by default under ~/.cache)

`swapd probe` writes it. An emulated device that is held to a bandwidth has a file of its own for each setting. A file
that is damaged is renamed to ``*.damaged`` and counts as absent; one of another version counts as absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swapd.files import write_whole
from swapd.link import Link
from swapd.trace.trace import Machine
from swapd.units import MIB

FORMAT = "ooc-machine"
VERSION = 1
T = TypeVar("T")
_PIECE_BYTES = 4 * MIB  # which the executor maps, and unmaps, at a time


class MachineError(ValueError):
    """A profile's content is damaged or of another version."""


class OtherVersion(MachineError):
    """A profile is of another version of its format."""


@dataclass(frozen=True)
class MemoryCost:
    """Virtual-memory calls on a range of `chunks` chunks of `chunk_bytes`. Medians, in seconds."""

    chunk_bytes: int
    chunks: int
    create_seconds: float  # per chunk
    map_seconds: float  # per chunk
    release_seconds: float  # per chunk
    set_access_seconds: float  # per range
    unmap_seconds: float  # per range


@dataclass(frozen=True)
class CopyCost:
    """A copy of `bytes` between pinned host memory and the device. Medians, in seconds."""

    bytes: int
    out_seconds: float  # device to host, alone
    in_seconds: float  # host to device, alone
    both_out_seconds: float  # device to host, while the other direction runs too
    both_in_seconds: float


@dataclass(frozen=True)
class Profile:
    """One probe of one device."""

    device: str
    measured: str  # when, ISO 8601, UTC
    driver_version: int  # 1000 * major + 10 * minor
    total_bytes: int
    granularity_bytes: int
    copy_engines: int
    link: str  # what an emulated device was held to; empty otherwise
    out_latency_seconds: float  # of a copy of a few bytes
    in_latency_seconds: float
    pin_seconds_per_mib: float
    unpin_seconds_per_mib: float
    memory: tuple[MemoryCost, ...]
    copies: tuple[CopyCost, ...]  # by rising size

    def machine(self) -> Machine:
        """Link speeds for planning: those of the largest copy, in both directions at once, without the latency.

        Chunks take as long to map and to unmap as they did by the piece.
        """
        largest = self.copies[-1]
        memory = min(self.memory, key=lambda row: abs(row.chunks * row.chunk_bytes - _PIECE_BYTES), default=None)
        mapping = 0.0 if memory is None else memory.map_seconds + memory.set_access_seconds / memory.chunks
        latency = min(self.out_latency_seconds, self.in_latency_seconds)

        def speed(seconds: float, start: float) -> float:
            return largest.bytes / (seconds - start if seconds > 2 * start else seconds)

        return Machine(
            out_bytes_per_second=speed(largest.both_out_seconds, self.out_latency_seconds),
            in_bytes_per_second=speed(largest.both_in_seconds, self.in_latency_seconds),
            latency_seconds=latency,
            map_seconds=mapping,
            unmap_seconds=0.0 if memory is None else memory.unmap_seconds / memory.chunks,
        )

    def to_json(self) -> str:
        """The content of the profile's file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote. Raises MachineError."""
        fields = fields_of(text, FORMAT, VERSION)
        try:
            fields["memory"] = tuple(checked(MemoryCost, row) for row in fields["memory"])
            fields["copies"] = tuple(checked(CopyCost, row) for row in fields["copies"])
            profile: Profile = checked(cls, fields)
            if not profile.copies:
                raise ValueError("no copies")
            profile.machine()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MachineError(f"damaged ({error!r})") from None
        return profile


def fields_of(text: str, file_format: str, version: int) -> dict[str, Any]:
    """What a kept profile's JSON has beside its format and version. Raises MachineError."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise MachineError(f"not JSON, or truncated ({error})") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != file_format:
        raise MachineError(f"not a profile of the format {file_format}")
    found = fields.pop("version", None)
    if found != version:
        raise OtherVersion(f"version {found!r} of the format, this release reads {version}")
    return fields


def checked(kind: Any, fields: dict[str, Any]) -> Any:
    """An object of a dataclass. Raises ValueError if a text or a number is none, TypeError if fields are missing."""
    row = kind(**fields)
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.type == "str":
            valid = isinstance(value, str)
        elif field.type == "bool":
            valid = isinstance(value, bool)
        elif field.type in ("int", "float"):
            valid = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
        else:
            continue
        if not valid:
            raise ValueError(f"{field.name} is {value!r}")
    return row


def cache_directory() -> Path:
    """The folder of the profiles: ``$XDG_CACHE_HOME/ooc_alloc``."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "ooc_alloc"


def profile_path(device: str, link: str = "") -> Path:
    """Where the profile of a device is, or would be."""
    parts = [re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") for text in (device, link)]
    return cache_directory() / f"machine-{'-'.join(part for part in parts if part)}.json"


def load_profile(device: str, link: str = "") -> Profile | None:
    """The kept profile of a device, or None. `link` is the speed that an emulated device is held to, as `str(Link)`."""
    return load_kept(profile_path(device, link), Profile.from_json, "Run `swapd probe` again")


def load_kept(path: Path, read: Callable[[str], T], remedy: str) -> T | None:
    """What `read` makes of a file, or None. One that it finds damaged (MachineError) is set aside with a warning."""
    try:
        return read(path.read_text(encoding="utf-8"))
    except (OSError, OtherVersion):
        return None
    except (MachineError, UnicodeDecodeError) as error:
        aside = path.with_suffix(".damaged")
        with contextlib.suppress(OSError):
            os.replace(path, aside)
        warnings.warn(f"{path}: {error}; it was set aside as {aside.name}. {remedy}", stacklevel=3)
        return None


def save_profile(profile: Profile) -> Path:
    """Keep a profile, whole or not at all, and return its path. Raises OSError."""
    path = profile_path(profile.device, profile.link)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, profile.to_json().encode())
    return path


def known_machine(device: str, link: Link | None = None) -> Machine | None:
    """Link speeds of a device without measuring: those of its profile, else those it is held to; None if neither.

    `link` is the emulated device's setting (``OOC_EMULATED_BANDWIDTH``); an infinite speed in it counts as none.
    """
    profile = load_profile(device, "" if link is None else str(link))
    if profile is not None:
        return profile.machine()
    if link is None or math.isinf(link.d2h_bytes_per_second) or math.isinf(link.h2d_bytes_per_second):
        return None
    return Machine(
        out_bytes_per_second=link.d2h_bytes_per_second,
        in_bytes_per_second=link.h2d_bytes_per_second,
        latency_seconds=min(link.d2h_latency_seconds, link.h2d_latency_seconds),
    )
