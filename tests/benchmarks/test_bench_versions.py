"""Two checkouts beside each other: each runs its own code, whatever is installed in the environment that they share."""

import sys
from pathlib import Path

from benchmarks.versions import ask

PROGRAM = """
import json, subprocess, sys
program = "import ooc_alloc, swapd; print(ooc_alloc.__file__, swapd.__file__)"
print(json.dumps(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()))
"""


def test_a_checkout_runs_its_own_code(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    own = [tmp_path / name / "__init__.py" for name in ("ooc_alloc", "swapd")]
    for path in own:
        path.parent.mkdir()
        path.touch()
    assert ask(tmp_path, PROGRAM, [], {}) == list(map(str, own))
