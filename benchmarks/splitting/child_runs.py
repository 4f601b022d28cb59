"""One child process of these benchmarks, with the settings it runs under and the machine it ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.child import TURNS
from benchmarks.runs import ROOT, TIMEOUT_SECONDS, RunFailed


def run_child(
    module: str, arguments: list[str], variables: dict[str, str], turns: tuple[int, ...] = ()
) -> dict[str, Any]:
    """What `python -m module *arguments OUTPUT.json` wrote, with no setting of ours but the given ones.

    `turns`: as in `benchmarks.runs.run`.

    Raises:
        RunFailed: it ended badly; the message has the end of what it said.
    """
    variables = {"OMP_NUM_THREADS": "1", **variables}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    before = machine.describe()
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
        output = Path(folder) / "child.json"
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, str(output)],
            cwd=ROOT,
            env=kept | variables | {TURNS: " ".join(map(str, turns))},
            pass_fds=turns,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            said = f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
            raise RunFailed(f"{module} {' '.join(arguments)} with {variables}\n{said}")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return {"environment": variables, "machine": before, "load_after": machine.load(), **found}
