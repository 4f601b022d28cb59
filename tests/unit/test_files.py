"""Files are written whole, and what is no plain file stays what it is: /dev/null as root, a pipe, a link."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from planning_traces import resnet50

from swapd.plan import Plan
from swapd.summary import write_summary

WRITERS: dict[str, Callable[[Path], None]] = {
    "summary": lambda path: write_summary(path, {"steps": 3}),
    "plan": lambda path: Plan().save(path),
    "trace": lambda path: resnet50(1).save(path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path, writer: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    WRITERS[writer](pipe)
    written = stat.S_ISFIFO(pipe.lstat().st_mode)
    if not written:
        os.unlink(pipe)
    assert written, "replaced by a plain file"
    reader.join(timeout=60)
    plain = tmp_path / "plain"
    WRITERS[writer](plain)
    assert read == [plain.read_bytes()]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, writer: str) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    WRITERS[writer](link)
    assert link.is_symlink()
    assert target.read_bytes() != b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, writer: str) -> None:
    folder = tmp_path / "file"
    folder.mkdir()
    (folder / "inside").write_text("kept")
    with pytest.raises(IsADirectoryError):
        WRITERS[writer](folder)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (folder / "inside").read_text() == "kept"
