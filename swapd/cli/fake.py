"""`swapd record --fake`: a trace without memory, in a process of its own, which may import a framework."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from swapd.cli.output import Failure
from swapd.config import Config
from swapd.devices.roofline import DEVICES
from swapd.settings import PREFIX
from swapd.trace.trace import LARGEST_BYTES
from swapd.units import MIB

MODULE = "ooc.pytorch.fake"  # started, not imported: `ooc` imports us, never the other way round


def fake_arguments(program: tuple[str, ...]) -> dict[str, Any]:
    """The NAME=VALUE pairs behind the program's name. A value that is no Python literal is taken as a text.

    Raises:
        click.UsageError: one of the arguments is no such pair.
    """
    arguments: dict[str, Any] = {}
    for text in program[1:]:
        name, equals, value = text.partition("=")
        if text.startswith("-"):
            raise click.UsageError(f"{text} comes too late: options are given before {program[0]}")
        if not equals or not name.isidentifier():
            raise click.UsageError(f"{text!r} is no NAME=VALUE for the function that makes the model")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def record_fake(
    program: tuple[str, ...],
    output: Path,
    config: Config,
    *,
    batch: int | None,
    device: str | None,
    times: Path | None,
    stdout_is_ours: bool,
) -> int:
    """Record `program` (SCRIPT.py:FUNCTION, MODULE:FUNCTION or a model's name) in `output`. Returns the exit status."""
    if batch is None:
        raise click.UsageError("--fake needs --batch")
    if device is None and times is None:
        raise click.UsageError(f"--fake needs function times: --device ({', '.join(DEVICES)}) or --times TRACE")
    chunk_bytes, small_limit_bytes = config.resolve_chunks(LARGEST_BYTES, 2 * MIB)  # as on a GPU, whatever the budget
    wanted = {
        "program": program[0],
        "arguments": fake_arguments(program),
        "batch": batch,
        "device": device,
        "times": None if times is None else str(times.absolute()),
        "chunk_bytes": chunk_bytes,
        "small_limit_bytes": small_limit_bytes,
        "output": str(output.absolute()),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    standard_error = 2
    try:
        child = subprocess.run(
            [sys.executable, "-m", MODULE, json.dumps(wanted)],
            env=environment,
            stdout=standard_error if stdout_is_ours else None,
            check=False,
        )
    except OSError as error:
        raise Failure(f"cannot start {sys.executable}: {error}") from None
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
