"""What a summary says of plans, of which sequence, and why there is none; and of what a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from metrics_programs import run_numpy, samples, value
from processes import read_summary, run_source

from swapd.planning.problem import Problem
from swapd.trace.trace import Trace


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        # Each iteration has one function more than the one before.
        ("for n in range(12): [fill(a) for a in arrays * 2][:1]; [add(arrays[i % 8], arrays[0]) for i in range(n)]; "
         "device.step()", "had a sequence of functions that never came again"),
        ("[fill(a) for a in arrays * 4]", "no iteration was found: call ooc.step()"),
    ],
    ids=["other sequences", "no boundary"],
)  # fmt: skip
def test_summary_says_why_there_is_no_plan(source: str, reason: str, tmp_path: Path) -> None:
    figures = run_numpy(tmp_path, source).check().figures
    assert figures["planned_iteration_count"] == 0
    assert reason in figures["no_plan_reason"]


def test_figures_are_of_the_sequence_that_took_the_most_time(tmp_path: Path) -> None:
    """Training, then its validation, whose plan is the last one and whose steps are the later half."""
    source = """
        def train():
            for array in arrays:
                fill(array)
                slow(array)
            device.step()

        @device.function(reads=("source",))
        def slow(source):
            time.sleep(0.03)

        device.step()
        for _ in range(8):
            train()
        for _ in range(20):
            step()
        """
    ended = run_numpy(tmp_path, source, OOC_METRICS_FILE=str(tmp_path / "ooc.prom")).check()
    figures = ended.figures
    assert figures["plan_count"] > 2 and figures["steps"] >= 28
    assert figures["main_step_count"] == 8
    assert figures["main_step_seconds"] >= 8 * 0.01
    assert min(figures["predicted_step_seconds"], figures["bound_step_seconds"]) >= 8 * 0.01
    found = samples((tmp_path / "ooc.prom").read_text())
    assert value(found, "step_over_bound_ratio") * figures["bound_step_seconds"] >= 8 * 0.01


def test_what_is_needed_is_what_a_run_needs_where_most_tensors_are_small(tmp_path: Path) -> None:
    """A run and its trace name one budget: nothing moves in it, and less is too little, as slabs get at most half."""
    source = """
        import torch

        parameters = [torch.nn.Parameter(torch.full((3000,), 1.0 + i)) for i in range(400)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)
        for step in range(4):
            optimizer.zero_grad()
            sum(parameter.square().mean() for parameter in parameters).backward()
            optimizer.step()
        """
    settings = {"OOC_SMALL_LIMIT": "16KiB", "OOC_SPLIT": "off"}
    trace = tmp_path / "a.trace"
    roomy = run_source(tmp_path, source, OOC_BUDGET="64MiB", OOC_TRACE=str(trace), **settings).check().figures
    problem = Problem.from_trace(Trace.load(trace), 0)
    least = roomy["min_budget_bytes"]
    assert least == roomy["fit_budget_bytes"] == problem.min_budget_bytes == problem.fit_budget_bytes
    enough = run_source(tmp_path, source, OOC_BUDGET=str(least), **settings).check().figures
    assert enough["swap_out_bytes"] + enough["clean_drop_bytes"] == 0
    less = run_source(tmp_path, source, OOC_BUDGET=str(least // 2 + (512 << 10)), **settings)
    assert less.status != 0 and "OutOfMemoryError" in less.errors


def test_what_is_needed_in_core_is_what_a_run_needs_to_move_nothing(tmp_path: Path) -> None:
    source = """
        import torch

        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(96, 256)).square().mean().backward()
            optimizer.step()
        """
    fit = run_source(tmp_path, source, OOC_BUDGET="1500000").check().figures["fit_budget_bytes"]
    for budget, fits in ((fit, True), (fit - (64 << 10), False)):
        figures = run_source(tmp_path, source, OOC_BUDGET=str(budget)).check().figures
        assert (figures["swap_out_bytes"] + figures["clean_drop_bytes"] == 0) == fits
        assert figures["fit_budget_bytes"] == fit


@pytest.mark.medium
def test_a_share_of_the_device_is_divided_among_the_ranks_on_it(tmp_path: Path) -> None:
    source = "import torch; x = torch.ones(1 << 20); print(float(x.sum()))"
    job = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "RANK": "1", "OOC_EMULATED_MEMORY": "64MiB"}
    for budget, each, ranks in (("50%", 8 << 20, 4), ("8MiB", 8 << 20, 1)):
        folder = tmp_path / budget
        folder.mkdir()
        run_source(folder, source, OOC_BUDGET=budget, **job).check()
        figures = read_summary(folder / "summary.rank1.json")
        assert figures is not None
        assert (figures["budget_bytes"], figures["budget_rank_count"]) == (each, ranks)
