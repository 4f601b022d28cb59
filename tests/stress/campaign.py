"""Runs cases in worker processes, with plain memory twice and in our mode once, and compares what they gave.

The two plain runs fill fresh memory with different bytes (glibc's MALLOC_PERTURB_; zeros in the second run): a sample
on which they disagree has no defined result, and only then may strict mode disagree too.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKOUT = f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"  # on PYTHONPATH
CASE_SECONDS = 600  # a case that takes longer hangs
PLAIN = ("plain a", "plain b")
_FILL = {
    "plain a": {"MALLOC_PERTURB_": "85"},
    "plain b": {"MALLOC_PERTURB_": "255", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
}


@dataclass
class Outcome:
    """What one pass gave for one case: digests by sample, and how the worker died if it did."""

    digests: dict[str, list[str]] = field(default_factory=dict)
    ways: list[tuple[str, str]] = field(default_factory=list)  # operators that did not fit, and how each ran
    death: str = ""
    seconds: float = 0.0


@dataclass
class Pass:
    """What one pass gave for all cases."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    stats: list[dict[str, Any]] = field(default_factory=list)  # of each worker that reached its end


@dataclass
class Report:
    """The comparison of the three passes."""

    cases: int = 0
    samples: int = 0
    errors: list[str] = field(default_factory=list)  # samples on which plain memory raises: strict mode raises the same
    undefined: dict[str, int] = field(default_factory=dict)  # by case, the samples on which the two plain runs disagree
    faults: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    different: list[tuple[str, list[str], list[str]]] = field(default_factory=list)  # of each: its case, ours, plain
    stats: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by case, in our mode
    ways: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by case
    compared: dict[str, int] = field(default_factory=dict)  # by case, its samples

    def failures(self) -> str:
        return "\n".join(self.faults + self.mismatches)


def run(cases: Sequence[str], jobs: int | None = None, mode: str = "strict") -> Report:
    """Runs the three passes over `cases`, `jobs` processes at a time (OOC_STRESS_JOBS, else one for each core).

    Args:
        mode: of the pass that is ours, "strict" or "divided".
    """
    jobs = jobs or int(os.environ.get("OOC_STRESS_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        ours, plain, again = pool.map(lambda name: run_pass(name, cases), (mode, *PLAIN))
    return compare(cases, ours, plain, again)


def compare(cases: Sequence[str], ours: Pass, plain: Pass, again: Pass) -> Report:
    """Every sample of every case; see Report."""
    report = Report(stats=ours.stats)
    for case in cases:
        report.cases += 1
        three = [each.outcomes.get(case, Outcome(death="never ran")) for each in (ours, plain, again)]
        report.seconds[case], report.ways[case] = three[0].seconds, three[0].ways
        for name, outcome in zip(("ours", "plain", "plain"), three):
            if outcome.death:
                report.faults.append(f"{case} ({name}): {outcome.death}")
        if any(outcome.death for outcome in three):
            continue
        if "making samples" in three[1].digests:
            report.faults.append(f"{case} (plain): {three[1].digests['making samples']}")
        for label in sorted(set().union(*(outcome.digests for outcome in three))):
            found, expected, repeated = (outcome.digests.get(label) for outcome in three)
            report.samples += 1
            report.compared[case] = report.compared.get(case, 0) + 1
            if expected is not None and any("Error: " in text for text in expected):
                report.errors.append(f"{case} sample {label}: {expected}")
            if expected != repeated:
                report.undefined[case] = report.undefined.get(case, 0) + 1
            elif found != expected:
                report.different.append((case, found or [], expected or []))
                report.mismatches.append(f"{case} sample {label}: {_difference(found, expected)}")
    return report


def _difference(found: list[str] | None, expected: list[str] | None) -> str:
    if found is None or expected is None or len(found) != len(expected):
        return f"ours {found}, plain {expected}"
    return "; ".join(f"part {i}: ours {f}, plain {e}" for i, (f, e) in enumerate(zip(found, expected)) if f != e)


def run_pass(name: str, cases: Sequence[str]) -> Pass:
    """Runs all cases; a worker that dies is replaced by one that goes on with the next case."""
    result = Pass()
    left = list(cases)
    while left:
        worker = _Worker(name, left)
        done = worker.collect(result)
        if done == 0 and not worker.began:
            raise RuntimeError(f"the {name} worker does not start:\n{worker.last_words()}")
        left = left[done:]
    return result


class _Worker:
    """One process and the lines it writes."""

    def __init__(self, name: str, cases: Sequence[str]) -> None:
        mode = "plain" if name in PLAIN else name
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OOC_", "_OOC_"))}
        environment |= {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": CHECKOUT, "OOC_PLANNING": "blocking"}
        environment |= {"PYTHONHASHSEED": "0"}  # some samples are taken from sets
        environment |= _FILL.get(name, {})
        if os.environ.get("STRESS_RECOMPUTE"):
            environment["_OOC_RECOMPUTE_EVERYTHING"] = "1"
        self.began = False
        self._cases = cases
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.worker", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._words: list[str] = []
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read, self._listen)]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("".join(f"{case}\n" for case in self._cases))
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith("Extension modules"):
                continue
            self._words = [*self._words[-200:], line]

    def last_words(self) -> str:
        """The end of what the process wrote to its standard error."""
        self._threads[2].join(5)
        return "".join(self._words[-30:])

    def collect(self, result: Pass) -> int:
        """Reads until the process ends; returns the number of cases that are over, the fatal one included."""
        over, case, sample = 0, "", ""
        outcome = Outcome()
        while True:
            try:
                text = self._lines.get(timeout=CASE_SECONDS)
            except queue.Empty:
                self._process.kill()
                outcome.death = f"hangs in sample {sample!r}"
                break
            if text is None:
                break
            line = json.loads(text)
            if "begin" in line:
                self.began, case, sample = True, line["begin"], "making samples"
                outcome = result.outcomes[case] = Outcome()
            elif "sample" in line:
                sample = line["sample"]
            elif "digest" in line:
                outcome.digests[sample] = line["digest"]
            elif "ways" in line:
                outcome.ways = [(operator, how) for operator, how in line["ways"]]
            elif "end" in line:
                outcome.seconds, case = line["seconds"], ""
                over += 1
            elif "stats" in line:
                result.stats.append(line["stats"])
        status = self._process.wait()
        if case:
            outcome.death = outcome.death or f"dies with status {status} in sample {sample!r}\n{self.last_words()}"
            return over + 1
        if over < len(self._cases) or status != 0:
            raise RuntimeError(f"a worker ended with status {status} between cases:\n{self.last_words()}")
        return over
