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
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
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


def local_size() -> int:
    """Returns how many processes this job has on this host, as its launcher says; 1 if it says nothing.

    Where one launcher starts another, as Slurm does torchrun, the numbers of the nearest one count.
    """
    text = _first(_LOCAL_SIZES)
    return max(int(text), 1) if text and _first(_LOCAL_RANKS) else 1


def sharing(devices: int | None = None) -> int:
    """Returns how many processes of this job use this one's device, if each takes the next one of `devices`.

    Without `devices` all on this host do. A process that is shown one device by CUDA_VISIBLE_DEVICES has it alone: its
    launcher chose.
    """
    if devices is None:
        return local_size()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if devices == 1 and shown and "," not in shown:
        return 1
    return -(-local_size() // max(devices, 1))


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
