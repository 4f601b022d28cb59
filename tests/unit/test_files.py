"""Files are written whole, and what is no plain file stays what it is: /dev/null as root, a pipe, a link."""

from __future__ import annotations

import errno
import io
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
from swapd.planning.plan import Plan
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


def test_a_pipe_gets_more_than_it_holds_at_once(tmp_path: Path) -> None:
    pipe, content = tmp_path / "pipe", bytes(range(256)) * 4096
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, content)
    reader.join(timeout=60)
    assert read == [content]


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


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", ["open", "write", "close", "rename", "rename, and the clean-up"])
def test_whichever_step_fails_the_old_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    real_open = io.open

    def failing(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    class Failing(io.FileIO):
        def write(self, content: object) -> int:
            if step == "write":
                super().write(bytes(content)[:2])  # type: ignore[call-overload]
                failing()
            return super().write(content)  # type: ignore[arg-type]

        def close(self) -> None:
            closes = not self.closed
            super().close()
            if step == "close" and closes:
                failing()

    def opened(name: object, mode: str = "r", *rest: object, **more: object) -> object:
        if "w" not in mode:
            return real_open(name, mode, *rest, **more)  # type: ignore[call-overload]
        return failing() if step == "open" else Failing(os.fspath(name), mode)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", opened)
        if step.startswith("rename"):
            patch.setattr(os, "replace", failing)
        if step.endswith("clean-up"):
            patch.setattr(Path, "unlink", lambda *_, **__: os.stat(tmp_path / "another failure"))
        with pytest.raises(OSError, match=os.strerror(error)):
            write_whole(path, b"the new content")
    assert path.read_bytes() == b"old"
    left = [each.name for each in tmp_path.iterdir()]
    assert left == ["file"] if not step.endswith("clean-up") else "file" in left
