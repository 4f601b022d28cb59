"""Launches a program under the allocator: its command line, its environment, its signals, and how it ends."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from swapd.cli.output import Failure
from swapd.config import Config
from swapd.ranks import own_file, with_word
from swapd.settings import SETTINGS

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


class ProgramCommand(click.Command):
    """A command whose own options end where the program begins: at the first argument that is no option, or ``-m``."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name: not parameter.is_flag
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] == "-m":
                args = [*args[:position], "--", *args[position:]]
                break
            position += 2 if takes_value.get(args[position], False) else 1
        return super().parse_args(ctx, args)


def python_arguments(program: tuple[str, ...]) -> list[str]:
    """The program as the interpreter's arguments. Raises click.UsageError if a module's name or a file is missing."""
    if program[0] == "-m":
        if len(program) == 1:
            raise click.UsageError("-m needs the name of a module")
    elif not Path(program[0]).exists():
        raise click.UsageError(f"there is no file {program[0]!r}; to run a module, write -m {program[0]}")
    return list(program)


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
    standard_error = 2
    try:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            env=child_environment(config),
            stdout=standard_error if stdout_is_ours else None,
        )
    except OSError as error:
        raise Failure(f"cannot start {sys.executable}: {error}") from None

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
    return status if status >= 0 else 128 - status


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


def replace_by_program(arguments: list[str], config: Config) -> None:
    """Replace this process by the program. Raises Failure if the interpreter cannot be started."""
    try:
        os.execve(sys.executable, [sys.executable, *arguments], child_environment(config))
    except OSError as error:
        raise Failure(f"cannot start {sys.executable}: {error}") from None


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
