"""Settings that cannot be used stop the program; what the machine cannot do is said, and it runs in plain memory."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import EMULATED, code, environment, run, run_source, write_script

from ooc.pytorch import build

MIB = 1 << 20

PLAIN = """
    import torch
    print((torch.ones(1024, 1024) * 2).sum().item())
    from ooc import pytorch
    print(pytorch.enabled())
"""


def check_plain(tmp_path: Path, variables: dict[str, str], *words: str) -> None:
    """The program runs in plain memory, and is told why; under strict mode `import torch` raises."""
    ended = run([write_script(tmp_path, PLAIN)], {"OOC_ALLOC": "emulated", **variables}).check()
    assert ended.output.splitlines() == [str(2.0 * MIB), "False"]
    for word in (*words, "plain memory"):
        assert word in ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OOC_BUDGET": "100TiB"}, ("OOC_BUDGET=100TiB", "more than the device has")),
        ({"OOC_BUDGET": "96KiB", "OOC_CHUNK_SIZE": "65KiB"}, ("OOC_BUDGET", "less than one chunk", "OOC_CHUNK_SIZE")),
        pytest.param({"OOC_HOST_BUDGET": "100TiB"}, ("OOC_HOST_BUDGET=100TiB", "at most"), marks=pytest.mark.slow),
        ({"OOC_EMULATED_FAULTS": "cuNothing:every=2"}, ("OOC_EMULATED_FAULTS", "cuNothing")),
        ({"OOC_EMULATED_GRANULARITY": "5000"}, ("OOC_EMULATED_GRANULARITY", "power of two")),
    ],
)
def test_a_setting_that_cannot_be_used_stops_the_program(
    tmp_path: Path, variables: dict[str, str], words: tuple[str, ...]
) -> None:
    """Who sets a budget means it: without one the program would take what it likes."""
    options = ["-s"] if "OOC_BUDGET" in variables else []  # of these, the program's own `import torch` is stopped
    ended = run([*options, write_script(tmp_path, PLAIN)], {"OOC_ALLOC": "emulated", **variables})
    assert (ended.status, ended.output) == (1, "")
    first, *others = [line for line in ended.errors.splitlines() if not line.startswith("emulated CUDA driver: ")]
    assert first.startswith("ooc_alloc: ") and "the program was stopped" in first
    for word in words:
        assert word in first
    assert others == []


def test_a_device_that_fails_is_no_wrong_setting(tmp_path: Path) -> None:
    check_plain(tmp_path, {"OOC_EMULATED_FAULTS": "cuInit"}, "cuInit failed")


@pytest.mark.parametrize("compiler", ["none", "broken", "silent"])
def test_compiler_that_does_not_work(tmp_path: Path, compiler: str) -> None:
    (tmp_path / "bin").mkdir()
    variables = {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if compiler == "none":
        check_plain(tmp_path, variables, "no C++ compiler", "CXX", "g++")
        return
    script = tmp_path / "bin" / "g++"
    words = "echo 'g++: fatal: out of disk' >&2; exit 1" if compiler == "broken" else "exit 0"
    script.write_text(f"#!/bin/sh\n{words}\n")
    script.chmod(0o755)
    check_plain(tmp_path, variables, "adapter", *(["out of disk"] if compiler == "broken" else []))


def test_adapter_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A file that is no library where the adapter should be: built by another machine, cut short by a full disk."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "g++"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nothing > "$2"\n')
    script.chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    check_plain(tmp_path, variables, "adapter")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_plain(tmp_path, {"XDG_CACHE_HOME": str(tmp_path / "file")}, "XDG_CACHE_HOME")


@pytest.mark.slow
def test_two_processes_build_the_adapter_at_once(tmp_path: Path) -> None:
    """One of them compiles and says so, before; the next start says nothing. The compiler here copies what is there."""
    (tmp_path / "g++").write_text(
        f'#!/bin/sh\necho call >> {tmp_path}/calls\nsleep 2\nwhile [ "$1" != -o ]; do shift; done\n'
        f'cp {build.build()} "$2"\n'
    )
    (tmp_path / "g++").chmod(0o755)
    script = write_script(tmp_path, PLAIN)
    variables = {**EMULATED, "CXX": str(tmp_path / "g++"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    ranks = [environment({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    both = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for env in ranks]
    said = []
    for process in both:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0
        assert output.splitlines() == [str(2.0 * MIB), "True"]
        said += errors.splitlines()
    assert (tmp_path / "calls").read_text() == "call\n"
    assert len(list((tmp_path / "cache" / "ooc_alloc").glob("*.so"))) == 1
    (line,) = said
    assert line.startswith("ooc_alloc: compiling the PyTorch adapter") and "a minute" in line and str(tmp_path) in line
    assert run(["-s", script], variables).check().errors == ""


def test_who_waited_for_a_build_that_failed_does_not_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of a job would fail one after the other. A later start tries anew."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        f"#!/bin/sh\necho call >> {tmp_path}/calls\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.01; done\n"
        "echo out of disk >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain_flock = fcntl.flock

    def flock(file: Any, how: int) -> None:
        try:
            plain_flock(file, how)
        except BlockingIOError:
            (tmp_path / "go").touch()  # somebody waits now
            raise

    monkeypatch.setattr(build.fcntl, "flock", flock)

    def error_of_a_build() -> str:
        with pytest.raises(build.AdapterError, match="out of disk") as caught:
            build.build()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(error_of_a_build) for _ in range(2))
        assert first.result() == second.result()
    assert (tmp_path / "calls").read_text() == "call\n"
    waiting = [line for line in capsys.readouterr().err.splitlines() if "another process" in line]
    assert len(waiting) == 1
    error_of_a_build()
    assert (tmp_path / "calls").read_text() == "call\n" * 2


@pytest.mark.medium
def test_autoload_switched_off(tmp_path: Path) -> None:
    """PyTorch then never asks us: the program runs in plain memory, `enable` still works, and `doctor` says so."""
    source = code(
        PLAIN,
        """
        pytorch.enable()
        print(pytorch.enabled(), (torch.ones(1024, 1024) * 2).sum().item())
    """,
    )
    ended = run_source(tmp_path, source, TORCH_DEVICE_BACKEND_AUTOLOAD="0").check()
    assert ended.output.splitlines() == [str(2.0 * MIB), "False", f"True {2.0 * MIB}"]
    variables = {**EMULATED, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    doctor = run(["-m", "swapd.cli", "doctor"], variables)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in doctor.output


def test_on_by_the_environment_and_by_the_program_before_it_imports_torch(tmp_path: Path) -> None:
    """The import, amid `enable()`, turns it on."""
    source = """
        import ooc
        ooc.enable()
        import torch
        x = torch.ones(1000)
        print(ooc.enabled(), (x + x).sum().item())
    """
    ended = run_source(tmp_path, source, options=("-s",), timeout=60)  # in a fresh interpreter
    assert ended.check().output.split() == ["True", "2000.0"]


@pytest.mark.parametrize("place", ["missing/summary.json", "file/summary.json", "."])
def test_summary_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    ended = run([write_script(tmp_path, PLAIN)], {**EMULATED, "OOC_SUMMARY": str(tmp_path / place)}).check()
    assert ended.output.splitlines() == [str(2.0 * MIB), "True"]
    assert ended.errors.count("cannot write the summary") == 1, ended.errors
    assert "Traceback" not in ended.errors
