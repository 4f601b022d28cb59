"""Runs Python programs in processes of their own, in plain memory or out-of-core: by variables, as a user would."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
_STARTING = threading.Lock()
# Variables that nothing looks at before a script begins.
READ_LATE = ("PATH", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "_OOC_RECOMPUTE_EVERYTHING")
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
    """This process's, with no setting of ours but the given ones and what makes runs alike.

    One thread fixes the order of sums, blocking planning the iterations that have plans.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    kept.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "integrations"), kept.get("PYTHONPATH"))))
    alike = {"OMP_NUM_THREADS": "1", "OOC_PLANNING": "blocking"}
    return {**kept, **alike, "PYTHONFAULTHANDLER": "1", **variables}


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


class Nursery:
    """Forks a process for each program from one that has imported some modules, PyTorch among them (see nursery.py)."""

    ALWAYS = ("torch", "torch._dynamo", "scipy.optimize", "swapd.plan_making", "ooc.pytorch.session")

    def __init__(self, *modules: str, path: Path = HERE) -> None:
        command = [sys.executable, str(HERE / "nursery.py"), *self.ALWAYS, *modules]
        settings = environment({})
        settings["PYTHONPATH"] = f"{path}:{settings['PYTHONPATH']}"
        self._process = subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[int]] = {}
        self._lock = threading.Lock()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                waiting = self._waiting.pop(answer["id"])
            waiting.set_result(answer["status"])
        for waiting in self._waiting.values():
            waiting.set_exception(RuntimeError("the nursery ended"))

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def run(
        self, arguments: list[str | Path], variables: dict[str, str], timeout: float, working: Path | None = None
    ) -> Ended:
        """Runs a script. A process that does not end in time is killed, and fails the test with its last words.

        `working` is the folder it works in, if not this process's.
        """
        with tempfile.TemporaryDirectory() as folder:
            words = {"output": Path(folder, "output"), "errors": Path(folder, "errors")}
            request = {"program": str(arguments[0]), "arguments": [str(argument) for argument in arguments[1:]]}
            request |= {"variables": variables, **{name: str(path) for name, path in words.items()}}
            request["folder"] = None if working is None else str(working)
            with self._lock:
                number, waiting = next(self._numbers), Future[int]()
                self._waiting[number] = waiting
                self._send({"id": number, **request})
            try:
                status = waiting.result(timeout)
            except TimeoutError:
                with self._lock:
                    self._send({"kill": number})
                raise AssertionError(
                    f"{arguments} did not end in {timeout} s\n{words['errors'].read_text(errors='replace')[-4000:]}"
                ) from None
            return Ended(status, *(path.read_text(errors="replace") for path in words.values()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@functools.cache
def _started_nursery() -> Nursery:
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def _shared_nursery() -> Nursery:
    """The one of this process, whichever thread asks first."""
    with _STARTING:
        return _started_nursery()


def run(
    arguments: list[str | Path],
    variables: dict[str, str],
    *,
    summary: Path | None = None,
    timeout: float = TIMEOUT_SECONDS,
    nursery: Nursery | None = None,
) -> Ended:
    """Runs `python *arguments`. A process that does not end in time fails the test, with its last words.

    A script is forked from a process that has imported PyTorch; what has options of the interpreter, or variables that
    are read before a script begins, has an interpreter of its own (so has `-s script.py`).
    """
    if summary is not None:
        summary.unlink(missing_ok=True)
        variables = {**variables, "OOC_SUMMARY": str(summary)}
    others = {name: value for name, value in variables.items() if not name.startswith("OOC_") and name not in READ_LATE}
    early = others.items() - environment({}).items()
    if str(arguments[0]).endswith(".py") and not early:
        ended = (nursery or _shared_nursery()).run(arguments, variables, timeout)
    else:
        ended = _run_interpreter(arguments, variables, timeout)
    return replace(ended, summary_path=summary, summary=read_summary(summary) if summary is not None else None)


def _run_interpreter(arguments: list[str | Path], variables: dict[str, str], timeout: float) -> Ended:
    command = [sys.executable, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, env=environment(variables), capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except subprocess.TimeoutExpired as expired:
        errors = expired.stderr or b""
        words = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
        raise AssertionError(f"{arguments} did not end in {timeout} s\n{words[-4000:]}") from None
    return Ended(done.returncode, done.stdout, done.stderr)


def code(*parts: str) -> str:
    """One source of several, each indented as it suits the place where it is written."""
    return "\n".join(textwrap.dedent(part) for part in parts)


def write_script(folder: Path, source: str, name: str = "script.py") -> Path:
    """`source`, with its common indentation removed, as a file."""
    path = folder / name
    path.write_text(code(source), encoding="utf-8")
    return path


def run_source(
    folder: Path, source: str, *, options: tuple[str, ...] = (), timeout: float = TIMEOUT_SECONDS, **variables: str
) -> Ended:
    """Runs a script given as text, on the emulated device unless `OOC_ALLOC` says otherwise, with a summary."""
    script = write_script(folder, source)
    return run([*options, script], {**EMULATED, **variables}, summary=folder / "summary.json", timeout=timeout)
