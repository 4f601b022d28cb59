"""Looks for programs whose bits depend on where their memory is: `python -m tests.fuzz --minutes 120`.

Programs come in batches, each from a seed of its own. What a batch found is a line of the file of results, and the next
campaign goes on with the batch after the last one there. A program that fails is made small by Hypothesis and written
beside the file, as a script.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from swapd.progress import note
from swapd.units import parse_bytes
from tests.fuzz.execution import OUT_OF_MEMORY, Way, settings_kept
from tests.fuzz.programs import Program, difference, programs
from tests.fuzz.server import ROOT, Result, Server

BATCH_PROGRAMS = 200
SHRINKING_SECONDS = 120
_FILLS = (0x55, 0xFE)


@dataclass
class Batch:
    """What the programs of one seed gave. The failure, if there is one, is of the smallest program that fails."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failure: str = ""
    program: Program | None = None

    def line(self) -> str:
        row = {"batch": self.number, **self.counts, "seconds": round(self.seconds, 1), "failure": self.failure}
        return json.dumps(row | ({"program": json.loads(self.program.to_json())} if self.program else {}))


def judge(server: Server, program: Program, counts: Counter[str]) -> str:
    """Why a program is wrong out-of-core; empty if it is right, was refused with a reason, or has no defined result."""
    result = server.run(program)
    counts["programs"] += 1
    counts["statements"] += len(program.statements)
    counts["errors_in_plain_memory"] += sum(bool(step.error) for step in program.plain)
    _count_figures(result, counts)
    reason = result.death or difference(program, result.steps) or _broken_promise(program, result)
    if not reason:
        return ""
    plain = [server.run(program, fill) for fill in _FILLS]
    if plain[0].death or (plain[0].steps != plain[1].steps and not result.death):
        counts["undefined"] += 1
        return ""
    return result.death or difference(program, result.steps, plain[0].steps) or _broken_promise(program, result)


def _count_figures(result: Result, counts: Counter[str]) -> None:
    counts["out_of_memory"] += any(step.error.startswith(OUT_OF_MEMORY) for step in result.steps)
    if result.figures is None:
        return
    counts["moved"] += result.figures["swap_out_bytes"] > 0
    counts["planned"] += result.figures["plan_count"] > 0
    counts["in_parts"] += bool(result.figures.get("split_layers"))
    counts["on_host_memory"] += result.figures["host_backed_function_count"] > 0


def _broken_promise(program: Program, result: Result) -> str:
    figures, budget_bytes = result.figures or {}, parse_bytes(program.settings["OOC_BUDGET"])
    if figures and figures["device_peak_bytes"] > budget_bytes:
        return f"{figures['device_peak_bytes']} bytes on the device, and the budget is {budget_bytes}"
    return "" if figures.get("external_fragmentation_ratio", 0) == 0 else "the books do not add up"


class _Enough(BaseException):
    """Ends Hypothesis's search: for a program that fails, or for a smaller one."""


def run_batch(server: Server, number: int, examples: int = BATCH_PROGRAMS, seconds: float = float("inf")) -> Batch:
    """So many programs, or as many as there is time for; it ends with the first that fails, made small."""
    batch = Batch(number)
    torch.use_deterministic_algorithms(False)  # imports much
    gc.collect()
    gc.freeze()  # programs collect garbage, of which what was imported is none
    with settings_kept():
        server.run(Program({}, Way(), []))  # the first program waits for the adapter's compiler
        began = found = time.monotonic()

        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(programs())
        def check(program: Program) -> None:
            nonlocal found
            now = time.monotonic()
            if now - found > SHRINKING_SECONDS if batch.failure else now - began > seconds:
                raise _Enough
            reason = judge(server, program, batch.counts)
            if reason:
                found = found if batch.failure else time.monotonic()
                batch.failure, batch.program = reason, program
            assert not reason

        try:
            check()
        except (AssertionError, Flaky, _Enough) as end:
            if not batch.failure and not isinstance(end, _Enough):
                raise
    batch.seconds = time.monotonic() - began
    return batch


def run(results: Path, minutes: float, jobs: int) -> bool:
    """Batches, `jobs` at a time, until the time is over; whether none failed. Each is a process of its own."""
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    numbers = iter(range(1 + max((row["batch"] for row in done), default=0), 1 << 30))
    until, failed = time.monotonic() + 60 * minutes, 0

    def work() -> int:
        failures = 0
        while time.monotonic() < until:
            number = next(numbers)
            command = [sys.executable, "-m", "tests.fuzz", "--batch", str(number), "--results", str(results)]
            failures += subprocess.run(command, cwd=ROOT, check=False).returncode != 0
        return failures

    with ThreadPoolExecutor(jobs) as pool:
        failed = sum(pool.map(lambda _: work(), range(jobs)))
    return failed == 0


def keep(batch: Batch, results: Path) -> None:
    """Adds a batch to the file, and its failure as a script beside it."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as lines:
        lines.write(batch.line() + "\n")
    note(f"batch {batch.number}: {batch.failure or 'passed'}")
    if batch.program is not None:
        script = results.with_name(f"failure_{batch.number}.py")
        reason = "".join(f"# {line}\n" for line in batch.failure.splitlines()[:40])
        script.write_text(reason + batch.program.script(), encoding="utf-8")
        print(f"batch {batch.number}: {batch.failure[:2000]}\n  as a script: {script}", file=sys.stderr)
