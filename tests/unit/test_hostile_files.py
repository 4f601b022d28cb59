"""Trace and plan files that are damaged or hostile get a clear error, in little memory. See hostile_files.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from hostile_files import CASES

FILE = Path(__file__).with_name("hostile_files.py")


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
@pytest.mark.medium
def test_in_little_memory(case: str) -> None:
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}  # each would reserve addresses
    result = subprocess.run(
        [sys.executable, str(FILE), case],
        capture_output=True,
        text=True,
        env={**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=500,
        check=False,
    )
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, ["done"]), result.stderr[-4000:]
