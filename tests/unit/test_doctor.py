"""Doctor: each check says ok where it should, and something useful where it should not."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swapd.cli import main
from swapd.devices import doctor
from swapd.devices.disk import Disk, FileSystem, file_system_of
from swapd.devices.disk_profile import DiskProfile, DiskSpeed, save_disk_profile
from swapd.devices.doctor import Check, Report


def report(**changes: str) -> Report:
    names = ("system", "memfd", "native libraries", "settings", "emulated device", "CUDA device", "PyTorch")
    statuses = {name.replace(" ", "_"): "ok" for name in names} | changes
    return Report(tuple(Check(name, statuses[name.replace(" ", "_")], "") for name in names))  # type: ignore[arg-type]


def test_usable_means_one_kind_of_device() -> None:
    assert report().usable
    assert report(emulated_device="no").usable
    assert report(CUDA_device="warn", PyTorch="no").usable
    assert not report(emulated_device="no", CUDA_device="warn").usable
    for basic in ("system", "memfd", "native_libraries", "settings"):
        assert not report(**{basic: "no"}).usable
    assert report(settings="warn").usable


def test_the_whole_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OOC_ALLOC", "emulated")
    monkeypatch.setenv("OOC_EMULATED_MEMORY", "256MiB")
    command = [sys.executable, "-m", "swapd.cli", "doctor", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    answer = json.loads(process.stdout)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["usable"] is True
    assert len(checks) == len(answer["checks"]) >= 15
    for name in ("system", "memfd", "native libraries", "settings", "emulated device", "PyTorch"):
        assert checks[name]["status"] == "ok", checks[name]
    assert "OOC_ALLOC=cpu" in checks["settings"]["detail"]
    assert checks["emulated device"]["detail"] == "256 MiB of host memory"
    assert checks["CUDA device"]["status"] in ("ok", "warn")
    assert all(check["remedy"] for check in answer["checks"] if check["status"] == "no")
    assert "built" in checks["PyTorch adapter"]["detail"]


def test_an_emulated_device_that_cannot_be_made_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOC_EMULATED_MEMORY", "5000TiB")
    text = "from swapd.devices import doctor; print(doctor.check_emulated())"
    process = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "status='no'" in process.stdout
    assert "OOC_EMULATED_MEMORY" in process.stdout


@pytest.mark.parametrize("variable", ["OOC_BUDGET", "OOC_HOST_BUDGET"])
def test_a_budget_that_this_machine_cannot_have_is_reported(variable: str) -> None:
    settings = {"OOC_ALLOC": "emulated", "OOC_EMULATED_MEMORY": "256MiB", variable: "100TiB"}
    text = f"from swapd.devices import doctor; print(doctor.check_settings({settings!r}))"
    process = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "status='no'" in process.stdout and f"{variable}=100TiB is more than" in process.stdout


def test_the_table_and_a_status_that_says_no(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Check("emulated device", "no", "gone [really]", "find it")
    monkeypatch.setattr(
        "swapd.cli.doctor.examine", lambda progress: Report((*report(CUDA_device="warn").checks[:4], broken))
    )
    monkeypatch.setattr(Report, "usable", property(lambda self: self["emulated device"].status == "ok"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "gone [really]" in out
    assert "-> find it" in out
    assert "nothing can work here" in out


def test_settings() -> None:
    assert doctor.check_settings({}).status == "ok"
    assert doctor.check_settings({"OOC_BUDGET": "8GiB"}).detail == "OOC_BUDGET=8GiB"
    wrong = doctor.check_settings({"OOC_BUDGET": "8Gb!"})
    assert (wrong.status, "OOC_BUDGET='8Gb!'" in wrong.detail) == ("no", True)
    unknown = doctor.check_settings({"OOC_BUDGT": "8GiB"})
    assert (unknown.status, "OOC_BUDGET?" in unknown.detail) == ("warn", True)


def test_autoload() -> None:
    assert doctor.check_autoload({}).status == "ok"
    assert doctor.check_autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}).status == "ok"
    off = doctor.check_autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert (off.status, bool(off.remedy)) == ("warn", True)


def test_compiler(tmp_path: Path) -> None:
    mine = tmp_path / "c++"
    mine.write_text("#!/bin/sh\necho my compiler 1.0\n")
    mine.chmod(0o755)
    assert doctor.check_compiler({"CXX": str(mine)}) == Check("compiler", "ok", "my compiler 1.0")
    missing = doctor.check_compiler({"CXX": str(tmp_path / "none")})
    assert (missing.status, "none" in missing.detail) == ("warn", True)
    mine.write_text("#!/nowhere/sh\n")
    assert doctor.check_compiler({"CXX": str(mine)}).status == "warn"


def test_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    missing = doctor.check_entry_point()
    assert (missing.status, "OOC_ALLOC=1 has no effect" in missing.detail) == ("warn", True)


def test_torch_of_another_version_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"version": "2.10.1+cpu", "cuda": None, "adapter": "a.so", "built": False}
    monkeypatch.setattr(doctor, "_ask_torch", lambda environment: facts)
    checks = {check.name: check for check in doctor.check_torch({"CXX": "/nowhere"})}
    assert checks["PyTorch"].status == "no"
    assert (checks["PyTorch adapter"].status, checks["PyTorch adapter"].remedy) == ("no", checks["compiler"].remedy)
    monkeypatch.setattr(doctor, "_ask_torch", lambda environment: {"error": "`import torch` fails: no libc10"})
    assert "no libc10" in doctor.check_torch({})[0].detail
    facts = {"version": "3.0.0", "cuda": "13.1", "adapter": None, "adapter_error": "x", "built": False}
    monkeypatch.setattr(doctor, "_ask_torch", lambda environment: facts)
    checks = {check.name: check for check in doctor.check_torch({})}
    assert checks["PyTorch"].status == "ok"
    assert "CUDA 13.1" in checks["PyTorch"].detail
    assert checks["PyTorch adapter"].status == "no"


def test_map_count(tmp_path: Path) -> None:
    path = tmp_path / "max_map_count"
    assert doctor.check_map_count(path).status == "warn"
    path.write_text("1000\n")
    assert doctor.check_map_count(path).status == "warn"
    path.write_text("262144\n")
    assert doctor.check_map_count(path).status == "ok"


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert "no machine profile" in doctor.check_cache().detail
    (tmp_path / "new" / "ooc_alloc" / "machine-x.json").write_text("{}")
    assert "machine-x.json" in doctor.check_cache().detail
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert doctor.check_cache().status == "no"


def test_a_disk_that_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert doctor.check_disk({}) == Check("disk", "ok", "OOC_DISK is not set: swapped data stay in host memory")
    system = file_system_of(tmp_path)
    good = Disk(system, 1 << 40, direct=True, nameless=True)
    monkeypatch.setattr(doctor, "describe", lambda folder: good)
    found = doctor.check_disk({"OOC_DISK": str(tmp_path)})
    assert found.status == "ok"
    assert found.detail == f"{tmp_path}: {system.kind} at {system.mount}, 1.00 TiB free; direct I/O works"
    assert f"swapd probe --disk {tmp_path}" in found.remedy
    speed = DiskSpeed(2 << 20, 4, *[2.0 * (1 << 30), 1.0 * (1 << 30)] * 2)
    save_disk_profile(DiskProfile(system.mount, system.kind, system.device, "now", True, 1 << 20, (speed,)))
    found = doctor.check_disk({"OOC_DISK": str(tmp_path)})
    assert (found.status, found.remedy) == ("ok", "")
    assert found.detail.endswith("reads 2.00 GiB/s and writes 1.00 GiB/s at once")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        ({"kind": "tmpfs"}, "files of tmpfs are memory", "a folder on a disk"),
        ({"kind": "nfs4"}, "over a network", "a disk of this machine"),
        ({"direct": False}, "refuses direct I/O", "ext4, XFS or Btrfs"),
        ({"free_bytes": 1 << 20}, "1.00 MiB free", "little room"),
    ],
)
def test_a_disk_that_serves_badly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], words: str, remedy: str
) -> None:
    facts = {"kind": "ext4", "free_bytes": 1 << 40, "direct": True, **changes}
    system = FileSystem("/scratch", facts.pop("kind"), "8:1")
    monkeypatch.setattr(doctor, "describe", lambda folder: Disk(system, nameless=True, **facts))
    found = doctor.check_disk({"OOC_DISK": str(tmp_path)})
    assert found.status == "warn"
    assert words in found.detail and remedy in found.remedy


def test_a_disk_that_does_not_serve(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        found = doctor.check_disk({"OOC_DISK": str(tmp_path / name)})
        assert found.status == "no" and str(tmp_path / name) in found.detail
        assert "make the folder" in found.remedy


def test_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_host_bytes", lambda: 1 << 20)
    assert doctor.check_host_memory().status == "warn"


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated driver stands in for a GPU's, in a process of its own."""
    text = (
        "from ooc_alloc import library_path; from swapd.devices import doctor; "
        "doctor.CUDA_LIBRARY = str(library_path('libooc_emulated_cuda.so')); print(doctor.check_cuda())"
    )
    monkeypatch.setenv("OOC_EMULATED_MEMORY", "256MiB")
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert "status='ok', detail='emulated, 256 MiB, driver for CUDA " in out
    monkeypatch.setattr(doctor, "CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    assert doctor.check_cuda() == Check(
        "CUDA device", "warn", "no CUDA driver: only the emulated device can be used", "none needed without a GPU"
    )
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: "libcuda.so.1")
    broken = doctor.check_cuda()
    assert (broken.status, "/nowhere/libcuda.so.1" in broken.detail) == ("warn", True)
