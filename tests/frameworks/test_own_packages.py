"""A program's own packages are its own, whatever folders this project has, where the package is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

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


@pytest.mark.parametrize("regular", [True, False], ids=["regular packages", "folders without __init__"])
def test_a_program_finds_its_own_packages(tmp_path: Path, regular: bool) -> None:
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        if regular:
            (folder / "__init__.py").write_text("")
        (folder / "slack.py").write_text('whose = "the program\'s"\n')
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment(variables), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    off, on = run(), run(OOC_ALLOC="emulated", OOC_BUDGET="8MiB")
    assert off.split()[0] == "False" and on.split()[0] == "True"
    assert off.split()[1] == on.split()[1]
