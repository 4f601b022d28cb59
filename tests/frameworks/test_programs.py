"""Programs that know nothing of us, out-of-core: the same bits, within the budget.

Each runs in plain memory, and with a third of its live peak or what its largest function needs, whichever is more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import EMULATED, PROGRAMS, Ended, Nursery, load_compare, run

# MiB: a third of the live peak, or the smallest budget where that is larger.
BUDGETS = {
    "adamw_foreach": 30, "autocast_bf16": 25, "changing_shapes": 56, "checkpointing": 29, "complex_tensors": 21,
    "densenet": 48, "exceptions": 28, "generation": 13, "hf_bert": 51, "hf_gpt2": 74, "hf_llama": 31, "hf_t5": 40,
    "in_place": 13, "inference": 20, "lstm": 61, "numpy_bridge": 29, "raw_pointers": 23, "save_load_middle": 42,
    "sparse_gradients": 24, "threads": 44, "torch_func": 17, "train_validate": 33, "two_optimizers": 24, "unet": 42,
}  # fmt: skip
# Much as another one, as far as memory goes.
ALIKE = {
    "adamw_foreach", "autocast_bf16", "densenet", "generation", "hf_bert", "hf_llama", "hf_t5", "inference",
    "torch_func", "train_validate", "two_optimizers", "unet",
}  # fmt: skip
QUICK = {"complex_tensors", "in_place", "raw_pointers"}  # in `make test` itself
# These need a process of their own: they start processes, or are about how one ends.
ALONE = {"compiled_blocks": 36, "dataloader": 30, "exit_live": 12, "exit_running": 73}
# Steady loops: after two iterations each is as the one before, and nothing but the end departs from it.
STEADY = {"hf_gpt2", "hf_llama", "hf_bert", "hf_t5", "lstm", "densenet", "unet", "autocast_bf16", "inference"}
AT_THE_MINIMUM = ("hf_gpt2", "unet", "adamw_foreach", "train_validate")
ON_DISK, IN_TIERS = {"hf_gpt2", "in_place"}, {"save_load_middle", "threads"}  # not in `make test-slow` alone
LARGEST = {"torch_func": 9}  # MiB of host memory in which its largest variable fits: else it cannot leave
STRICT = ("in_place", "complex_tensors", "torch_func", "sparse_gradients", "lstm", "raw_pointers")

DROPPING = {"in_place", "threads", "torch_func"}  # not in `make test-slow` alone
FEW_DROPS = {"inference"}
EVERYTHING = {"_OOC_RECOMPUTE_EVERYTHING": "1"}

compare = load_compare().compare


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery("transformers", "program", path=PROGRAMS)
    yield started
    started.close()


class Library:
    """Runs each program once in plain memory, and once with memory to spare where somebody asks what it needs."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery, self.folder = nursery, folder
        self._measured: dict[str, dict[str, Any]] = {}

    def _run(self, name: str, folder: Path, variables: dict[str, str]) -> Ended:
        arguments: list[str | Path] = [PROGRAMS / f"{name}.py", "--save", folder / "results.pt"]
        return run(arguments, variables, summary=folder / "summary.json", nursery=self.nursery).check()

    def plain(self, name: str) -> Path:
        """The results in plain memory."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            self._run(name, folder, {"OOC_ALLOC": "0"})
        return folder / "results.pt"

    def out_of_core(self, name: str, folder: Path, **variables: str) -> dict[str, Any]:
        """The figures of a run, whose results are found to be those of the plain run."""
        ended = self._run(name, folder, EMULATED | variables)
        check_identical(self.plain(name), folder / "results.pt")
        check_within_budget(ended.figures, ended.figures["budget_bytes"])
        return ended.figures

    def measured(self, name: str) -> dict[str, Any]:
        """The figures of a run with memory to spare."""
        if name not in self._measured:
            folder = self.folder / f"{name}-measured"
            folder.mkdir()
            self._measured[name] = self.out_of_core(name, folder)
        return self._measured[name]


@pytest.fixture(scope="module")
def library(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(nursery, tmp_path_factory.mktemp("programs"))


def check_identical(first: Path, second: Path) -> None:
    """Every tensor's bytes and every other value are the same in both files."""
    report = compare(*(torch.load(path, weights_only=True) for path in (first, second)))
    assert report["identical"], report["differences"]
    assert report["tensors"] > 0


def check_within_budget(figures: dict[str, Any], budget: int) -> None:
    assert figures["budget_bytes"] == budget
    assert 0 < figures["device_peak_bytes"] <= budget
    assert figures["min_budget_bytes"] <= budget
    assert figures["external_fragmentation_ratio"] == 0
    assert figures["driver_failure_count"] == 0
    if figures["live_peak_bytes"] > budget:
        assert figures["swap_in_bytes"] > 0
        assert figures["swap_out_bytes"] + figures["clean_drop_bytes"] > 0


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.slow] if name in ALIKE else [pytest.mark.medium]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in sorted(BUDGETS)])
def test_program(name: str, library: Library, tmp_path: Path) -> None:
    budget = BUDGETS[name] << 20
    figures = library.out_of_core(name, tmp_path, OOC_BUDGET=str(budget))
    assert figures["live_peak_bytes"] > 1.2 * budget, "the program is too small to show anything"
    if name in STEADY:
        assert figures["divergence_count"] == 0
        assert figures["planned_iteration_count"] > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ON_DISK)) for name in sorted(BUDGETS)]
)
@pytest.mark.medium
def test_program_on_disk(name: str, library: Library, tmp_path: Path) -> None:
    """What does not fit lies on a disk: the same bits, and no memory for it, nor anything that stays in the folder."""
    (tmp_path / "disk").mkdir()
    budget = BUDGETS[name] << 20
    figures = library.out_of_core(name, tmp_path, OOC_BUDGET=str(budget), OOC_DISK=str(tmp_path / "disk"))
    check_on_disk(figures, tmp_path / "disk")
    if name in STEADY:
        assert figures["planned_iteration_count"] > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_TIERS)) for name in sorted(BUDGETS)]
)
@pytest.mark.medium
def test_program_in_three_tiers(name: str, library: Library, tmp_path: Path) -> None:
    """A device, little host memory, and a disk below it: the same bits, within both budgets, planned on both levels."""
    (tmp_path / "disk").mkdir()
    budget = BUDGETS[name] << 20
    half = (library.measured(name)["live_peak_bytes"] - budget) >> 21  # in whole MiB
    host = max(half, LARGEST.get(name, 0)) << 20
    settings = {"OOC_BUDGET": budget, "OOC_HOST_BUDGET": host, "OOC_DISK": tmp_path / "disk"}
    figures = library.out_of_core(name, tmp_path, **{name: str(value) for name, value in settings.items()})
    assert 0 < figures["host_peak_bytes"] <= host
    assert figures["disk_written_bytes"] > 0 and figures["disk_read_bytes"] > 0
    assert list((tmp_path / "disk").iterdir()) == []
    if name in STEADY:
        assert figures["planned_iteration_count"] > 0


def check_on_disk(figures: dict[str, Any], folder: Path) -> None:
    assert figures["host_peak_bytes"] == 0
    assert figures["disk_peak_bytes"] >= figures["live_peak_bytes"] - figures["budget_bytes"]
    assert figures["disk_written_bytes"] >= figures["swap_out_bytes"] > 0
    assert figures["disk_read_bytes"] >= figures["swap_in_bytes"] > 0
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_memory_to_spare(name: str, library: Library) -> None:
    figures = library.measured(name)
    assert figures["swap_in_bytes"] == figures["swap_out_bytes"] == 0
    assert figures["min_budget_bytes"] <= BUDGETS[name] << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_THE_MINIMUM)
def test_smallest_budget(name: str, library: Library, tmp_path: Path) -> None:
    """The budget that a run with memory to spare names as the smallest is enough."""
    library.out_of_core(name, tmp_path, OOC_BUDGET=str(library.measured(name)["min_budget_bytes"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT)
def test_strict(name: str, library: Library, tmp_path: Path) -> None:
    """All that is not pinned leaves before every operator: whoever still reads it reads other bytes, or faults."""
    needs, live_peak = (library.measured(name)[key] for key in ("min_budget_bytes", "live_peak_bytes"))
    figures = library.out_of_core(name, tmp_path, OOC_BUDGET=str(max(needs, live_peak // 2)), OOC_STRICT="1")
    assert figures["swap_in_bytes"] > 2 * live_peak


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DROPPING)) for name in sorted(BUDGETS)]
)
@pytest.mark.medium
def test_dropping_everything(name: str, library: Library, tmp_path: Path) -> None:
    """Whatever can be made again is given up as soon as a function has ended; each time its bytes are compared."""
    figures = library.out_of_core(name, tmp_path, OOC_STRICT="1", OOC_SMALL_LIMIT="4KiB", **EVERYTHING)
    assert figures["recompute_drop_count"] > (50 if name not in FEW_DROPS else 0)
    assert name in FEW_DROPS or figures["recompute_function_count"] > 20


# ---- programs that need a process of their own ----------------------------------------------------------------------


def run_alone(name: str, folder: Path, variables: dict[str, str]) -> Ended:
    folder.mkdir(exist_ok=True)
    arguments: list[str | Path] = ["-s", PROGRAMS / f"{name}.py", "--save", folder / "results.pt"]
    return run(arguments, variables, summary=folder / "summary.json").check()


def both_alone(name: str, folder: Path, **variables: str) -> dict[str, Any]:
    """The figures of a run within the budget, whose results are those of a run in plain memory."""
    budget = ALONE[name] << 20
    run_alone(name, folder / "plain", variables)
    figures = run_alone(name, folder / "small", {**EMULATED, **variables, "OOC_BUDGET": str(budget)}).figures
    check_identical(folder / "plain" / "results.pt", folder / "small" / "results.pt")
    check_within_budget(figures, budget)
    assert figures["final"]
    assert figures["live_peak_bytes"] > 1.2 * budget
    return figures


# A loader's processes are tested one way at a time in test_robustness.py.
@pytest.mark.parametrize(
    "name", ["exit_live", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dataloader", "exit_running"))]
)
@pytest.mark.medium
def test_program_alone(name: str, tmp_path: Path) -> None:
    both_alone(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exit_live", "dataloader"])
def test_program_alone_on_disk(name: str, tmp_path: Path) -> None:
    """A forked process has copies of its own of what is on the disk; how a process ends changes nothing there."""
    (tmp_path / "disk").mkdir()
    check_on_disk(both_alone(name, tmp_path, OOC_DISK=str(tmp_path / "disk")), tmp_path / "disk")


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    """A model compiled block by block, against the same compiled model in plain memory."""
    figures = both_alone("compiled_blocks", tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    assert figures["divergence_count"] == 0
    assert figures["planned_iteration_count"] > 0
