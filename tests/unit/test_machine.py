"""Machine profiles: measured with a device that answers by formula, kept, read back, and set aside when damaged."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from ooc_alloc.probe import Probe
from swapd.devices.probe import QUICK, Effort, measure
from swapd.devices.profile import (
    MachineError,
    Profile,
    cache_directory,
    known_machine,
    load_profile,
    profile_path,
    save_profile,
)
from swapd.link import Link
from swapd.trace.trace import Machine
from swapd.units import GIB, MIB

LATENCY = 10e-6


class Formula(Probe):
    """A device whose costs are known: 2 GB/s out, 4 GB/s in, half of each with both directions at once."""

    def __init__(self, free_bytes: int = 64 * GIB) -> None:
        self.free_bytes = free_bytes
        self.calls: list[tuple[str, int, int]] = []

    def describe(self) -> dict[str, int | str]:
        return {
            "name": "Formula / One",
            "total_bytes": 64 * GIB,
            "free_bytes": self.free_bytes,
            "granularity_bytes": 2 * MIB,
            "copy_engines": 2,
            "driver_version": 13000,
        }

    def memory(self, chunk_bytes: int, chunks: int, repeats: int) -> dict[str, float]:
        self.calls.append(("memory", chunks, repeats))
        calls = ("create", "map", "release", "set_access", "unmap")
        return {f"{name}_seconds": 1e-6 * chunks * index for index, name in enumerate(calls, 1)}

    def copy(self, size_bytes: int, repeats: int) -> dict[str, float]:
        self.calls.append(("copy", size_bytes, repeats))
        speeds = {"out": 2e9, "in": 4e9, "both_out": 1e9, "both_in": 2e9}
        return {f"{name}_seconds": LATENCY + size_bytes / speed for name, speed in speeds.items()}

    def pinning(self, size_bytes: int, repeats: int) -> dict[str, float]:
        return {"register_seconds": size_bytes / MIB * 1e-4, "unregister_seconds": size_bytes / MIB * 2e-5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ooc_alloc"


def test_measuring() -> None:
    told: list[tuple[str, int, int]] = []
    profile = measure(Formula(), progress=lambda *step: told.append(step))
    assert [row.chunks for row in profile.memory] == [1, 2, 4, 8, 16, 32, 64]
    assert profile.memory[2].set_access_seconds == pytest.approx(4 * 4e-6)
    assert profile.memory[0].chunk_bytes == 2 * MIB
    assert profile.pin_seconds_per_mib == pytest.approx(1e-4)
    assert profile.unpin_seconds_per_mib == pytest.approx(2e-5)
    assert profile.copies[-1].bytes == 256 * MIB
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert told[-1] == ("done", len(told) - 1, len(told) - 1)


def test_planning_uses_both_directions_at_once() -> None:
    machine = measure(Formula()).machine()
    assert machine.out_bytes_per_second == pytest.approx(1e9, rel=1e-3)
    assert machine.in_bytes_per_second == pytest.approx(2e9, rel=1e-3)
    assert machine.latency_seconds == pytest.approx(LATENCY, rel=0.01)
    # by the piece, of two chunks: 4 us a chunk to map, 8 us for the access of both; 10 us to unmap both
    assert (machine.map_seconds, machine.unmap_seconds) == (pytest.approx(8e-6), pytest.approx(5e-6))


def test_a_slow_link_is_not_measured_for_ever() -> None:
    device = Formula()
    measure(device, effort=Effort(copy_bytes=(MIB, 400 * MIB, GIB, 2 * GIB)))
    assert [size for name, size, _ in device.calls if name == "copy"] == [8, MIB, 400 * MIB]


def test_a_small_device_is_not_filled() -> None:
    device = Formula(free_bytes=64 * MIB)
    profile = measure(device)
    assert max(row.chunks for row in profile.memory) == 16
    assert max(copy.bytes for copy in profile.copies) == 16 * MIB
    tiny = measure(Formula(free_bytes=2 * MIB), effort=QUICK)
    assert [row.chunks for row in tiny.memory] == [1]


def test_chunks_are_rounded_up_to_the_granularity() -> None:
    assert measure(Formula(), chunk_bytes=3 * MIB, effort=QUICK).memory[0].chunk_bytes == 4 * MIB


def test_kept_and_read_back(cache: Path) -> None:
    profile = measure(Formula(), effort=QUICK)
    path = save_profile(profile)
    assert path == cache / "machine-formula-one.json"
    assert path == profile_path("Formula / One")
    assert load_profile("Formula / One") == profile
    assert load_profile("another") is None
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_an_emulated_device_has_a_profile_for_each_link() -> None:
    link = Link(8.0 * GIB, 6.0 * GIB)
    save_profile(measure(Formula(), effort=QUICK, link=link))
    assert load_profile("Formula / One") is None
    profile = load_profile("Formula / One", str(link))
    assert profile is not None
    assert known_machine("Formula / One", link) == profile.machine()


def test_without_a_profile_a_link_that_is_held_back_is_known() -> None:
    assert known_machine("emulated", Link(8e9, 6e9, 2e-5, 1e-5)) == Machine(6e9, 8e9, 1e-5)
    assert known_machine("emulated", Link(8e9, math.inf)) is None
    assert known_machine("emulated") is None


def _damage(**changes: object) -> str:
    fields = json.loads(measure(Formula(), effort=QUICK).to_json())
    return json.dumps({**fields, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": "ooc-machine", "version": 1}',
        measure(Formula(), effort=QUICK).to_json()[:200],
        _damage(copies=[]),
        _damage(copies=[{"bytes": 1}]),
        _damage(copies=7),
        _damage(out_latency_seconds="fast"),
        _damage(in_latency_seconds=float("nan")),
        _damage(pin_seconds_per_mib=-1.0),
        _damage(device=5),
        _damage(extra=5),
    ],
)
def test_a_damaged_profile_is_set_aside(cache: Path, text: str) -> None:
    with pytest.raises(MachineError):
        Profile.from_json(text)
    cache.mkdir()
    path = cache / "machine-x.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="set aside as machine-x.damaged"):
        assert load_profile("x") is None
    assert not path.exists()
    assert path.with_suffix(".damaged").read_text() == text


def test_another_version_is_left_alone(cache: Path, recwarn: pytest.WarningsRecorder) -> None:
    cache.mkdir()
    path = cache / "machine-x.json"
    path.write_text(_damage(version=2))
    assert load_profile("x") is None
    assert path.exists()
    assert len(recwarn) == 0


def test_the_cache_needs_no_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / "home" / ".cache" / "ooc_alloc"


MEASURE = """
import sys
from swapd.devices.probe import Effort, measure, open_device

device, is_emulated = open_device("emulated")
assert is_emulated
effort = Effort((1, 2), (1 << 20,), 1 << 20, 1, 1)
print(measure(device, chunk_bytes=128 << 10, effort=effort).to_json())
device.close()
"""
MISSING = """
from ooc_alloc import OocError, library_path
from ooc_alloc.probe import Probe

for library, ordinal in (("/nowhere/libnothing.so", 0), (str(library_path("libooc_emulated_cuda.so")), 17)):
    try:
        Probe(library, ordinal)
    except OocError as error:
        print(error)
"""


def python(text: str) -> str:
    """The output of a process of its own: the emulated device is one for each process, and these change it."""
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout


def test_the_emulated_device_is_measured() -> None:
    profile = Profile.from_json(python(MEASURE))
    assert profile.device == "emulated"
    assert [(row.chunks, row.chunk_bytes) for row in profile.memory] == [(1, 128 << 10), (2, 128 << 10)]
    costs = [*dataclasses.astuple(profile.memory[0])[2:], *dataclasses.astuple(profile.copies[0])[1:]]
    assert all(0 < seconds < 10 for seconds in costs)


def test_a_device_that_is_not_there_is_named() -> None:
    first, second = python(MISSING).splitlines()
    assert "libnothing" in first
    assert "cuDeviceGet" in second
