"""What a summary says of plans: of which sequence, and why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from metrics_programs import run_numpy, samples, value


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
            time.sleep(0.01)

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
