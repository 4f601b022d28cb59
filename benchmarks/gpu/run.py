"""Runs cases in child processes, each with no more device memory than its budget; a record is made of every end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import machine
from benchmarks.gpu.cases import IN_CORE, MIB, STEPS, UVM, Case
from benchmarks.gpu.schedule import Outcome
from benchmarks.runs import ROOT

SLACK_BYTES = 512 * MIB  # left free beside the budget: modules that the driver loads at a kernel's first use
CHILD = (sys.executable, "-m", "benchmarks.gpu.child")
BALLAST = (sys.executable, "-m", "benchmarks.gpu.ballast")
REFUSED_UVM = "refused: oversubscribing managed memory on a shared machine"
_UVM_HEADROOM = 2  # the working set fits so many times


class ChildEnded(Exception):
    """A child said nothing more; the message says how it ended."""


class Child:
    """A process that answers JSON lines. It has a process group of its own, which `stop` ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        paths = (str(ROOT), str(ROOT / "integrations"), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def tell(self, message: object) -> None:
        """Raises ChildEnded."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{message if isinstance(message, str) else json.dumps(message)}\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildEnded(self.words()) from None

    def answer(self) -> dict[str, Any]:
        """Raises ChildEnded."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise ChildEnded(self.words())
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise ChildEnded(f"it said {line[:200]!r}; {self.words()}") from None
        return message

    def words(self) -> str:
        """Its end: the status, and the last that it printed."""
        self._errors.seek(0)
        return f"status {self._process.poll()}; {self._errors.read()[-1500:].strip()}"

    def stop(self) -> None:
        """Ends it, if it has not ended, and its own children. Any thread."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it; nothing more can be asked."""
        self.stop()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):  # what it did not read
                if stream is not None:
                    stream.close()


class Runner:
    """Executes cases. The child of the next case starts while the present one runs.

    Raises ChildEnded if the process that holds memory cannot start.

    Args:
        ballast: None: memory is not held down (tests without a device).
        asked: goes into every request: other values for what `request` makes.
    """

    def __init__(
        self,
        *,
        child: Sequence[str] = CHILD,
        ballast: Sequence[str] | None = BALLAST,
        asked: dict[str, Any] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._command = child
        self._asked = asked or {}
        self._say = say
        self._next: Child | None = None
        self._ballast = Child(ballast) if ballast is not None else None
        try:
            self.free_bytes = self._ballast.answer()["free_bytes"] if self._ballast is not None else 0
            self._next = Child(child)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every process."""
        for process in (self._next, self._ballast):
            if process is not None:
                process.close()
        self._next = self._ballast = None

    def execute(self, case: Case, timeout_seconds: float, before: Outcome) -> dict[str, Any]:
        """Runs a case in at most so many seconds; how it ended stands in the record's `outcome`."""
        request = self.request(case, before)
        record = {**request, "name": case.name, "oversubscription": case.oversubscription}
        record["machine"] = machine.describe()
        refused = self._refuse(case, before)
        record |= {"outcome": refused} if refused else self._run(case, request, timeout_seconds)
        self._say(f"{case.name}: {brief(record)}")
        return record

    def request(self, case: Case, before: Outcome) -> dict[str, Any]:
        """What the child is asked for. The budget is a share of the in-core run's live peak."""
        budget = None
        needed = case.needs()
        if needed is not None and case.arm != UVM:
            budget = int(before.records[needed.name]["live_peak_bytes"] / case.oversubscription)
        return {
            "kind": case.kind,
            "arm": case.arm,
            "model": case.model.to_json() if case.model is not None else None,
            "budget_bytes": budget,
            "chunk_bytes": case.chunk_mib * MIB,
            "warm_up": case.warm_up,
            "steps": STEPS,
            "device": "cuda:0",  # with its number: not every function takes it without
            **self._asked,
        }

    def _refuse(self, case: Case, before: Outcome) -> str | None:
        needed = case.needs()
        if case.arm != UVM or needed is None:
            return None
        peak = before.records[needed.name]["live_peak_bytes"]
        fits = case.oversubscription <= 1 and _UVM_HEADROOM * peak <= self.free_bytes
        return None if fits else REFUSED_UVM

    def _run(self, case: Case, request: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        child = self._next if self._next is not None else Child(self._command)
        self._next = Child(self._command)
        late = threading.Event()

        def end() -> None:
            late.set()
            child.stop()

        timer = threading.Timer(timeout_seconds, end)
        timer.start()
        try:
            child.tell(request)
            answer = child.answer()
            if not answer.get("ready"):
                return answer
            free = self._hold(request["budget_bytes"])
            child.tell({"go": True})
            return {"free_bytes_at_start": free, **child.answer()}
        except ChildEnded as ended:
            if late.is_set():
                return {"outcome": f"no end in {timeout_seconds:.0f} s"}
            return {"outcome": "crashed", "error": str(ended)[-2000:]}
        finally:
            timer.cancel()
            timer.join()
            child.close()
            self._hold(None)

    def _hold(self, budget_bytes: int | None) -> int | None:
        """Leaves the budget and the slack free, or everything. Returns the bytes that are free then."""
        if self._ballast is None:
            return None
        self._ballast.tell("release" if budget_bytes is None else str(budget_bytes + SLACK_BYTES))
        free: int = self._ballast.answer()["free_bytes"]
        return free


def brief(record: dict[str, Any]) -> str:
    """A line's worth of a record."""
    if record["outcome"] != "ok" or "seconds" not in record:
        return str(record["outcome"])
    return f"step {sorted(record['seconds'])[len(record['seconds']) // 2]:.3f} s" + (
        f", live peak {record.get('live_peak_bytes', 0) / 2**30:.1f} GiB" if record["arm"] == IN_CORE else ""
    )
