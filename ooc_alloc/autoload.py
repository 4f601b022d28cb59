"""Activation without code: the `torch.backends` entry point, run at the end of `import torch`.

It does nothing unless `OOC_ALLOC` is set. Settings that cannot be used stop the program: who sets a budget means it,
and without a budget the program would take all the memory it likes. If the machine lacks something (a compiler, a
driver), that is a warning and the program runs in plain memory; with `OOC_STRICT=1` it is an error.

Until the allocator is wanted, only the standard library is imported. So an `import torch` that has nothing to do with
us cannot be broken by our modules, nor by a program's own modules that have the names of ours.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

log = logging.getLogger("ooc.pytorch")

_OFF = ("", "0", "off", "no", "false")


def is_off() -> bool:
    """Whether `OOC_ALLOC` asks for nothing."""
    return os.environ.get("OOC_ALLOC", "").strip().lower() in _OFF


def activate() -> None:
    """Entry point of `torch.backends`."""
    if is_off():
        return
    if any("torch/_inductor/compile_worker" in argument for argument in sys.argv[:1]):
        return  # a helper of torch.compile: it holds no tensors
    _attempt(_enable)


def _enable() -> None:
    from ooc import pytorch

    pytorch.enable_at_start(_attempt)


def _attempt(turn_on: Callable[[], None]) -> None:
    try:
        _unless_settings_are_wrong(turn_on)
    except Exception as error:  # whatever it is: the program must not break
        if os.environ.get("OOC_STRICT", "").strip().lower() in ("1", "true", "yes", "on"):
            raise
        _warn(error)


def _unless_settings_are_wrong(turn_on: Callable[[], None]) -> None:
    from swapd.config import ConfigError
    from swapd.ranks import is_child
    from swapd.session import SESSION_OF

    try:
        turn_on()
    except ConfigError as error:
        # The parent of a worker could use the same settings. So the machine is the reason: less memory is free by now.
        if not is_child(SESSION_OF):
            _stop(error)
        _warn(error)


def _warn(error: Exception) -> None:
    print(f"ooc_alloc: not active, the program runs in plain memory: {error}", file=sys.stderr)
    log.debug("activation failed", exc_info=True)


def _stop(error: Exception) -> NoReturn:
    """Raises what PyTorch lets through: it wraps other exceptions, and advises to switch all extensions off."""
    print(f"ooc_alloc: {error} (the program was stopped; OOC_ALLOC=0 runs it in plain memory)", file=sys.stderr)
    raise SystemExit(1)
