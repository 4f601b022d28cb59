"""Trace file: a ZIP archive (stored or deflated) with one JSON member and one NumPy member per array::

    header.json             {"format": "swapd-trace", "version": 1, "functions": n, "variables": V, "uses": m,
                             "fingerprint": "16 hex digits", "dormant_bytes": int, "chunk_bytes": int,
                             "slab_chunks_peak": int, "machine": null | {"out_bytes_per_second": float,
                             "in_bytes_per_second": float, "latency_seconds": float}, "function_names": [str] * n}
    function_start.npy      float64[n]    seconds since the iteration began, time stalled for transfers taken out
    function_seconds.npy    float64[n]    seconds the function itself took
    variable_bytes.npy      int64[V]
    born.npy  died.npy      int32[V]      see Trace
    previous.npy            int32[V]
    use_offsets.npy         int64[n + 1]  the uses of function i are rows use_offsets[i] to use_offsets[i + 1]
    use_variables.npy       int32[m]
    use_flags.npy           uint8[m]      1 read, 2 write, 3 both

Nothing in it is executable: the arrays are read with ``allow_pickle=False``. The same trace gives the same bytes.
``docs/trace-format.md`` explains each field.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapd.trace import ARRAYS, Machine, Trace, TraceError

FORMAT = "swapd-trace"
VERSION = 1


def write(trace: Trace) -> bytes:
    """The content of the trace's file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "header.json", json.dumps(_header(trace), indent=0).encode())
        for name in ARRAYS:
            member = io.BytesIO()
            np.lib.format.write_array(member, getattr(trace, name), version=(1, 0), allow_pickle=False)
            _add(archive, f"{name}.npy", member.getvalue())
    return buffer.getvalue()


def read(content: bytes, name: str) -> Trace:
    """The trace of a file's content. Raises TraceError, which calls the file `name`."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile as error:
        raise TraceError(f"{name}: not a trace, or truncated ({error})") from None
    with archive:
        header = _read_header(archive, name)
        arrays = {key: _read_array(archive, key, name) for key in ARRAYS}
    machine = header.get("machine")
    try:
        trace = Trace(
            function_names=tuple(str(text) for text in header["function_names"]),
            fingerprint=int(header["fingerprint"], 16),
            dormant_bytes=int(header["dormant_bytes"]),
            chunk_bytes=int(header["chunk_bytes"]),
            slab_chunks_peak=int(header["slab_chunks_peak"]),
            machine=None if machine is None else Machine(**machine),
            **arrays,
        )
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{name}: damaged header ({error!r})") from None
    counts = (trace.functions, trace.variables, len(trace.use_variables))
    if counts != (header.get("functions"), header.get("variables"), header.get("uses")):
        raise TraceError(f"{name}: the header's counts do not match the arrays")
    return trace


def _header(trace: Trace) -> dict[str, Any]:
    machine = trace.machine
    return {
        "format": FORMAT,
        "version": VERSION,
        "functions": trace.functions,
        "variables": trace.variables,
        "uses": len(trace.use_variables),
        "fingerprint": f"{trace.fingerprint:016x}",
        "dormant_bytes": int(trace.dormant_bytes),
        "chunk_bytes": int(trace.chunk_bytes),
        "slab_chunks_peak": int(trace.slab_chunks_peak),
        "machine": None if machine is None else dict(vars(machine)),
        "function_names": list(trace.function_names),
    }


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def _member(archive: zipfile.ZipFile, member: str, name: str) -> bytes:
    try:
        return archive.read(member)
    except KeyError:
        raise TraceError(f"{name}: {member} is missing") from None
    except Exception as error:  # zlib, CRC, or any other sign of damage
        raise TraceError(f"{name}: {member} is damaged ({error})") from None


def _read_header(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    try:
        header = json.loads(_member(archive, "header.json", name))
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{name}: header.json is damaged ({error})") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{name}: not a {FORMAT} file")
    version = header.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        hint = "; it was written by a newer release, which can read it" if newer else ""
        raise TraceError(f"{name}: version {version!r} of the format, this release reads {VERSION}{hint}")
    return header


def _read_array(archive: zipfile.ZipFile, key: str, name: str) -> NDArray[Any]:
    member = io.BytesIO(_member(archive, f"{key}.npy", name))
    try:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    except Exception as error:
        raise TraceError(f"{name}: {key}.npy is damaged ({error})") from None
    if array.dtype != ARRAYS[key]:
        raise TraceError(f"{name}: {key}.npy holds {array.dtype}, not {np.dtype(ARRAYS[key])}")
    return array
