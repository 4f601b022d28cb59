"""A line for each step of a long command, in the file that OOC_PROGRESS names: for who looks on (`tail -f`)."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

VARIABLE = "OOC_PROGRESS"


def note(text: str) -> None:
    """Adds a line with the time, the command and `text` to the file; without a file, or where none can be, nothing."""
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return
    path, program = Path(name).expanduser(), Path(sys.argv[0])
    command = program.parent.name if program.stem == "__main__" else program.stem
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {command}: {' '.join(text.split())}\n"
    with contextlib.suppress(OSError):  # it is for looking on: nothing depends on it
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # one write, so that lines of several processes stay whole
            file.write(line)
