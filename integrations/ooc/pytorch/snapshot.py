"""Memory snapshots in PyTorch's format, which https://pytorch.org/memory_viz shows.

On a CUDA device the allocator keeps PyTorch's own books, and PyTorch writes them. For the emulated device the core's
books are put into the same form (that of `torch.cuda.memory._snapshot`): each variable of one chunk or more is a
segment with one block, at its address; the frames say where it is and where it was allocated. The history holds what
the timeline has of allocations and frees. Small variables, which share slabs, are left out.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ooc_alloc import timeline as kinds
from swapd.files import write_whole
from swapd.observing.recording import Recording
from swapd.trace.trace import Trace

if TYPE_CHECKING:
    from ooc.pytorch.session import TorchSession

Frame = dict[str, Any]


def dump(session: TorchSession, path: Path) -> None:
    """Writes the snapshot. Raises OSError."""
    if session.cuda is not None:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return
    content = io.BytesIO()
    pickle.dump(emulated_snapshot(session), content)
    write_whole(path, content.getvalue())


def emulated_snapshot(session: TorchSession) -> dict[str, Any]:
    """The snapshot of an emulated device; sizes in bytes, times in microseconds since 1970."""
    core = session.core
    chunk = int(core.stats()["chunk_bytes"])
    segments = []
    for region in core.regions():
        whole, resident = int(region["chunks"]) * chunk, int(region["resident_chunks"])
        state = f"{resident} of {region['chunks']} chunks on the device" + (", pinned" if region["pins"] else "")
        frames = [
            {"name": state, "filename": "ooc_alloc", "line": 0},
            *frames_of(core.place_text(int(region["place"]))),
        ]
        block = {
            "address": int(region["address"]),
            "size": whole,
            "requested_size": int(region["bytes"]),
            "state": "active_allocated",
            "frames": frames,
        }
        segments.append(
            {
                "device": 0,
                "address": int(region["address"]),
                "total_size": whole,
                "allocated_size": whole,
                "active_size": whole,
                "requested_size": int(region["bytes"]),
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": frames,
                "blocks": [block],
            }
        )
    history = []
    if core.timeline_state().capacity:
        history = _history(Recording.of(core), session.observer.main_trace())
    return {
        "segments": sorted(segments, key=lambda segment: segment["address"]),
        "device_traces": [history],
        "allocator_settings": {"backend": "ooc_alloc", "device": core.device_name},
        "external_annotations": [],
    }


def _history(recording: Recording, trace: Trace | None) -> list[dict[str, Any]]:
    numbers = {s.number for s in recording.spans if trace is not None and s.fingerprint == trace.fingerprint}
    began = recording.unix_now - recording.now
    found = []
    for row in recording.of_kind(kinds.ALLOCATED, kinds.FREED):
        variable, place = int(row["variable"]), ""
        if trace is not None and int(row["iteration"]) in numbers and 0 <= variable < trace.variables:
            place = trace.place(variable)
        entry = {
            "addr": int(row["free_bytes"]),  # in events of these kinds, the address
            "size": int(row["bytes"]),
            "stream": 0,
            "time_us": int(1e6 * (began + float(row["start"]))),
            "frames": frames_of(place),
        }
        actions = ("alloc",) if row["kind"] == kinds.ALLOCATED else ("free_requested", "free_completed")
        found += [{"action": action, **entry} for action in actions]
    return found


def frames_of(place: str) -> list[Frame]:
    """A place as frames: one frame, or none if it is empty.

    A place is `file:line in function`, perhaps after some words; without a line it is the name of a function.
    """
    where, _, function = place.rpartition(" in ")
    file, _, line = where.rpartition(":")
    if file and line.isdecimal():
        return [{"name": function, "filename": file, "line": int(line)}]
    return [{"name": place, "filename": "", "line": 0}] if place else []
