"""The files that a session leaves: which process writes which, and pipes, which get what they get once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swapd.cli import main
from swapd.trace.trace import Trace

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "OOC_ALLOC": "emulated", "OOC_BUDGET": "2MiB", "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB",
    "OOC_EMULATED_MEMORY": "16MiB", "OOC_PLANNING": "blocking",
}  # fmt: skip
FILES = {"OOC_SUMMARY": "s.json", "OOC_TRACE": "t.trace", "OOC_TIMELINE": "t.json.gz", "OOC_REPORT": "r.html"}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **SETTINGS, **variables}
    command = [sys.executable, str(HERE / "status_child.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_pipes_are_written_once_at_the_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    ended = run(
        "once",
        OOC_SUMMARY="/dev/stdout",
        OOC_TRACE=str(tmp_path / "pipe"),
        OOC_TIMELINE="/dev/null",
        OOC_REPORT="/dev/stderr",
    )
    reader.join(timeout=60)
    ready, _, summary = ended.stdout.partition("\n")
    assert ready == "ready"
    assert json.loads(summary)["final"]
    assert Trace.from_bytes(read[0]).functions > 0
    assert ended.stderr.startswith("<!doctype html>") and ended.stderr.rstrip().endswith("</html>")
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({}, ""),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ""),
        ({"RANK": "1", "LOCAL_RANK": "0", "SLURM_PROCID": "7"}, ".rank1"),
        ({"OMPI_COMM_WORLD_RANK": "3", "_OOC_SESSION_OF": "1:/"}, ".rank3"),  # its launcher had a session too
        ({"_OOC_SESSION_OF": "1:/"}, ".PID"),
        ({"RANK": "1", "_OOC_SESSION_OF": "1:1/"}, ".rank1.PID"),
    ],
)
@pytest.mark.medium
def test_each_process_has_files_of_its_own(tmp_path: Path, variables: dict[str, str], word: str) -> None:
    run("once", **{name: str(tmp_path / file) for name, file in FILES.items()}, **variables)
    summary = next(tmp_path.glob("s.*json"))
    word = word.replace("PID", str(json.loads(summary.read_text())["pid"]))
    assert names(tmp_path) == sorted([f"s{word}.json", f"t{word}.trace", f"t{word}.json.gz", f"r{word}.html"])


def test_a_process_that_manages_nothing_writes_nothing(tmp_path: Path) -> None:
    run("idle", **{name: str(tmp_path / file) for name, file in FILES.items()})
    assert names(tmp_path) == []
    assert run("idle", OOC_SUMMARY="/dev/stdout").stdout == ""


def test_a_child_process_leaves_a_pipe_to_its_parent() -> None:
    assert run("once", OOC_SUMMARY="/dev/stdout", _OOC_SESSION_OF="1:/").stdout == "ready\n"


def test_the_summary_of_a_job_is_its_first_ranks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "s.rank0.json").write_text('{"device": "of yesterday"}')
    (tmp_path / "launch.py").write_text(
        "import os, pathlib; path = pathlib.Path(os.environ['OOC_SUMMARY'])\n"
        "for rank in range(12): path.with_name(f's.rank{rank}.json').write_text('{\"device\": \"of rank %d\"}' % rank)"
    )
    assert main(["run", "--json", "-", "--summary", str(tmp_path / "s.json"), str(tmp_path / "launch.py")]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"device": "of rank 0"}
    assert "12 ranks wrote files of their own; this is s.rank0.json" in err
