"""Runs programs out-of-core, each in a forked copy of a process that has imported everything and allocated nothing.

python -m tests.fuzz.server < programs > results, a line of JSON each: {"steps": [...]} and, if the process died or
hung, {"death": ...}. A copy has no history, so what a program does there it does again. A program with "fill" runs in
plain memory that begins as that byte: where two bytes give two results, the program has none that is defined.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz.execution import OUT_OF_MEMORY, Step, execute, fill_fresh_memory, last_look, namespace
from tests.fuzz.programs import ALWAYS, Program

ROOT = Path(__file__).parents[2]
CHECKOUT = f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"  # on PYTHONPATH
HANGS_AFTER_SECONDS = 60


@dataclass(frozen=True)
class Result:
    """What a program gave: its steps up to where it ended, the session's summary, and how it died or hung, if so."""

    steps: list[Step]
    figures: dict[str, Any] | None
    death: str


def _library(name: str) -> str:
    """Where the compiler has a library."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Server:
    """The process, from outside. OOC_TEST_LIBRARIES names a folder of libraries built with AddressSanitizer."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
        environment |= {"PYTHONPATH": CHECKOUT, "OMP_WAIT_POLICY": "passive"}
        if libraries := os.environ.get("OOC_TEST_LIBRARIES"):
            # With the C++ library beside the runtime, which finds no way to throw where that is loaded later.
            preloaded = " ".join(_library(name) for name in ("libasan.so", "libstdc++.so"))
            environment |= {"_OOC_LIBRARIES": libraries, "LD_PRELOAD": preloaded}
            environment |= {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_abort=0"}  # Python says where it stood
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def run(self, program: Program, fill: int | None = None) -> Result:
        """What a program gives out-of-core, or in plain memory that begins as a byte; then steps see everything."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if fill is not None:
            program = replace(program, way=replace(program.way, look_at_all=True))
        self._process.stdin.write(json.dumps({"program": program.to_json(), "fill": fill}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of the fuzzer ended with status {self._process.wait()}")
        result = json.loads(line)
        return Result([Step(**row) for row in result["steps"]], result["figures"], result.get("death", ""))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _child(program: Program, fill: int | None, write: int, words: int) -> None:
    """Runs the program; its steps go through the pipe, a line each, so that those before a death are known."""
    import faulthandler

    os.dup2(words, 1)
    os.dup2(words, 2)
    faulthandler.enable()
    import ooc

    with os.fdopen(write, "w", buffering=1) as lines:
        if fill is None:
            os.environ.update(ALWAYS | program.settings)
            ooc.enable()
        else:
            fill_fresh_memory(fill)
        space = namespace(program.way)
        for statement in program.statements:
            lines.write(json.dumps({"begins": statement}) + "\n")
            step = execute(statement, space, program.way)
            lines.write(json.dumps({"step": asdict(step)}) + "\n")
            if step.error.startswith(OUT_OF_MEMORY):
                break  # what follows depends on what is missing now
        else:
            lines.write(json.dumps({"begins": "last look"}) + "\n")
            lines.write(json.dumps({"step": asdict(last_look(space))}) + "\n")
        lines.write(json.dumps({"begins": "the end"}) + "\n")
        space.clear()
        if fill is None:
            lines.write(json.dumps({"figures": ooc.summary()}, default=str) + "\n")
            ooc.disable()
        lines.write(json.dumps({"ends": True}) + "\n")


def _run(program: Program, fill: int | None) -> dict[str, Any]:
    read, write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="ooc-fuzz-") as folder, open(f"{folder}/words", "w+b") as words:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.close(read)
                os.environ["OOC_SPLIT_STORE"] = f"{folder}/splits"
                _child(program, fill, write, words.fileno())
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        os.close(write)
        data, hangs = _read_all(read)
        if hangs:
            os.kill(child, signal.SIGABRT)  # so that the fault handler says where it stands
            data += _read_all(read)[0]
        os.close(read)
        _, status = os.waitpid(child, 0)
        rows = [json.loads(line) for line in data.decode().splitlines() if line.endswith("}")]
        result: dict[str, Any] = {"steps": [row["step"] for row in rows if "step" in row]}
        result["figures"] = next((row["figures"] for row in rows if "figures" in row), None)
        if status != 0 or hangs:
            words.seek(0)
            last = [row["begins"] for row in rows if "begins" in row][-1:]
            how = "hangs" if hangs else f"dies with status {os.waitstatus_to_exitcode(status)}"
            result["death"] = f"{how} in {last}\n" + words.read().decode(errors="replace")[-6000:]
        return result


def _read_all(read: int) -> tuple[bytes, bool]:
    """What comes until the other end is closed, and whether nothing came for too long."""
    data = b""
    while True:
        if not select.select([read], [], [], HANGS_AFTER_SECONDS)[0]:
            return data, True
        if not (more := os.read(read, 1 << 20)):
            return data, False
        data += more


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    from ooc import pytorch  # noqa: F401
    from ooc.pytorch import build, session  # noqa: F401
    from ooc.pytorch.splitting import registry

    torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))], fused=True)  # imports what is imported late
    torch.use_deterministic_algorithms(False)  # so does this
    build.load()
    for module in registry.MODULES:
        importlib.import_module(f"ooc.pytorch.splitting.{module}")
    # Called first by two threads, MKL gives other bits now and then: for tanh in 1 of 2,000 plain processes.
    for kind in (torch.float32, torch.float64):
        torch.ones(8, dtype=kind).sqrt().tanh()
    gc.collect()
    gc.freeze()  # or each copy writes to every page of what was imported
    for line in sys.stdin:
        asked = json.loads(line)
        lines.write(json.dumps(_run(Program.from_json(asked["program"]), asked["fill"])) + "\n")


if __name__ == "__main__":
    main()
