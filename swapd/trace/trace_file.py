"""Trace file: a ZIP archive (stored or deflated) with one JSON member and one NumPy member per array::

    header.json             {"format": "swapd-trace", "version": 1 or 2, "functions": n, "variables": V, "uses": m,
                             "fingerprint": "16 hex digits", "dormant_bytes": int, "chunk_bytes": int,
                             "slab_chunks_peak": int, "machine": null | {"out_bytes_per_second": float,
                             "in_bytes_per_second": float, "latency_seconds": float}, "function_names": [str] * n,
                             optional, of the machine: "map_seconds": float, "unmap_seconds": float}
    function_start.npy      float64[n]    seconds since the iteration began, waiting for memory included
    function_seconds.npy    float64[n]    seconds until the next one began, without waiting for memory
    variable_bytes.npy      int64[V]
    born.npy  died.npy      int32[V]      see Trace
    previous.npy            int32[V]
    use_offsets.npy         int64[n + 1]  the uses of function i are rows use_offsets[i] to use_offsets[i + 1]
    use_variables.npy       int32[m]
    use_flags.npy           uint8[m]      1 read, 2 write, 3 both
    places.json             [str] * p     optional, both or none: places in the user's program, and the one where each
    variable_place.npy      int32[V]      variable was allocated; -1 if not known
    part_of.npy             int32[V]      version 2 only: the recorded variable that each one is a part of, and the
    part_first_chunk.npy    int32[V]      first of its chunks that belongs to the part. Version 1 has no parts

Nothing in it is executable: arrays of Python objects are refused. The same trace gives the same bytes. A reader takes
time and memory in proportion to the file and to limits (below), whatever a file claims: sizes are checked before
anything of that size is made.

``docs/trace-format.md`` explains each field.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapd.trace.json_structure import check_format, parse

ARRAYS: dict[str, type] = {
    "function_start": np.float64,
    "function_seconds": np.float64,
    "variable_bytes": np.int64,
    "born": np.int32,
    "died": np.int32,
    "previous": np.int32,
    "use_offsets": np.int64,
    "use_variables": np.int32,
    "use_flags": np.uint8,
}

PARTS = ("part_of", "part_first_chunk")
OPTIONAL = ("variable_place", *PARTS)  # int32[V] or None
COSTS = ("map_seconds", "unmap_seconds")  # of the machine. Beside it, where older releases do not look; 0 is left out

FORMAT = "swapd-trace"
VERSION = 2  # of traces with parts; a trace without parts is written as version 1, which older releases read too
WITHOUT_PARTS = 1

# Far above what programs do: an iteration of 300,000 functions has about two million uses.
LARGEST_COUNTS = {"functions": 1 << 20, "variables": 1 << 20, "uses": 1 << 23}
LARGEST_FILE = 1 << 28  # bytes
LARGEST_HEADER = 1 << 26  # bytes, of header.json
LARGEST_ARRAY_HEADER = 1 << 13  # bytes, of a .npy member before its numbers
LARGEST_PLACES = 1 << 23  # bytes, of places.json
MOST_MEMBERS = 64  # of the archive; members that the format does not have are ignored


class TraceError(ValueError):
    """A trace is inconsistent, or its file is damaged, truncated or of another version."""


def write(trace: Mapping[str, Any]) -> bytes:
    """The content of the file for a trace's fields."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "header.json", json.dumps(_header(trace), indent=0).encode())
        for name in ARRAYS:
            _add_array(archive, name, trace[name])
        places = json.dumps(list(trace["places"]), indent=0).encode()
        if trace["variable_place"] is not None and len(places) <= LARGEST_PLACES:
            _add(archive, "places.json", places)
            _add_array(archive, "variable_place", trace["variable_place"])
        for name in PARTS:
            if trace[name] is not None:
                _add_array(archive, name, trace[name])
    return buffer.getvalue()


def read(content: bytes) -> dict[str, Any]:
    """The fields of the trace in a file's content; the machine is a dict.

    Raises:
        TraceError: the file is no trace, is damaged or truncated, or of another version.
        KeyError, TypeError, ValueError, OverflowError: its header is damaged.
    """
    with _open(content) as archive:
        header = _read_header(archive)
        names = [*ARRAYS, *(PARTS if header["version"] > WITHOUT_PARTS else ())]
        places: tuple[str, ...] = ()
        if "places.json" in archive.namelist():
            places = _read_places(archive)
            names.append("variable_place")
        length = lengths(*(header[key] for key in LARGEST_COUNTS))
        arrays = {name: _read_array(archive, name, length[name]) for name in names}
    machine = header.get("machine")
    if machine is not None:
        machine = {**machine, **{name: header[name] for name in COSTS if name in header}}
    return {
        "function_names": tuple(header["function_names"]),
        "fingerprint": int(header["fingerprint"], 16),
        **{name: int(header[name]) for name in ("dormant_bytes", "chunk_bytes", "slab_chunks_peak")},
        "machine": machine,
        "places": places,
        **arrays,
    }


def lengths(functions: int, variables: int, uses: int) -> dict[str, int]:
    """Entries of each array of a trace with such counts."""
    return {
        **dict.fromkeys(("function_start", "function_seconds"), functions),
        **dict.fromkeys(("variable_bytes", "born", "died", "previous", *OPTIONAL), variables),
        "use_offsets": functions + 1,
        **dict.fromkeys(("use_variables", "use_flags"), uses),
    }


def _header(trace: Mapping[str, Any]) -> dict[str, Any]:
    machine = {} if trace["machine"] is None else dict(vars(trace["machine"]))
    costs = {name: machine.pop(name, 0.0) for name in COSTS}
    return {
        "format": FORMAT,
        "version": WITHOUT_PARTS if trace["part_of"] is None else VERSION,
        "functions": len(trace["function_names"]),
        "variables": len(trace["variable_bytes"]),
        "uses": len(trace["use_variables"]),
        "fingerprint": f"{trace['fingerprint']:016x}",
        **{name: int(trace[name]) for name in ("dormant_bytes", "chunk_bytes", "slab_chunks_peak")},
        "machine": machine or None,
        "function_names": list(trace["function_names"]),
        **{name: seconds for name, seconds in costs.items() if seconds},
    }


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def _add_array(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    member = io.BytesIO()
    np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
    _add(archive, f"{name}.npy", member.getvalue())


def _open(content: bytes) -> zipfile.ZipFile:
    if len(content) > LARGEST_FILE:
        raise TraceError(f"{len(content)} bytes are too many for a trace; {LARGEST_FILE} is the most")
    if content.count(b"PK\x01\x02") > MOST_MEMBERS:  # each of them becomes an object when the archive is opened
        raise TraceError(f"not a trace (an archive of more than {MOST_MEMBERS} members)")
    try:
        return zipfile.ZipFile(io.BytesIO(content))
    except Exception as error:  # zipfile raises many kinds of error for what is no archive
        raise TraceError(f"not a trace, or truncated ({error!s:.200})") from None


def _member(archive: zipfile.ZipFile, member: str, most: int) -> bytes:
    """The content of a member, which may have at most `most` bytes. The archive's word for its size is not believed."""
    try:
        info = archive.getinfo(member)
    except KeyError:
        raise TraceError(f"{member} is missing") from None
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"{member} is compressed in a way that traces are not")
    try:
        with archive.open(info) as file:
            content = file.read(most + 1)
    except Exception as error:  # zlib, CRC, or any other sign of damage
        raise TraceError(f"{member} is damaged ({error!s:.200})") from None
    if len(content) > most:
        raise TraceError(f"{member} is larger than the {most} bytes that it may have")
    return content


def _read_header(archive: zipfile.ZipFile) -> dict[str, Any]:
    content = _member(archive, "header.json", LARGEST_HEADER)
    try:
        header = parse(content.decode("utf-8"), lists=1, objects=2)
    except ValueError as error:
        raise TraceError(f"header.json is damaged ({error!s:.200})") from None
    try:
        check_format(header, FORMAT, WITHOUT_PARTS, VERSION)
    except ValueError as error:
        raise TraceError(str(error)) from None
    for key, most in LARGEST_COUNTS.items():
        count = header.get(key)
        if type(count) is not int or not 0 <= count <= most:
            raise TraceError(f"the header's count of {key} is {count!r:.40}, not 0 to {most}")
    names = header.get("function_names")
    if not isinstance(names, list) or len(names) != header["functions"]:
        raise TraceError("the header's counts do not match the names of its functions")
    if not all(isinstance(text, str) for text in names):
        raise TraceError("damaged header (a function's name is no text)")
    return dict(header)


def _read_places(archive: zipfile.ZipFile) -> tuple[str, ...]:
    content = _member(archive, "places.json", LARGEST_PLACES)
    try:
        places = parse(content.decode("utf-8"), lists=1, objects=0)
        if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
            raise ValueError("it holds something else")
    except ValueError as error:
        raise TraceError(f"places.json is damaged, or no list of texts ({error!s:.200})") from None
    return tuple(places)


def _read_array(archive: zipfile.ZipFile, name: str, length: int) -> NDArray[Any]:
    """An array, which has to have the type that the format says and the length that the header says."""
    dtype = np.dtype(ARRAYS.get(name, np.int32))
    content = _member(archive, f"{name}.npy", LARGEST_ARRAY_HEADER + length * dtype.itemsize)
    member = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"version {version} of its header")
        shape, _, found = np.lib.format.read_array_header_1_0(member)
    except Exception as error:
        raise TraceError(f"{name}.npy is damaged ({error!s:.200})") from None
    if found.hasobject:
        raise TraceError(f"{name}.npy is damaged (it holds Python objects)")
    if found != dtype:
        raise TraceError(f"{name}.npy holds {found}, not {dtype}")
    if shape != (length,):
        raise TraceError(f"the header's counts do not match the arrays: {name} has the shape {shape}")
    if len(content) - member.tell() != length * dtype.itemsize:
        raise TraceError(f"{name}.npy is damaged (its content has another length than it says)")
    return np.frombuffer(content, found, length, member.tell())
