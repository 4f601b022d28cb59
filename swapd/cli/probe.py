"""`swapd probe`: measure the machine and keep what was found."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import RenderableType

from ooc_alloc import OocError
from swapd.cli.options import read_config, setting_options
from swapd.cli.output import Failure, console, json_option, pairs_table, print_json, progress_bar, text_table
from swapd.devices import disk_probe
from swapd.devices.disk import IN_MEMORY
from swapd.devices.disk_profile import DiskProfile, save_disk_profile
from swapd.devices.probe import QUICK, Effort, measure, open_device
from swapd.devices.profile import Profile, save_profile
from swapd.units import MIB, format_bandwidth, format_bytes, format_duration

P = TypeVar("P", Profile, DiskProfile)
FOLDER = click.Path(path_type=Path)


@click.command("probe")
@setting_options("alloc", "chunk_size", "emulated_memory", "emulated_bandwidth", "emulated_granularity")
@click.option("--disk", metavar="FOLDER", type=FOLDER, help="Measure the disk of this folder in place of a device.")
@click.option("--quick", is_flag=True, help="Fewer sizes and repeats: a second or two rather than ten.")
@click.option("--no-save", is_flag=True, help="Do not keep the profile.")
@json_option
def command(disk: Path | None, quick: bool, no_save: bool, as_json: bool, **flags: Any) -> int:
    """Measure the device: memory calls by chunk count, copies by size and direction, pinning.

    All figures are medians. The profile is kept under $XDG_CACHE_HOME/ooc_alloc, where `swapd plan --device` finds it.

    With --disk: a file of 1 GiB without a name is read and written there, by size of a piece and by how many pieces
    are under way. A program whose OOC_DISK is on that disk plans with the speeds that were found, and has as many
    pieces under way as are worth it.
    """
    if disk is not None:
        given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
        if given:
            raise click.UsageError(f"{given[0]} is about a device, and does nothing with --disk: leave it out")
        return _probe_disk(disk, quick, no_save, as_json)
    config = read_config(flags)
    os.environ.update(config.to_environment())  # from which the emulated driver reads its settings
    try:
        device, is_emulated = open_device(config.alloc if config.enabled else "auto")
        with progress_bar() as progress:
            profile = measure(
                device,
                chunk_bytes=config.chunk_size or 2 * MIB,
                link=config.emulated_bandwidth if is_emulated else None,
                effort=QUICK if quick else Effort(),
                progress=progress,
            )
        device.close()
    except OocError as error:
        raise Failure(str(error)) from None
    path = None if no_save else _kept(save_profile, profile)
    if as_json:
        print_json({"path": None if path is None else str(path), **dataclasses.asdict(profile)})
        return 0
    screen = console()
    for part in profile_tables(profile):
        screen.print(part)
        screen.print()
    if is_emulated:
        screen.print("The device is emulated: these figures say nothing about the speed of a GPU.")
    if path is not None:
        screen.print(f"kept as {path}", soft_wrap=True)
    return 0


def _kept(save: Callable[[P], Path], profile: P) -> Path:
    try:
        return save(profile)
    except OSError as error:
        raise Failure(f"cannot keep the profile: {error}; use --no-save, or set XDG_CACHE_HOME") from None


def _probe_disk(folder: Path, quick: bool, no_save: bool, as_json: bool) -> int:
    effort = disk_probe.QUICK if quick else disk_probe.Effort()
    try:
        with progress_bar() as progress:
            profile = disk_probe.probe_folder(folder, effort=effort, progress=progress)
    except disk_probe.DiskError as error:
        raise Failure(str(error)) from None
    path = None if no_save else _kept(save_disk_profile, profile)
    best = profile.recommended
    read, written = best.of_equal_amounts()
    if as_json:
        found = {"depth": best.depth, "read_bytes_per_second": read, "written_bytes_per_second": written}
        print_json({"path": None if path is None else str(path), "recommended": found, **dataclasses.asdict(profile)})
        return 0
    screen = console()
    screen.print(disk_table(profile))
    screen.print()
    speeds = f"{format_bandwidth(read)} read and {format_bandwidth(written)} written"
    words = f"{best.depth} pieces at once in each direction are" if best.depth > 1 else "one piece at a time is"
    screen.print(f"{words} enough: {speeds}, where as much is read as written and both begin at once.")
    if profile.kind in IN_MEMORY:
        screen.print(f"Files of {profile.kind} are memory: give a folder on a disk.")
    if not profile.direct:
        screen.print("The file system refuses direct I/O: these are speeds through the page cache.")
    if path is not None:
        screen.print(f"kept as {path}", soft_wrap=True)
    return 0


def disk_table(profile: DiskProfile) -> RenderableType:
    """A disk's profile as a table."""
    rows = []
    for row in profile.speeds:
        speeds = (row.read_alone, row.written_alone, row.read_with_both, row.written_with_both)
        rows.append([format_bytes(row.piece_bytes), str(row.depth), *map(format_bandwidth, speeds)])
    columns = ("piece", "at once", "read alone", "written alone", "read with both", "written with both")
    return text_table(f"disk at {profile.mount or '?'} ({profile.kind})", columns, rows)


def profile_tables(profile: Profile) -> list[RenderableType]:
    """A profile as tables: the device, memory calls, copies."""
    latencies = format_duration(profile.out_latency_seconds), format_duration(profile.in_latency_seconds)
    pinned, unpinned = format_duration(profile.pin_seconds_per_mib), format_duration(profile.unpin_seconds_per_mib)
    facts = [
        ("memory", format_bytes(profile.total_bytes)),
        ("granularity", format_bytes(profile.granularity_bytes)),
        ("link held to", profile.link or "nothing"),
        ("latency", f"out {latencies[0]}, in {latencies[1]}"),
        ("pinning", f"{pinned} per MiB, undone in {unpinned}"),
    ]
    memory = []
    for row in profile.memory:
        seconds = (row.create_seconds, row.map_seconds, row.set_access_seconds, row.unmap_seconds, row.release_seconds)
        memory.append([str(row.chunks), *map(format_duration, seconds)])
    copies = []
    for copy in profile.copies:
        times = (copy.out_seconds, copy.in_seconds, copy.both_out_seconds, copy.both_in_seconds)
        copies.append([format_bytes(copy.bytes), *(format_bandwidth(copy.bytes / value) for value in times)])
    chunk = format_bytes(profile.memory[0].chunk_bytes)
    columns = ("chunks", "create / chunk", "map / chunk", "set access / range", "unmap / range", "release / chunk")
    return [
        pairs_table(profile.device, facts),
        text_table(f"memory calls, chunks of {chunk}", columns, memory),
        text_table("copies", ("size", "out alone", "in alone", "out with both", "in with both"), copies),
    ]
