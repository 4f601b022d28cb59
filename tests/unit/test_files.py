"""Files are written whole, and what is no plain file stays what it is: /dev/null as root, a pipe, a link."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from planning_traces import resnet50

from swapd import files
from swapd.files import write_whole
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


def in_a_program(path: str, stdout: int) -> bytes:
    """What is on the standard output of a program that writes to `path` between two lines."""
    source = f"from swapd.files import write_whole; print('a'); write_whole({path!r}, b'whole'); print('b')"
    return subprocess.run([sys.executable, "-c", source], stdout=stdout, check=True).stdout


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_a_descriptor_is_written_to_after_what_was_printed(tmp_path: Path, path: str) -> None:
    """Also where it leads to a plain file, which would be put aside by another one, or cut."""
    if path == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        path = str(tmp_path / "link")
    assert in_a_program(path, subprocess.PIPE) == b"a\nwholeb\n"
    with open(tmp_path / "redirected", "wb") as file:
        in_a_program(path, file.fileno())
    assert (tmp_path / "redirected").read_bytes() == b"a\nwholeb\n"


def test_a_pipe_that_nobody_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_READER_SECONDS", 0.0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="nobody reads"):
        write_whole(tmp_path / "pipe", b"x")


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
