"""Launches programs: their command lines, their environments, their signals, and how they end."""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import click

from swapd.cli.output import Failure
from swapd.config import Config
from swapd.ranks import own_file, with_word
from swapd.settings import PREFIX, SETTINGS

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_STANDARD_ERROR = 2

# A command's own options end where the program begins: at the first argument that is none of them, such as ``-m``.
BEFORE_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _not_an_option(_context: click.Context, _parameter: click.Parameter, program: tuple[str, ...]) -> tuple[str, ...]:
    first = program[0] if program else ""
    if first.startswith("-") and first != "-m":
        raise click.NoSuchOption(first)
    return program


program_argument = click.argument(
    "program",
    nargs=-1,
    required=True,
    metavar="SCRIPT.py|-m MODULE [ARGUMENT]...",
    type=click.UNPROCESSED,
    callback=_not_an_option,
)


def python_arguments(program: tuple[str, ...]) -> list[str]:
    """The program as the interpreter's arguments. Raises click.UsageError if a module's name or a file is missing."""
    if program[0] == "-m":
        if len(program) == 1:
            raise click.UsageError("-m needs the name of a module")
    elif not Path(program[0]).exists():
        raise click.UsageError(f"there is no file {program[0]!r}; to run a module, write -m {program[0]}")
    return list(program)


def model_arguments(program: tuple[str, ...]) -> dict[str, Any]:
    """The NAME=VALUE pairs behind a model's name. A value that is no Python literal is taken as a text.

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


def run_module(module: str, wanted: dict[str, Any], *, stdout_is_ours: bool) -> int:
    """Run a module of `ooc`, which is started, not imported, since `ooc` imports us. Returns its exit status.

    It gets `wanted` as JSON, and none of our settings.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return _status(_started(["-m", module, json.dumps(wanted)], environment, stdout_is_ours).wait())


def child_environment(config: Config) -> dict[str, str]:
    """This process's environment with exactly the given settings, and PyTorch's autoload of backends on."""
    ours = {setting.variable for setting in SETTINGS}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if environment.get(AUTOLOAD) == "0":
        click.echo(f"swapd: {AUTOLOAD}=0 would keep the allocator from starting; it is left out for this run", err=True)
        del environment[AUTOLOAD]
    return environment | config.to_environment()


def run_program(arguments: list[str], config: Config, *, stdout_is_ours: bool = False) -> int:
    """Run the interpreter with `arguments`, pass signals on, and return its exit status (128 + n for signal n).

    With `stdout_is_ours` the program's standard output goes to standard error, because the command prints JSON.
    """
    child = _started(arguments, child_environment(config), stdout_is_ours)

    def forward(number: int, _frame: FrameType | None) -> None:
        # The terminal has sent an interrupt to both processes already.
        if number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground():
            return
        if child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _status(status)


def _started(arguments: list[str], environment: Mapping[str, str], stdout_is_ours: bool) -> subprocess.Popen[bytes]:
    stdout = _STANDARD_ERROR if stdout_is_ours else None
    try:
        return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=stdout)
    except OSError as error:
        raise Failure(f"cannot start {sys.executable}: {error}") from None


def _status(status: int) -> int:
    return status if status >= 0 else 128 - status


def replace_process(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Replace this process by the interpreter. Raises Failure if it cannot be started."""
    try:
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    except OSError as error:
        raise Failure(f"cannot start {sys.executable}: {error}") from None


Stamps = dict[Path, tuple[int, int]]


def stamps(path: Path) -> Stamps:
    """Returns (modification time, inode) by file. A file that is written anew has another stamp.

    The files are those that a program makes of `path`: this process's own comes first, then those of ranks 0, 1, ...
    """
    ranks = path.parent.glob(with_word(Path(glob.escape(path.name)), "rank*").name)
    found = {}
    for one in (own_file(path) or path, *sorted(ranks, key=lambda other: (len(other.name), other.name))):
        with contextlib.suppress(OSError):
            facts = one.stat()
            found[one] = (facts.st_mtime_ns, facts.st_ino)
    return found


def written_since(path: Path, before: Stamps) -> list[Path]:
    """Those files of `stamps` that were written after `before` was taken."""
    found = [one for one, stamp in stamps(path).items() if before.get(one) != stamp]
    if len(found) > 1:
        click.echo(f"swapd: {len(found)} ranks wrote files of their own; this is {found[0].name}", err=True)
    return found


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
