"""Files that are in the page cache already are memory that no limit would count: they are dropped before a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_LARGE = 1 << 20


def libraries() -> list[Path]:
    """The interpreter and the large libraries of its packages."""
    found = [Path(sys.executable).resolve()]
    for folder in {Path(entry) for entry in sys.path if entry.endswith("-packages")}:
        found += [path for path in folder.rglob("*.so*") if path.is_file() and path.stat().st_size >= _LARGE]
    return found


def forget(paths: Iterable[Path]) -> None:
    """Drops the pages of files from the cache, but for those that another process has mapped (posix_fadvise)."""
    for path in paths:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
