"""What the callbacks of trainers share: the session's figures for the trainer's log, and the report beside its files.

A trainer's steps need no word from a callback: every one ends with the step of an optimizer, where an iteration ends
by itself. Where the allocator is off the callbacks do nothing, so that a program may always have one.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import ooc.pytorch
from swapd.ranks import own_file

log = logging.getLogger("ooc.trainers")

PREFIX = "ooc_"  # of the names in a trainer's log
REPORT = "ooc_report.html"  # of rank 1: ooc_report.rank1.html
# Keys of the summary that go into a trainer's log: bytes, seconds and counts since the allocator is on.
LOGGED = (
    "live_peak_bytes",
    "device_peak_bytes",
    "swap_out_bytes",
    "swap_in_bytes",
    "stall_seconds",
    "steps",
    "planned_iteration_count",
)


def begin() -> None:
    """Keeps a timeline from now on, for the report, unless the program or a setting has started one."""
    if ooc.pytorch.enabled() and not ooc.pytorch.timeline_is_on():
        ooc.pytorch.timeline_start()


def figures() -> dict[str, float]:
    """The figures of :data:`LOGGED` as the summary has them now; empty where the allocator is off."""
    if not ooc.pytorch.enabled():
        return {}
    summary = ooc.pytorch.summary()
    return {PREFIX + name: summary[name] for name in LOGGED}


def write_report(folder: str | os.PathLike[str]) -> None:
    """Writes the page about the run so far into `folder`, a file for each rank. A failure is a warning."""
    path = own_file(Path(folder) / REPORT)
    if not ooc.pytorch.enabled() or path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ooc.pytorch.report(path)
    except Exception as error:  # the training is done, and its results must not be lost for a page about it
        log.warning("cannot write %s: %s", path, error)
