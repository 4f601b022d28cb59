"""`swapd run`: set the variables, run the program, show what it did."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import click

from swapd.cli.launch import (
    BEFORE_PROGRAM,
    child_environment,
    program_argument,
    python_arguments,
    replace_process,
    run_program,
    stamps,
    written_since,
)
from swapd.cli.options import read_config, setting_options
from swapd.cli.output import console, print_json, write_file
from swapd.cli.summary import summary_table
from swapd.config import Config
from swapd.files import is_stream

NO_SUMMARY = (
    "the program left no summary: it did not import PyTorch, or made no tensor, or the allocator did not start (its "
    "reason is above; `swapd doctor` looks for others)"
)


@click.command("run", context_settings=BEFORE_PROGRAM)
@setting_options()
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write the summary there as JSON; - is standard output, and the program's goes to standard error.",
)
@click.option("--quiet", "-q", is_flag=True, help="Do not show the summary; this process becomes the program.")
@program_argument
def command(program: tuple[str, ...], json_path: str | None, quiet: bool, **flags: Any) -> int:
    """Run a Python program out-of-core, unchanged.

    Each option sets the variable named beside it; a variable that is set already counts where no option is given. The
    device is chosen automatically unless --alloc says otherwise. Signals go to the program, and the exit status is the
    program's.

    \b
    swapd run --budget 8GiB train.py --epochs 3
    swapd run --budget 60% -m mypackage.train
    """
    arguments = python_arguments(program)
    config = read_config(flags, alloc="auto")
    if quiet and json_path is None:
        replace_process(arguments, child_environment(config))
    status, summary = run_with_summary(arguments, config, stdout_is_ours=json_path == "-")
    if summary is None:
        click.echo(f"swapd: {NO_SUMMARY}", err=True)
    else:
        if json_path is not None:
            _write(json_path, summary)
        if not quiet:
            console(stderr=True).print(summary_table(summary))
    return status


def run_with_summary(
    arguments: list[str], config: Config, *, stdout_is_ours: bool
) -> tuple[int, dict[str, Any] | None]:
    """Run the program. Returns its exit status, and its summary if it left one."""
    with tempfile.TemporaryDirectory(prefix="swapd-", ignore_cleanup_errors=True) as folder:
        asked = config.summary
        path = Path(folder, "summary.json") if asked is None or is_stream(asked) else asked
        before = stamps(path)
        config = dataclasses.replace(config, summary=path.absolute())
        status = run_program(arguments, config, stdout_is_ours=stdout_is_ours)
        written = written_since(path, before)
        if not written:
            return status, None
        try:
            summary = json.loads(written[0].read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            click.echo(f"swapd: the summary {written[0]} cannot be read: {error}", err=True)
            return status, None
    if asked is not None and asked != path:  # a pipe cannot be read again
        _write(str(asked), summary)
    return status, summary if isinstance(summary, dict) else None


def _write(path: str, summary: dict[str, Any]) -> None:
    if path == "-":
        print_json(summary)
    else:
        write_file(path, json.dumps(summary, indent=1) + "\n")
