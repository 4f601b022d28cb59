"""Runs Python programs in processes of their own, in plain memory or out-of-core: by variables, as a user would."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
TIMEOUT_SECONDS = 400  # of anything that hangs; the machine may be busy with other things

# Small chunks, so that programs of a few megabytes have many.
EMULATED = {"OOC_ALLOC": "emulated", "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB"}


def load_compare() -> ModuleType:
    """`examples/compare.py`, which is a script."""
    spec = importlib.util.spec_from_file_location("ooc_examples_compare", ROOT / "examples" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(variables: dict[str, str]) -> dict[str, str]:
    """This process's, with no setting of ours but the given ones; one thread, so that the order of sums is fixed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    kept.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **variables}


@dataclass(frozen=True)
class Ended:
    """How a process ended. `summary` is None if it wrote none."""

    status: int
    output: str
    errors: str
    summary_path: Path | None = None
    summary: dict[str, Any] | None = field(default=None)

    def check(self) -> Ended:
        assert self.status == 0, f"status {self.status}\n{self.output[-2000:]}\n{self.errors[-6000:]}"
        return self

    @property
    def figures(self) -> dict[str, Any]:
        assert self.summary is not None, f"no summary was written\n{self.errors[-4000:]}"
        return self.summary


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary, whole, or None if there is none. A file that is not JSON is an error."""
    if not path.exists():
        return None
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def run(
    arguments: list[str | Path],
    variables: dict[str, str],
    *,
    summary: Path | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Ended:
    """Runs `python *arguments`. A process that does not end in time fails the test, with its last words."""
    if summary is not None:
        summary.unlink(missing_ok=True)
        variables = {**variables, "OOC_SUMMARY": str(summary)}
    command = [sys.executable, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, env=environment(variables), capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired as expired:
        errors = expired.stderr or b""
        words = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
        raise AssertionError(f"{arguments} did not end in {timeout} s\n{words[-4000:]}") from None
    found = read_summary(summary) if summary is not None else None
    return Ended(done.returncode, done.stdout, done.stderr, summary, found)


def code(*parts: str) -> str:
    """One source of several, each indented as it suits the place where it is written."""
    return "\n".join(textwrap.dedent(part) for part in parts)


def write_script(folder: Path, source: str, name: str = "script.py") -> Path:
    """`source`, with its common indentation removed, as a file."""
    path = folder / name
    path.write_text(code(source), encoding="utf-8")
    return path


def run_source(folder: Path, source: str, *, timeout: float = TIMEOUT_SECONDS, **variables: str) -> Ended:
    """Runs a script given as text, on the emulated device unless `OOC_ALLOC` says otherwise, with a summary."""
    script = write_script(folder, source)
    return run([script], {**EMULATED, **variables}, summary=folder / "summary.json", timeout=timeout)
