"""Which files are not the user's: those of Python, of installed packages, and ours."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import integrations
import ooc_alloc
import swapd


def not_the_users() -> list[str]:
    """The folders of such files, each with a slash at its end."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(Path(module.__path__[0])) for module in (integrations, ooc_alloc, swapd)]
    return sorted({os.path.join(folder, "") for folder in folders})
