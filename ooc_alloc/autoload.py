"""Activation without code: the `torch.backends` entry point, run at the end of `import torch`.

It does nothing unless `OOC_ALLOC` is set. Settings that cannot be used stop the program: who sets a budget means it,
and without one the program would take what it likes. What the machine cannot do (there is no compiler, no driver) is a
warning, and the program runs in plain memory, unless `OOC_STRICT=1`.

Until the allocator is wanted only the standard library is imported: nothing of ours, and nothing that a program has by
a name of ours, can break an `import torch` that has nothing to do with us.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

log = logging.getLogger("ooc.pytorch")

_OFF = ("", "0", "off", "no", "false")


def activate() -> None:
    """Entry point of `torch.backends`."""
    if os.environ.get("OOC_ALLOC", "").strip().lower() in _OFF:
        return
    if any("torch/_inductor/compile_worker" in argument for argument in sys.argv[:1]):
        return  # a helper of torch.compile: it holds no tensors
    try:
        _enable()
    except Exception as error:  # whatever it is: import torch must not break
        if os.environ.get("OOC_STRICT", "").strip().lower() in ("1", "true", "yes", "on"):
            raise
        _warn(error)


def _enable() -> None:
    from ooc import pytorch
    from swapd.config import ConfigError
    from swapd.ranks import is_child
    from swapd.session import SESSION_OF

    try:
        pytorch.enable()
    except ConfigError as error:
        # To a worker of a process that could use them only the machine can say no: less memory is free by then.
        if not is_child(SESSION_OF):
            _stop(error)
        _warn(error)


def _warn(error: Exception) -> None:
    print(f"ooc_alloc: not active, the program runs in plain memory: {error}", file=sys.stderr)
    log.debug("activation failed", exc_info=True)


def _stop(error: Exception) -> NoReturn:
    """By an exception that PyTorch lets through as it is: others it wraps, and advises to switch all extensions off."""
    print(f"ooc_alloc: {error} (the program was stopped; OOC_ALLOC=0 runs it in plain memory)", file=sys.stderr)
    raise SystemExit(1)
