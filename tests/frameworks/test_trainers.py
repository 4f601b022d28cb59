"""Trainers of libraries with our callbacks, out-of-core: the bits of a plain run, resumed from a checkpoint or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from metrics_programs import free_ports
from processes import EMULATED, HERE, PROGRAMS, TIMEOUT_SECONDS, Nursery, read_summary
from test_programs import check_identical, check_within_budget

from ooc.trainers import LOGGED, PREFIX

TRAINERS = HERE / "trainers"
BUDGET = 14 << 20  # bytes; the live peak is more than 2.5 times this
STEPS = 8
LIBRARIES = ("hf_trainer", "lightning_trainer", "accelerate_loop")
IMPORTED = ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "accelerate", "lightning.pytorch")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery(*IMPORTED, path=PROGRAMS)
    yield started
    started.close()


class Job:
    """Runs one program on some ranks, each in a process of its own; `folder` has a folder for each run."""

    def __init__(self, nursery: Nursery, program: str, ranks: int, folder: Path) -> None:
        self.nursery, self.program, self.ranks, self.folder = nursery, TRAINERS / f"{program}.py", ranks, folder

    def run(self, name: str, resume: Path | None = None, **variables: str) -> Path:
        """The folder of the run, which has the results of each rank, and what each of them printed."""
        folder = self.folder / name
        folder.mkdir()
        port = str(free_ports(1))
        variables = {"TQDM_DISABLE": "", **variables, "OOC_SUMMARY": str(folder / "summary.json")}

        def rank(number: int) -> str:
            launched = {"RANK": str(number), "LOCAL_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            launched |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks), "NODE_RANK": "0"}
            arguments: list[str | Path] = [self.program, "--folder", folder, "--save", folder / f"results.{number}.pt"]
            arguments += ["--resume", resume] if resume else []
            ended = self.nursery.run(arguments, variables | (launched if self.ranks > 1 else {}), TIMEOUT_SECONDS)
            return ended.check().output

        with ThreadPoolExecutor(self.ranks) as together:
            (folder / "output").write_text("".join(together.map(rank, range(self.ranks))))
        return folder

    def out_of_core(self, name: str, resume: Path | None = None, **variables: str) -> Path:
        """Within the budget, with the results of the plain run."""
        folder = self.run(name, resume, **EMULATED, OOC_BUDGET=str(BUDGET), **variables)
        for number in range(self.ranks):
            check_identical(self.folder / "plain" / f"results.{number}.pt", folder / f"results.{number}.pt")
            figures = self.figures(folder, number)
            check_within_budget(figures, BUDGET)
            assert figures["live_peak_bytes"] > 2.5 * BUDGET, "the program is too small to show anything"
            if self.ranks == 1:  # the buckets of DDP, which hold all gradients, stay on the device
                assert figures["min_budget_bytes"] < BUDGET // 2, "checkpoints pin nothing"
        return folder

    def figures(self, folder: Path, rank: int) -> dict[str, Any]:
        found = read_summary(folder / (f"summary.rank{rank}.json" if self.ranks > 1 else "summary.json"))
        assert found is not None and found["final"]
        return found


def check_logged(folder: Path, steps: int, figures: dict[str, Any]) -> None:
    """What is in the trainer's log is what the summary said then; and at the end nothing but the checkpoint follows."""
    seen = json.loads((folder / "figures.json").read_text())
    assert len(seen["logged"]) == len(seen["summaries"]) >= steps
    for entry, summary in zip(seen["logged"], seen["summaries"]):
        assert {name: entry[PREFIX + name] for name in LOGGED} == {name: summary[name] for name in LOGGED}
    last = seen["logged"][-1]
    assert last["ooc_steps"] == figures["steps"] == steps
    assert last["ooc_live_peak_bytes"] == figures["live_peak_bytes"]
    assert last["ooc_planned_iteration_count"] == figures["planned_iteration_count"]
    assert 0 < last["ooc_swap_in_bytes"] <= figures["swap_in_bytes"]
    bar = seen["bar"] or (folder / "output").read_text()
    assert "ooc_swap_in_bytes" in bar or "accelerate" in folder.parent.name


def reports(folder: Path) -> list[str]:
    found = sorted(folder.rglob("ooc_report*.html"))
    assert all("<svg" in path.read_text() for path in found)
    return [path.name for path in found]


def check_resumed(job: Job, checkpoint: str, **variables: str) -> None:
    folder = job.out_of_core("resumed", job.folder / checkpoint, **variables)
    check_logged(folder, STEPS // 2, job.figures(folder, 0))
    expected = [f"ooc_report.rank{rank}.html" for rank in range(job.ranks)] if job.ranks > 1 else ["ooc_report.html"]
    assert reports(folder) == expected


def check_job(job: Job, **variables: str) -> None:
    job.run("plain", OOC_ALLOC="0")
    whole = job.out_of_core("whole", **variables)
    assert job.figures(whole, 0)["planned_iteration_count"] > 0
    check_logged(whole, STEPS, job.figures(whole, 0))
    check_resumed(job, "whole", **variables)


@pytest.mark.parametrize("program", LIBRARIES)
@pytest.mark.medium
def test_trainer(program: str, nursery: Nursery, tmp_path: Path) -> None:
    """The checkpoint of a plain run is resumed within the budget; the slow tests make their own there."""
    (tmp_path / program).mkdir()
    job = Job(nursery, program, 1, tmp_path / program)
    plain = job.run("plain", OOC_ALLOC="0")
    assert reports(plain) == [] and json.loads((plain / "figures.json").read_text())["summaries"] == []
    check_resumed(job, "plain", OOC_POLICY="idle")  # the quickest to plan, and to advise on


@pytest.mark.slow
@pytest.mark.parametrize("program", LIBRARIES)
def test_trainer_on_one_rank(program: str, nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / program).mkdir()
    check_job(Job(nursery, program, 1, tmp_path / program))


@pytest.mark.slow
@pytest.mark.parametrize("program", LIBRARIES)
def test_trainer_on_two_ranks(program: str, nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / program).mkdir()
    check_job(Job(nursery, program, 2, tmp_path / program))


@pytest.mark.slow
@pytest.mark.parametrize("program", LIBRARIES)
def test_trainer_on_disk(program: str, nursery: Nursery, tmp_path: Path) -> None:
    for name in (program, "disk"):
        (tmp_path / name).mkdir()
    check_job(Job(nursery, program, 1, tmp_path / program), OOC_DISK=str(tmp_path / "disk"))
    assert list((tmp_path / "disk").iterdir()) == []
