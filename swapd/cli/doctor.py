"""`swapd doctor`: what is supported here, what is not, and why."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from swapd.cli.output import OUTPUT, console, json_option, print_json, progress_bar, text_table
from swapd.devices.doctor import Report, examine
from swapd.devices.first_run import FILE, first_run

_COLORS = {"ok": "green", "warn": "yellow", "no": "red"}


@click.command("doctor")
@click.option("--first-run", "tried", is_flag=True, help="Try all of it on the GPU, in some minutes, and write a file.")
@click.option("--out", type=OUTPUT, default=FILE, show_default=True, help="The file of --first-run (JSON lines).")
@json_option
def command(tried: bool, out: Path, as_json: bool) -> int:
    """Check this machine: devices, PyTorch, compiler, limits, settings.

    The exit status is 0 when programs can run out-of-core on at least one kind of device, else 1. With --first-run it
    is 0 when everything passed, and OOC_ALLOC=emulated tries the emulated device in place of a GPU.
    """
    if tried:
        return first_run(out)
    with progress_bar() as progress:
        report = examine(progress)
    if as_json:
        print_json({"usable": report.usable, "checks": [dataclasses.asdict(check) for check in report.checks]})
    else:
        screen = console()
        screen.print(report_table(report))
        screen.print("usable" if report.usable else "[red]nothing can work here; see the lines marked no[/red]")
    return 0 if report.usable else 1


def report_table(report: Report) -> RenderableType:
    """One row for each check, with its remedy below the finding."""
    rows = (
        (
            check.name,
            Text(check.status, style=_COLORS[check.status]),
            check.detail + (f"\n-> {check.remedy}" if check.remedy else ""),
        )
        for check in report.checks
    )
    return text_table("", ("check", "", "finding"), rows, left=("", "finding"))
