"""Disk profiles: measured by formula and for real, kept, read back, set aside when damaged, used by a session."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swapd.cli import main
from swapd.devices import disk_probe
from swapd.devices.disk import FileSystem, describe, file_system_of, open_nameless
from swapd.devices.disk_probe import DiskError, Effort, ProbeFile, measure, probe_folder
from swapd.devices.disk_profile import (
    DiskProfile,
    DiskSpeed,
    disk_profile_path,
    known_disk,
    load_disk_profile,
    save_disk_profile,
)
from swapd.devices.profile import MachineError
from swapd.units import KIB, MIB

TINY = Effort((64 * KIB, 128 * KIB), (1, 2), 0.0, MIB)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ooc_alloc"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir()
    return made


class Formula(ProbeFile):
    """A disk whose speeds are known: 100 MB/s for each piece under way up to 4; a third less with both directions."""

    def __init__(self) -> None:
        self.system = FileSystem("/scratch", "ext4", "8:17")
        self.direct, self.bytes = True, 64 * MIB
        self.calls: list[tuple[int, int, bool, bool, float]] = []

    def speeds(self, piece_bytes: int, depth: int, read: bool, write: bool, seconds: float) -> tuple[float, float]:
        self.calls.append((piece_bytes, depth, read, write, seconds))
        speed = 1e8 * min(depth, 4) * min(piece_bytes / (2 * MIB), 1.5) * (2 / 3 if read and write else 1)
        return speed * read, speed / 2 * write


def test_measuring() -> None:
    told: list[tuple[str, int, int]] = []
    disk = Formula()
    profile = measure(disk, progress=lambda *step: told.append(step))
    sizes, depths = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB), (1, 2, 4, 8, 16)
    assert [(row.piece_bytes, row.depth) for row in profile.speeds] == [(size, d) for size in sizes for d in depths]
    assert disk.calls[:3] == [
        (256 * KIB, 1, True, False, 0.15), (256 * KIB, 1, False, True, 0.15), (256 * KIB, 1, True, True, 0.15)
    ]  # fmt: skip
    assert len(disk.calls) == 3 * len(profile.speeds)
    row = next(row for row in profile.speeds if (row.piece_bytes, row.depth) == (2 * MIB, 2))
    assert (row.read_alone, row.written_alone) == (2e8, 1e8)
    assert (row.read_with_both, row.written_with_both) == pytest.approx((2e8 * 2 / 3, 1e8 * 2 / 3))
    assert (profile.mount, profile.kind, profile.device, profile.direct) == ("/scratch", "ext4", "8:17", True)
    assert [(done, total) for _, done, total in told] == [(n, 25) for n in range(25)]


def test_the_depth_is_the_smallest_that_is_nearly_the_best_with_pieces_as_the_core_moves_them() -> None:
    profile = measure(Formula())
    assert (profile.recommended.piece_bytes, profile.recommended.depth) == (2 * MIB, 4)  # 4 MiB would be faster
    out, into = profile.machine().out_bytes_per_second, profile.machine().in_bytes_per_second
    assert (out, into) == pytest.approx((1.6e8, 4e8 * 2 / 3))

    def best(*both: float, piece: int = 2 * MIB) -> int:
        rows = tuple(DiskSpeed(piece, depth, 9.0, 9.0, speed, speed) for depth, speed in zip((1, 2, 4, 8), both))
        return dataclasses.replace(profile, speeds=rows).recommended.depth

    assert best(94.0, 95.0, 99.0, 100.0) == 2
    assert best(100.0, 50.0, 20.0, 10.0) == 1
    assert best(10.0, 20.0, 50.0, 100.0) == 8
    assert best(94.0, 95.0, 99.0, 100.0, piece=4 * MIB) == 2  # no other was measured
    assert best(94.0, 95.0, 99.0, 100.0, piece=MIB) == 2


def test_a_direction_that_is_held_up_goes_on_when_the_other_has_ended() -> None:
    def speeds(*of: float) -> tuple[float, float]:
        return DiskSpeed(2 * MIB, 1, *of).of_equal_amounts()

    assert speeds(10.0, 10.0, 5.0, 5.0) == (5.0, 5.0)
    assert speeds(8.0, 4.0, 4.0, 1.0) == pytest.approx((4.0, 1 / (1 / 4 + 3 / 4 / 4)))  # a quarter, then at 4
    assert speeds(4.0, 8.0, 1.0, 4.0) == pytest.approx((1 / (1 / 4 + 3 / 4 / 4), 4.0))
    assert speeds(8.0, 0.5, 4.0, 1.0) == pytest.approx((4.0, 1.0))  # alone it cannot be slower
    assert DiskSpeed(2 * MIB, 1, 8.0, 4.0, 4.0, 1.0).both == pytest.approx(2 / (1 / 4 + 3 / 4 / 4))


def test_a_small_file_is_measured_with_small_pieces() -> None:
    disk = Formula()
    disk.bytes = MIB
    assert {row.piece_bytes for row in measure(disk).speeds} == {256 * KIB, 512 * KIB}
    disk.bytes = 64 * KIB
    assert {row.piece_bytes for row in measure(disk).speeds} == {32 * KIB}


def test_a_file_is_measured_and_gone_afterwards(folder: Path) -> None:
    profile = probe_folder(folder, effort=TINY)
    assert [(row.piece_bytes, row.depth) for row in profile.speeds] == [
        (64 * KIB, 1), (64 * KIB, 2), (128 * KIB, 1), (128 * KIB, 2)
    ]  # fmt: skip
    assert all(speed > 0 for row in profile.speeds for speed in dataclasses.astuple(row))
    assert FileSystem(profile.mount, profile.kind, profile.device) == file_system_of(folder)
    assert profile.file_bytes == MIB
    assert list(folder.iterdir()) == []


def test_only_the_directions_that_are_asked_for_move(folder: Path) -> None:
    disk = ProbeFile(folder, MIB)
    moved: list[tuple[bool, int, int]] = []
    real = disk._move

    def noted(is_write: bool, memory: memoryview, offset: int) -> None:
        real(is_write, memory, offset)
        moved.append((is_write, len(memory), offset))

    disk._move = noted  # type: ignore[method-assign]
    assert disk.speeds(64 * KIB, 2, True, False, 0.0)[1] == 0.0
    assert sorted(moved) == [(False, 64 * KIB, MIB // 2), (False, 64 * KIB, MIB // 2 + 64 * KIB)]
    moved.clear()
    assert disk.speeds(64 * KIB, 2, False, True, 0.0)[0] == 0.0
    assert sorted(moved) == [(True, 64 * KIB, 0), (True, 64 * KIB, 64 * KIB)]
    disk.close()


def test_what_is_read_was_written(folder: Path) -> None:
    """Else a file system would answer from nothing, without the disk."""
    disk = ProbeFile(folder, MIB)
    with open(f"/proc/self/fd/{disk._file}", "rb") as plain:  # without direct I/O, and its rules
        content = plain.read()
    assert len(content) == MIB
    assert not any(content[at : at + 4096] == bytes(4096) for at in range(0, MIB, 4096))
    disk.close()


# What cannot be measured.


def test_no_folder_and_no_space_are_sentences(folder: Path) -> None:
    with pytest.raises(DiskError, match=r"no file can be made in .*absent: No such file or directory; give a folder"):
        probe_folder(folder / "absent", effort=TINY)
    (folder / "file").write_text("")
    with pytest.raises(DiskError, match=r"no file can be made in .*file: it is no folder"):
        probe_folder(folder / "file", effort=TINY)
    much = dataclasses.replace(TINY, file_bytes=1 << 50)
    with pytest.raises(DiskError, match=r"has no room for the 1024 TiB that are measured with, .* are free: make room"):
        probe_folder(folder, effort=much)
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_disk_that_fails_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ProbeFile(folder, MIB)

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DiskError, match="the disk failed while it was measured: Input/output error"):
        measure(disk, effort=TINY)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)  # it comes short, and says nothing
    with pytest.raises(DiskError, match="Input/output error"):
        measure(disk, effort=TINY)
    disk.close()


# Folders.


def refusing(monkeypatch: pytest.MonkeyPatch, flag: int, error: int) -> None:
    real = os.open

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & flag == flag:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opened)


def test_a_file_system_without_nameless_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    file, _, nameless = open_nameless(folder)
    assert not nameless
    assert os.fstat(file).st_nlink == 0
    os.close(file)
    assert list(folder.iterdir()) == []


def test_a_file_system_that_refuses_direct_io(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, os.O_DIRECT, errno.EINVAL)
    assert not describe(folder).direct
    profile = probe_folder(folder, effort=TINY)
    assert not profile.direct
    assert all(row.both > 0 for row in profile.speeds)


def test_a_file_system_that_refuses_direct_io_when_a_page_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    failed = []

    def written(file: int, *rest: Any) -> int:
        if not failed:
            failed.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, *rest)

    monkeypatch.setattr(os, "pwrite", written)
    assert not describe(folder).direct
    assert failed


def test_file_systems_are_called_as_the_kernel_does() -> None:
    assert (file_system_of(Path("/proc")).kind, file_system_of(Path("/proc")).mount) == ("proc", "/proc")
    assert not describe(Path(__file__).parent).system.mount.endswith("/unit")
    with pytest.raises(FileNotFoundError):
        file_system_of(Path("/nowhere"))


# Kept profiles.


def test_kept_and_read_back(cache: Path) -> None:
    profile = measure(Formula())
    path = save_disk_profile(profile)
    assert path == cache / "disk-8-17.json" == disk_profile_path("8:17")
    system = FileSystem("/scratch", "ext4", "8:17")
    assert load_disk_profile(system) == profile
    assert load_disk_profile(FileSystem("/scratch", "ext4", "8:18")) is None
    # A number means another disk after a restart; its file stays.
    assert load_disk_profile(FileSystem("/other", "ext4", "8:17")) is None
    assert load_disk_profile(FileSystem("/scratch", "xfs", "8:17")) is None
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_the_disk_of_a_folder_is_known_once_it_was_measured(folder: Path) -> None:
    assert known_disk(folder) is None
    profile = probe_folder(folder, effort=TINY)
    save_disk_profile(profile)
    assert known_disk(folder) == profile
    assert known_disk(folder / "absent") is None


def _damage(**changes: object) -> str:
    return json.dumps({**json.loads(measure(Formula()).to_json()), **changes})


ROW = dataclasses.asdict(DiskSpeed(2 * MIB, 1, 1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "ooc-machine", "version": 1}',
        '{"format": "ooc-disk", "version": 1}',
        measure(Formula()).to_json()[:300],
        _damage(speeds=[]),
        _damage(speeds=[{"depth": 1}]),
        _damage(speeds=7),
        _damage(speeds=[{**ROW, "depth": 0}]),
        _damage(speeds=[{**ROW, "depth": 2.5}]),
        _damage(speeds=[{**ROW, "depth": 1_000_000}]),
        _damage(speeds=[{**ROW, "read_with_both": 0}]),
        _damage(speeds=[{**ROW, "written_with_both": float("nan")}]),
        _damage(direct="yes"),
        _damage(mount=5),
        _damage(extra=5),
    ],
)
def test_a_damaged_profile_is_set_aside(cache: Path, text: str) -> None:
    with pytest.raises(MachineError):
        DiskProfile.from_json(text)
    cache.mkdir(parents=True)
    path = disk_profile_path("8:17")
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"set aside as disk-8-17.damaged. Run `swapd probe --disk` again"):
        assert load_disk_profile(FileSystem("/scratch", "ext4", "8:17")) is None
    assert not path.exists()
    assert path.with_suffix(".damaged").read_text() == text


def test_another_version_is_left_alone(cache: Path, recwarn: pytest.WarningsRecorder) -> None:
    cache.mkdir(parents=True)
    path = disk_profile_path("8:17")
    path.write_text(_damage(version=2))
    assert load_disk_profile(FileSystem("/scratch", "ext4", "8:17")) is None
    assert path.exists()
    assert len(recwarn) == 0


# Who uses them.

USES = """
import sys
import swapd.session
from swapd.config import Config

seen, real = {}, swapd.session.Core
def noted(*arguments, **settings):
    seen.update(settings)
    return real(*arguments, **settings)
swapd.session.Core = noted
session = swapd.session.Session(Config.from_environment(
    {}, alloc="cpu", budget="2MiB", chunk_size="64KiB", disk=sys.argv[1], disk_budget="8MiB", emulated_memory="16MiB"
))
link = session.expected_link
print(seen["disk_depth"], link and (round(link.out_bytes_per_second), round(link.in_bytes_per_second)))
print(round(session.planner.link().out_bytes_per_second))
"""


def used(folder: Path) -> list[str]:
    """What a session makes of the profile: depth and speeds. The emulated device is one for each process."""
    command = [sys.executable, "-c", USES, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_session_has_the_depth_and_the_speeds_that_were_measured(folder: Path) -> None:
    assert used(folder)[0] == "4 None"
    system = file_system_of(folder)
    rows = (DiskSpeed(2 * MIB, 1, 9.0, 9.0, 1e9, 1e8), DiskSpeed(2 * MIB, 8, 9.0, 9.0, 3e9, 7e8))
    save_disk_profile(DiskProfile(system.mount, system.kind, system.device, "now", True, MIB, rows))
    assert used(folder) == ["8 (700000000, 3000000000)", "700000000"]


def test_the_command_shows_and_keeps_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_probe, "QUICK", TINY)
    assert main(["probe", "--disk", str(folder), "--quick", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    profile = known_disk(folder)
    assert profile is not None
    assert shown.pop("path") == str(disk_profile_path(profile.device))
    machine = profile.machine()
    assert shown.pop("recommended") == {
        "depth": profile.recommended.depth,
        "read_bytes_per_second": machine.in_bytes_per_second,
        "written_bytes_per_second": machine.out_bytes_per_second,
    }
    assert DiskProfile.from_json(json.dumps({"format": "ooc-disk", "version": 1, **shown})) == profile
    disk_profile_path(profile.device).unlink()
    assert main(["probe", "--disk", str(folder), "--quick", "--no-save"]) == 0
    text = capsys.readouterr().out
    assert "written with both" in text and "128 KiB" in text and "enough:" in text and "kept as" not in text
    assert known_disk(folder) is None
