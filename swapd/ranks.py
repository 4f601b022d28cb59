"""Which of a job's processes this is, as its launcher says it in variables, and whether it is another one's helper.

torchrun and its like, accelerate, Open MPI, MPICH and its family, and Slurm are understood.
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
# The nearest launcher first: torchrun under Slurm counts processes, and Slurm then counts launchers.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_SLURM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")  # Slurm numbers a job of one process too


def rank() -> str:
    """The number of this process in its job, or "0" where there is one process."""
    return _rank() or "0"


def _rank() -> str:
    """Empty where there is one process. Of a launcher that numbers only within a host, with the host's number."""
    number, local = _first(_RANKS), _first(_LOCAL_RANKS)
    if number or not local:
        return number
    node = os.environ.get("NODE_RANK", "").strip()
    return local if node in ("", "0") else f"{node}.{local}"


def local_rank() -> int | None:
    """The number of this process among its job's on this host; None where there is one process."""
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
    """Whether this process only starts those that compute (it imports PyTorch all the same)."""
    words = sys.orig_argv[1:] if arguments is None else arguments[1:]
    for position, word in enumerate(words):
        if word == "-m":
            return words[position + 1 : position + 2] != [] and words[position + 1] in _LAUNCHERS
        if not word.startswith("-"):
            return Path(word).name in _LAUNCHERS
    return False


def is_child(mark: str) -> bool:
    """Whether this is a child process (a worker, a helper) of one that claimed `mark`, a variable that they inherit.

    A process of another rank than its parent's is no child in this sense.
    """
    pid, _, of_rank = os.environ.get(mark, "").partition(":")
    return pid not in ("", str(os.getpid())) and of_rank == _numbers()


def claim(mark: str) -> bool:
    """Sets `mark` for child processes, unless this is a child of a process that did, or a launcher: then False."""
    if is_launcher() or is_child(mark):
        return False
    os.environ[mark] = f"{os.getpid()}:{_numbers()}"
    return True


def _numbers() -> str:
    return f"{_first(_RANKS)}/{_first(_LOCAL_RANKS)}"


def own_file(path: Path | None) -> Path | None:
    """The file of this process: each rank of a job has its own, and a pipe or the like is what it is."""
    number = _rank()
    return path if path is None or not number or is_stream(path) else with_word(path, f"rank{number}")


def with_word(path: Path, word: str) -> Path:
    """`s.json` with a word before what says the format: `s.word.json`, `t.word.json.gz`."""
    name, packed = (path.stem, path.suffix) if path.suffix == ".gz" else (path.name, "")
    plain = Path(name)
    return path.with_name(f"{plain.stem}.{word}{plain.suffix}{packed}")
