"""Calls that fail beneath the program: of the driver, and of what writes files. The same bits, or a named error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import EMULATED, code, run, run_source, write_script
from test_errors import TRAIN_SIX, TRAINING_BUDGET


@pytest.fixture(scope="module")
def plain_training(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What TRAIN_SIX prints in plain memory."""
    return run_source(tmp_path_factory.mktemp("plain"), TRAIN_SIX, OOC_ALLOC="0").check().output


OUTPUTS = ("OOC_SUMMARY", "OOC_TRACE", "OOC_METRICS_FILE", "OOC_REPORT", "OOC_TIMELINE")


@pytest.mark.parametrize("fails", ["write", pytest.param("rename", marks=pytest.mark.slow)])
@pytest.mark.medium
def test_no_output_can_be_written(tmp_path: Path, plain_training: str, fails: str) -> None:
    """All of them at once: the results are right, each is named in a warning, and what was there before is whole."""
    refuse = f"""
        import errno, os

        plain = os.replace

        def replace(source, target):
            if str(target).startswith({str(tmp_path)!r}):
                raise OSError(errno.EIO, os.strerror(errno.EIO), source)
            plain(source, target)

        os.replace = replace  # before the session begins, which writes at once
    """
    files = {name: tmp_path / f"{name}.json" for name in OUTPUTS}
    for path in files.values():
        path.write_text("old")
    places = {name: "/dev/full" if fails == "write" else str(path) for name, path in files.items()}
    script = write_script(tmp_path, code(refuse if fails == "rename" else "", TRAIN_SIX))
    # An interpreter of its own: a forked one begins the session before the script.
    ended = run(["-s", script], {**EMULATED, "OOC_BUDGET": TRAINING_BUDGET, **places}).check()
    assert ended.output == plain_training
    assert "Traceback" not in ended.errors, ended.errors
    reason = "No space left on device" if fails == "write" else "Input/output error"
    warnings = [line for line in ended.errors.splitlines() if reason in line]
    for words in ("the summary", "the trace", "the metrics"):
        assert sum(words in line for line in warnings) == 1, (words, ended.errors)
    assert len(warnings) == len(OUTPUTS), ended.errors
    assert {path.read_text() for path in files.values()} == {"old"}
    assert not list(tmp_path.glob(".*.tmp"))


# ---- driver calls that fail -----------------------------------------------------------------------------------------


# The sample of `tests/faults` lets these calls fail, too.
ALIKE = (
    "cuMemcpyDtoHAsync:every=7",
    "cuMemcpyHtoDAsync:every=7",
    "cuMemSetAccess:every=13",
    "cuMemUnmap:every=13",
    "cuEventRecord:every=5;cuEventCreate:every=5;cuEventQuery:every=5",
)


@pytest.mark.parametrize(
    "faults",
    [
        *(pytest.param(rule, marks=pytest.mark.slow) for rule in ALIKE),
        "cuMemcpyDtoHAsync:probability=0.3,seed=1;cuMemcpyHtoDAsync:probability=0.3,seed=2",
        "cuMemMap:every=13",
        "cuMemCreate:after=100,error=2",
        "cuEventCreate:every=1;cuStreamQuery:every=3",  # without events, streams are drained
    ],
)
@pytest.mark.medium
def test_driver_calls_that_fail(tmp_path: Path, plain_training: str, faults: str) -> None:
    """The same bits all the same, or an error that names the call; never a crash, a hang or other bits."""
    ended = run_source(tmp_path, TRAIN_SIX, OOC_BUDGET=TRAINING_BUDGET, OOC_EMULATED_FAULTS=faults)
    if ended.status == 0:
        assert ended.output == plain_training
        assert ended.figures["driver_failure_count"] > 0, "nothing was injected"
    else:
        assert ended.status == 1, ended.errors
        assert ended.output == ""
        assert re.search(r"(RuntimeError|OutOfMemoryError): .*(failed|budget)", ended.errors), ended.errors
    assert ended.figures["final"]


# The operators are larger than the budget, so each runs in parts.
IN_PARTS = """
    import torch

    def attempt(what):
        try:
            return what()
        except RuntimeError as error:
            print(type(error).__name__, error)

    x = attempt(lambda: torch.arange(6 << 20, dtype=torch.float32))
    if x is not None:
        results = [attempt(lambda: x.add(1)), attempt(x.sum), attempt(lambda: x.view(-1, 1024) @ torch.ones(1024, 64))]
        for result in results:
            if result is not None:
                attempt(lambda: print(result.double().sum().item()))
"""


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemUnmap"])
@pytest.mark.medium
def test_a_driver_that_refuses_is_no_reason_for_smaller_parts(tmp_path: Path, call: str) -> None:
    """Parts of parts of parts fail like the whole: this did not end."""
    variables = {"OOC_BUDGET": "8MiB", "OOC_SMALL_LIMIT": "32KiB", "OOC_SPLIT_STORE": str(tmp_path / "store.sqlite")}
    ended = run_source(tmp_path, IN_PARTS, OOC_EMULATED_FAULTS=call, **variables).check()
    first = ended.output.splitlines()[0]
    assert first.startswith("RuntimeError") and "the driver refused cuMem" in first, ended.output
    assert "CUDA_ERROR" in first
    assert "safe" in first or "for a variable" in first  # a new one has nothing to lose
