"""Which process of a job exports, under which rank, port and file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from integrations.prometheus import ranks
from integrations.prometheus.exporter import own_file, push_url


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", ranks._OWNER):
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
        (["python", "-c", "import torch"], False),
        (["python", "-m", "train", "torchrun"], False),
        (["python", "-m"], False),
        (["python"], False),
    ],
)
def test_launchers(arguments: list[str], launches: bool) -> None:
    assert ranks.is_launcher(arguments) == launches


def test_a_program_exports_and_its_child_processes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.claim()
    assert ranks.claim()  # a second session
    monkeypatch.setattr(os, "getpid", lambda: 1)  # what a started process sees
    assert not ranks.claim()


def test_ranks_export_whoever_launched_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.claim()  # an unknown launcher, which imported PyTorch
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ranks.claim()
    monkeypatch.setattr(os, "getpid", lambda: 2)
    assert not ranks.claim()  # a worker of the rank
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks.claim()


def test_a_launcher_exports_nothing_and_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "torch.distributed.run", "train.py"])
    assert not ranks.claim()
    assert ranks._OWNER not in os.environ


def test_rank_labels_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.rank(), ranks.local_rank(), own_file(Path("/x/ooc.prom"))) == ("0", None, Path("/x/ooc.prom"))
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (ranks.rank(), ranks.local_rank(), own_file(Path("/x/ooc.prom"))) == ("11", 3, Path("/x/ooc.rank11.prom"))
    assert own_file(None) is None
    monkeypatch.setenv("LOCAL_RANK", "three")
    assert ranks.local_rank() is None


def test_groups_at_a_pushgateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node 7")
    assert push_url("http://gateway:9091", "night run") == (
        "http://gateway:9091/metrics/job/night%20run/instance/node%207/rank/0"
    )
