"""Which process of a job exports, under which rank, port and file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swapd import ranks
from swapd.ranks import own_file

MARK = "_OOC_TEST_OF"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (*ranks._RANKS, *ranks._LOCAL_RANKS, *ranks._LOCAL_SIZES, *ranks._SLURM_TASKS)
    for name in (*numbers, "NODE_RANK", "CUDA_VISIBLE_DEVICES", MARK):
        monkeypatch.setenv(name, "")  # so that what a test leaves there is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py"])


@pytest.mark.parametrize(
    ("arguments", "launches"),
    [
        (["python", "train.py", "torchrun"], False),
        (["python", "-u", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "/x/bin/torchrun", "--nproc-per-node", "2", "train.py"], True),
        (["python", "-m", "accelerate", "launch"], True),
        (["python", "/x/bin/accelerate-launch", "train.py"], True),
        (["python", "-u", "-m", "deepspeed.launcher.launch", "train.py"], True),
        (["python", "-c", "import torch"], False),
        (["python", "-m", "train", "torchrun"], False),
        (["python", "-m"], False),
        (["python"], False),
    ],
)
def test_launchers(arguments: list[str], launches: bool) -> None:
    assert ranks.is_launcher(arguments) == launches


def test_a_program_exports_and_its_child_processes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.claim(MARK)
    assert ranks.claim(MARK)  # a second session
    monkeypatch.setattr(os, "getpid", lambda: 1)  # what a started process sees
    assert not ranks.claim(MARK)


def test_ranks_export_whoever_launched_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.claim(MARK)  # an unknown launcher, which imported PyTorch
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ranks.claim(MARK)
    monkeypatch.setattr(os, "getpid", lambda: 2)
    assert not ranks.claim(MARK)  # a worker of the rank
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks.claim(MARK)


def test_a_launcher_exports_nothing_and_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "torch.distributed.run", "train.py"])
    assert not ranks.claim(MARK)
    assert MARK not in os.environ


def test_rank_labels_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.rank(), ranks.local_rank(), own_file(Path("/x/ooc.prom"))) == ("0", None, Path("/x/ooc.prom"))
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (ranks.rank(), ranks.local_rank(), own_file(Path("/x/ooc.prom"))) == ("11", 3, Path("/x/ooc.rank11.prom"))
    assert own_file(None) is None
    assert own_file(Path("/x/t.json.gz")) == Path("/x/t.rank11.json.gz")
    assert own_file(Path("/x/none")) == Path("/x/none.rank11")
    assert own_file(Path("/dev/stdout")) == Path("/dev/stdout")
    monkeypatch.setenv("LOCAL_RANK", "three")
    assert ranks.local_rank() is None


@pytest.mark.parametrize(
    ("variables", "number", "local"),
    [
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "5", 1),
        ({"PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, "2", 0),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, "9", 1),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, "0", None),
        ({"RANK": "4", "LOCAL_RANK": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, "4", 0),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, "1", 1),
        ({"LOCAL_RANK": "1", "NODE_RANK": "2"}, "2.1", 1),  # another host's rank 1 may write into the same folder
    ],
)
def test_what_launchers_say(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], number: str, local: int | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (ranks.rank(), ranks.local_rank()) == (number, local)


@pytest.mark.parametrize(
    ("variables", "devices", "together"),
    [
        ({}, None, 1),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, None, 4),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 4, 1),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 3, 2),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1, 4),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 1, 1),  # it has that one alone
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None, 2),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "3"}, None, 3),
        ({"SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "8"}, None, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 1),  # of a launcher, which is no rank
    ],
)
def test_processes_that_share_a_device(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: int | None, together: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks.sharing(devices) == together
