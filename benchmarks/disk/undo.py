"""What was changed on the machine, and how it is put back: also after Ctrl-C, and told to people after a crash.

Every change is a line for the shell that takes it back. The line is in the note before the change is made, and the note
is what runs at the end, last line first; so what a crash leaves behind is a script.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NotPutBack(Exception):
    """Something that was changed could not be changed back; the message says what is left to do."""


class Undo:
    """Lines for the shell that take back what was changed, kept in a note until they have run.

    Args:
        note: the file; it exists exactly while there is something to undo. Its folder must exist.

    Raises:
        NotPutBack: there is a note of an earlier run already.
    """

    def __init__(self, note: Path) -> None:
        self.note = note
        self._lines: list[str] = []
        if note.exists():
            raise NotPutBack(
                f"an earlier run did not put back what it changed; look at {note}, run `sh {note}`, and remove it:\n"
                + note.read_text(encoding="utf-8")
            )

    def before(self, line: str) -> None:
        """Notes `line`, which takes back what is changed next. It must do no harm if the change was not made."""
        self._lines.append(line)
        self._write()

    def back(self, mark: int = 0) -> None:
        """Runs all lines after the first `mark`, last one first. Signals wait meanwhile. Raises NotPutBack."""
        failed = []
        with _signals_wait():
            while len(self._lines) > mark:
                line = self._lines.pop()
                command = ["sh", "-c", line]  # in a session of its own, where no Ctrl-C comes
                done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
                if done.returncode != 0:
                    failed.append(line)
                    print(f"not put back: {line}\n{done.stderr.strip()}", file=sys.stderr)
            self._lines += reversed(failed)
            self._write()
        if failed:
            raise NotPutBack(f"still to be done, and written in {self.note}:\n" + "\n".join(failed))

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """What is changed in the block is put back at its end, however it ends."""
        mark = len(self._lines)
        try:
            yield
        finally:
            self.back(mark)

    def _write(self) -> None:
        if self._lines:
            self.note.write_text("\n".join(reversed(self._lines)) + "\n", encoding="utf-8")
        else:
            self.note.unlink(missing_ok=True)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Endings that are asked for in the block come after it: half of a change taken back is worse than none.

    Handlers, not a mask: that is one thread's, and any other thread of the process would take the signal.
    """
    asked: list[int] = []
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        signal.raise_signal(asked[0])


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def endings_unwind() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt: `finally` runs."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_value(undo: Undo, path: Path, value: str) -> None:
    """Writes a setting of the kernel, to be put back as it was. Raises OSError."""
    was = path.read_text(encoding="utf-8").strip()
    if was != value:
        undo.before(f"echo '{was}' > '{path}'")
        path.write_text(value, encoding="utf-8")
