"""Activation without code: the `torch.backends` entry point, run at the end of `import torch`.

It does nothing unless `OOC_ALLOC` is set, and never raises (that would break `import torch`) unless `OOC_STRICT=1`.
"""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("ooc.pytorch")

_OFF = ("", "0", "off", "no", "false")


def activate() -> None:
    """Entry point of `torch.backends`."""
    if os.environ.get("OOC_ALLOC", "").strip().lower() in _OFF:
        return
    if any("torch/_inductor/compile_worker" in argument for argument in sys.argv[:1]):
        return  # a helper of torch.compile: it holds no tensors
    try:
        from integrations import pytorch

        pytorch.enable()
    except Exception as error:  # whatever it is: import torch must not break
        if os.environ.get("OOC_STRICT", "").strip().lower() in ("1", "true", "yes", "on"):
            raise
        print(f"ooc_alloc: not active, the program runs in plain memory: {error}", file=sys.stderr)
        log.debug("activation failed", exc_info=True)
