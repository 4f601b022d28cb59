"""A program's own packages are its own, whatever folders this project has, where the package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("integrations", "grafana", "tests", "cli", "benchmarks")  # packages that many programs have
PROGRAM = f"""
import torch
from torch import nn

for name in {NAMES!r}:
    found = __import__(name + ".slack", fromlist=["slack"])
    assert found.whose == "the program's", (name, found)
torch.manual_seed(0)
model = nn.Linear(256, 256)
model(torch.randn(64, 256)).sum().backward()
import ooc
print(ooc.enabled(), float(model.weight.grad.abs().sum()))
"""


def write_packages(folder: Path, regular: bool) -> None:
    """The program, and its packages: regular ones, or folders without `__init__`."""
    for name in NAMES:
        package = folder / name
        package.mkdir()
        if regular:
            (package / "__init__.py").write_text("")
        (package / "slack.py").write_text('whose = "the program\'s"\n')
    (folder / "program.py").write_text(PROGRAM)


@pytest.mark.parametrize("regular", [True, False], ids=["regular packages", "folders without __init__"])
@pytest.mark.medium
def test_a_program_finds_its_own_packages(tmp_path: Path, regular: bool) -> None:
    write_packages(tmp_path, regular)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}

    def run(**variables: str) -> str:
        command = [sys.executable, "program.py"]
        environment = {**kept, "OMP_NUM_THREADS": "1", **variables}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "not active" not in done.stderr, done.stderr
        return done.stdout

    off, on = run(), run(OOC_ALLOC="emulated", OOC_BUDGET="8MiB")
    assert (off.split()[0], on.split()[0]) == ("False", "True")
    assert off.split()[1] == on.split()[1]
