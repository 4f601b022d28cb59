"""What all commands share: failures with a message for people, tables, progress bars, JSON, files that are written."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from swapd.files import write_whole
from swapd.progress import note


class Failure(Exception):
    """The command cannot do what was asked. The user sees the message without a traceback."""


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, to standard output.")
_WIDTH_OF_FILES = 140  # characters
OUTPUT = click.Path(dir_okay=False, path_type=Path)


def console(*, stderr: bool = False) -> Console:
    """A console on the current standard streams. Where it is no terminal, it has room for a wide table."""
    screen = Console(stderr=stderr, soft_wrap=False, highlight=False)
    if not screen.is_terminal:
        screen.width = _WIDTH_OF_FILES
    return screen


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
    sys.stdout.flush()


def write_file(path: str | os.PathLike[str], content: str) -> None:
    """Writes the file, whole or not at all. Raises Failure."""
    try:
        write_whole(path, content.encode("utf-8"))
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None


def pairs_table(title: str, rows: Sequence[tuple[str, str | Text]]) -> Table:
    """A two-column table of facts; strings are shown as they are, without markup."""
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, fact in rows:
        table.add_row(name, fact if isinstance(fact, Text) else Text(fact))
    return table


def text_table(
    title: str, columns: Sequence[str], rows: Iterable[Iterable[str | Text]], left: Collection[str] = ()
) -> RenderableType:
    """A table whose strings are shown as they are. The first column and those in `left` are aligned to the left."""
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for place, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if place == 0 or name in left else "right", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    # The title of a `Table` would be wrapped where the table ends.
    return Group(Text(title, style="italic", no_wrap=True, overflow="ignore"), table) if title else table


@contextmanager
def progress_bar() -> Iterator[Any]:
    """Yields a function (text, done, total) that drives a bar on standard error, if that is a terminal.

    Each step is noted in the file of `swapd.progress`, too.
    """
    screen = console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
    with bar:
        task = bar.add_task("", total=None)

        def update(text: str, done: int, total: int) -> None:
            note(f"{text}, {done} of {total}")
            bar.update(task, description=text, completed=done, total=total)

        yield update
