"""`swapd doctor`: what is supported here, what is not, and why."""

from __future__ import annotations

import dataclasses

import click
from rich.console import RenderableType
from rich.text import Text

from swapd.cli.output import console, json_option, print_json, progress_bar, text_table
from swapd.devices.doctor import Report, examine

_COLORS = {"ok": "green", "warn": "yellow", "no": "red"}


@click.command("doctor")
@json_option
def command(as_json: bool) -> int:
    """Check this machine: devices, PyTorch, compiler, limits, settings.

    The exit status is 0 when programs can run out-of-core on at least one kind of device, else 1.
    """
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
