"""Writing a file so that a reader never sees half of it."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_numbers = itertools.count()  # a signal's handler may write while a write is under way


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write the file at `path`, whole or not at all.

    A link is followed. What is no plain file (a pipe, /dev/null) is written to as it is: put in its place, a plain file
    would be all that is left of it. Raises OSError; then the file is as before and nothing is left beside it.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(target, "wb") as file:
            file.write(content)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{next(_numbers)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):  # that the write failed is what has to be said
            temporary.unlink(missing_ok=True)
        raise
