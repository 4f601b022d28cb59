"""Tells which of a job's processes this one is, by its launcher's variables, and whether it is a helper of another one.

It understands torchrun and its like, accelerate, Open MPI, MPICH and its family, and Slurm.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swapd.files import is_stream

_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
)
# The variable of the nearest launcher comes first: where Slurm starts torchrun, Slurm's numbers are the launchers'.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_SLURM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # where one is 1, Slurm's numbers do not count


def rank() -> str:
    """The number of this process in its job, or "0" if the job has one process."""
    return _rank() or "0"


def _rank() -> str:
    """Returns the number of this process, or an empty text if the job has one process.

    Where a launcher numbers only within a host, the number of the host comes first, as in "1.0", unless it is 0.
    """
    number, local = _first(_RANKS), _first(_LOCAL_RANKS)
    if number or not local:
        return number
    node = os.environ.get("NODE_RANK", "").strip()
    return local if node in ("", "0") else f"{node}.{local}"


def local_rank() -> int | None:
    """Returns this process's number among those of its job on this host, or None if the job has one process."""
    text = _first(_LOCAL_RANKS)
    return int(text) if text else None


def _first(names: tuple[str, ...]) -> str:
    alone = any(os.environ.get(name, "").strip() == "1" for name in _SLURM_TASKS)
    for name in names:
        text = os.environ.get(name, "").strip()
        if text.isascii() and text.isdecimal() and not (alone and name.startswith("SLURM_")):
            return text
    return ""


def is_launcher(arguments: list[str] | None = None) -> bool:
    """Whether this process only starts the processes that compute. A launcher imports PyTorch all the same."""
    words = sys.orig_argv[1:] if arguments is None else arguments[1:]
    for position, word in enumerate(words):
        if word == "-m":
            return words[position + 1 : position + 2] != [] and words[position + 1] in _LAUNCHERS
        if not word.startswith("-"):
            return Path(word).name in _LAUNCHERS
    return False


def is_child(mark: str) -> bool:
    """Whether this is a child (a worker, a helper) of a process that claimed `mark`, a variable that children inherit.

    A process that has another rank than its parent is no child in this sense.
    """
    pid, _, of_rank = os.environ.get(mark, "").partition(":")
    return pid not in ("", str(os.getpid())) and of_rank == _numbers()


def claim(mark: str) -> bool:
    """Sets `mark` for child processes, or returns false in a launcher or in a child of a process that claimed it."""
    if is_launcher() or is_child(mark):
        return False
    os.environ[mark] = f"{os.getpid()}:{_numbers()}"
    return True


def _numbers() -> str:
    return f"{_first(_RANKS)}/{_first(_LOCAL_RANKS)}"


def own_file(path: Path | None) -> Path | None:
    """The file of this process: each rank of a job has a file of its own, but all ranks share a pipe or the like."""
    number = _rank()
    return path if path is None or not number or is_stream(path) else with_word(path, f"rank{number}")


def with_word(path: Path, word: str) -> Path:
    """Puts a word before the path's ending: `s.json` becomes `s.word.json`, `t.json.gz` becomes `t.word.json.gz`."""
    name, packed = (path.stem, path.suffix) if path.suffix == ".gz" else (path.name, "")
    plain = Path(name)
    return path.with_name(f"{plain.stem}.{word}{plain.suffix}{packed}")
