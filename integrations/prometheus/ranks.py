"""Which of a job's processes this is, as torchrun and its like say it in variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")
_OWNER = "_OOC_METRICS_OF"  # set for child processes: whose metrics are exported already


def rank() -> str:
    """`RANK`, or "0" where there is one process."""
    return os.environ.get("RANK", "").strip() or "0"


def local_rank() -> int | None:
    """`LOCAL_RANK`; None where there is one process."""
    text = os.environ.get("LOCAL_RANK", "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def is_launcher(arguments: list[str] | None = None) -> bool:
    """Whether this process only starts those that compute (it imports PyTorch all the same)."""
    words = sys.orig_argv[1:] if arguments is None else arguments[1:]
    for position, word in enumerate(words):
        if word == "-m":
            return words[position + 1 : position + 2] != [] and words[position + 1] in _LAUNCHERS
        if not word.startswith("-"):
            return Path(word).name in _LAUNCHERS
    return False


def claim() -> bool:
    """Whether this process exports metrics: not a launcher, and no child process of one that does (a worker, a helper).

    A process of another local rank than its parent's is no child in this sense.
    """
    mine = f"{os.getpid()}:{os.environ.get('LOCAL_RANK', '')}"
    owner = os.environ.get(_OWNER, "")
    if is_launcher():
        return False
    pid, _, of_rank = owner.partition(":")
    if owner and pid != str(os.getpid()) and of_rank == os.environ.get("LOCAL_RANK", ""):
        return False
    os.environ[_OWNER] = mine
    return True
