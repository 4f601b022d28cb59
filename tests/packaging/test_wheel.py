"""The wheel of `make wheel`: what it holds, and programs in an environment that has the wheel and no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from test_own_packages import write_packages

ROOT = Path(__file__).resolve().parents[2]
GPT = ["--steps", "2", "--layers", "2", "--width", "64", "--context", "64", "--text-bytes", "200000"]
HEADERS = ["ooc_alloc/csrc/ooc_alloc.h", "ooc_alloc/csrc/probe.h", "ooc_alloc/emulated/emulated_control.h"]
pytestmark = pytest.mark.slow  # `make test-wheel`


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = (ROOT / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment: the wheel, and the libraries of this environment behind it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        packages,
        wheel,
    ]
    subprocess.run(command, check=True)
    # Path files behind a path file are not read: the editable install of the checkout stays unknown.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *command: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "PYTHON"))}
    done = subprocess.run(
        [python, *command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_it_is_for_any_linux(wheel: Path) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r'platform tag:\s+"manylinux_2_\d+_x86_64"', said), said
    assert "-manylinux_" in wheel.name


def test_it_holds_three_packages_and_no_debug_information(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ooc", "ooc_alloc", "swapd"}
        native = [name for name in names if re.match("(ooc_alloc|swapd)/(csrc|emulated)/", name)]
        assert sorted(native) == HEADERS
        for name in names:
            if name.endswith(".so"):
                path = archive.extract(name, tmp_path)
                sections = subprocess.run(["readelf", "-S", path], capture_output=True, text=True, check=True).stdout
                assert ".debug_info" not in sections, name


@pytest.mark.parametrize("regular", [True, False], ids=["regular packages", "folders without __init__"])
def test_a_program_finds_its_own_packages(python: Path, tmp_path: Path, regular: bool) -> None:
    write_packages(tmp_path, regular)
    off = run(python, tmp_path, "program.py")
    on = run(python, tmp_path, "program.py", OOC_ALLOC="emulated", OOC_BUDGET="8MiB")
    assert (off.split()[0], on.split()[0]) == ("False", "True")
    assert off.split()[1] == on.split()[1]


def test_the_gpt_of_the_source_distribution(python: Path, tmp_path: Path) -> None:
    (source,) = (ROOT / "dist").glob("*.tar.gz")  # the wheel was built from this file
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (script,) = tmp_path.glob("*/examples/gpt.py")
    plain = run(python, tmp_path, str(script), *GPT)
    assert "ooc" not in plain
    small = {"OOC_ALLOC": "emulated", "OOC_BUDGET": "4MiB", "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "16KiB"}
    swapped = run(python, tmp_path, str(script), *GPT, **small, OOC_SUMMARY="s.json")
    assert losses(plain) == losses(swapped) and len(losses(plain)) == 3
    assert '"swap_out_bytes": 0,' not in (tmp_path / "s.json").read_text()


def losses(output: str) -> list[str]:
    return re.findall(r"loss +(\S+)", output)
