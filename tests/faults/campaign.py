"""Every call site fails once, a few times, for good, and comes late, in small programs that know their bytes.

A site is found by running (`sites.read_list`), not from a list, and then addressed by itself; sites that the binary has
and no program reaches are listed as such. What a program says at its end is in `program.cpp`; a run that does not end
within its time, or dies, fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.sites import LIBRARIES, ROOT, Site, driver_sites, imported_sites, lines_of, read_list

CORE = LIBRARIES / "libooc_alloc.so"
DRIVER = LIBRARIES / "libooc_emulated_cuda.so"
ON_DISK = tuple(f"{name}_on_disk" for name in ("demand", "strict", "plans", "ranges", "host", "fork", "detach"))
TIERED = tuple(f"{name}_in_three_tiers" for name in ("demand", "strict", "plans", "ranges", "streams", "fork"))
SCENARIOS = (
    *("demand", "strict", "troubled", "plans", "ranges", "host", "streams", "fork", "budget", "detach"),
    *(*ON_DISK, *TIERED),
)
SECONDS = 20.0  # of a run that takes well under one: longer is a hang
# As program.cpp ends.
_ENDINGS = {3: "bytes lost", 4: "books wrong", 5: "unnamed error", 6: "not recovered", 7: "bad use"}
# What else fails while sites are looked for that only a failure leads to.
TROUBLE = ";".join(
    f"{call}:every={every}"
    for call, every in {
        "cuMemCreate": 7, "cuMemMap": 5, "cuMemSetAccess": 11, "cuMemUnmap": 9, "cuMemcpyDtoHAsync": 6,
        "cuMemcpyHtoDAsync": 8, "cuEventRecord": 7, "cuEventQuery": 4, "cuStreamQuery": 3, "cuMemHostRegister": 2,
    }.items()
)  # fmt: skip
TORCH = "torch"
TORCH_SETTINGS = {
    "OOC_ALLOC": "emulated",
    "OOC_BUDGET": "6MiB",
    "OOC_CHUNK_SIZE": "64KiB",
    "OOC_SMALL_LIMIT": "32KiB",
    "OMP_NUM_THREADS": "1",
    "OOC_PLANNING": "blocking",
    "OOC_WAIT_LIMIT": "2s",
}
GOOD = ("right", "refused")
DISK = (
    "open", "mkostemp", "unlink", "pread", "pwrite", "fallocate", "posix_fallocate", "sync_file_range", "posix_fadvise",
)  # fmt: skip
SYSTEM = ("mmap", "munmap", "mremap", "mprotect", "msync", "write", "read", "pipe2", "posix_memalign", "dlopen", *DISK)
# Work of these is enqueued, so it can never be done.
ENQUEUE = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWaitEvent")


@dataclass(frozen=True)
class Case:
    """One run: a scenario, a site and how it fails."""

    scenario: str
    site: Site
    mode: str
    settings: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Result:
    """What came of it. `outcome` is one of GOOD, or what is wrong."""

    scenario: str
    call: str
    site: str
    line: str
    mode: str
    outcome: str
    seconds: float
    words: list[str]  # of refusals, each once


def _compile(source: str, target: Path, *arguments: str) -> Path:
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    command += [str(Path(__file__).with_name(source)), "-o", str(target), *arguments, "-ldl"]
    subprocess.run(command, check=True)
    return target


def build(folder: Path) -> Path:
    """Compiles the program; returns its path."""
    headers = (f"-I{ROOT}/ooc_alloc/csrc", f"-I{ROOT}/ooc_alloc/emulated")
    return _compile(
        "program.cpp", folder / "program", *headers, f"-L{LIBRARIES}", "-looc_alloc", f"-Wl,-rpath,{LIBRARIES}"
    )


def build_interposer(folder: Path) -> Path:
    """Compiles the library that makes calls of the system fail; returns its path."""
    return _compile("interposer.cpp", folder / "libfault_interposer.so", "-shared", "-fPIC", "-Wno-attributes")


def run_once(
    program: Path, scenario: str, settings: dict[str, str], seconds: float = SECONDS
) -> tuple[str, float, str, str]:
    """Outcome, seconds, standard output and error of one run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "FAULT"))}
    command = [str(program), scenario, str(DRIVER), "65536"]
    if scenario == TORCH:
        command[0] = str(Path(__file__).with_name("torch_program.py"))
        command.insert(0, sys.executable)
        kept |= {**TORCH_SETTINGS, "OOC_SPLIT_STORE": str(program.with_name("verdicts.sqlite"))}
        kept["PYTHONPATH"] = os.pathsep.join(sys.path)
        seconds *= 3
    else:
        kept["OOC_EMULATED_MEMORY"] = "64MiB"
        kept["FAULTS_DISK"] = str(program.parent)
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env={**kept, **settings}, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired as expired:
        words = expired.stdout if isinstance(expired.stdout, str) else (expired.stdout or b"").decode(errors="replace")
        return "hang", time.monotonic() - began, words, ""
    if done.returncode == 0:
        outcome = "refused" if "refused " in done.stdout else "right"
    else:
        outcome = _ENDINGS.get(done.returncode, f"died ({done.returncode})")
    return outcome, time.monotonic() - began, done.stdout, done.stderr


def modes(call: str, count: int) -> Iterator[tuple[str, str]]:
    """Names and keys of fault rules, for a site that calls `count` times in a run where nothing fails."""
    middle = count // 2
    for first in sorted({0, 1, 2, middle} & set(range(count))):
        yield f"once, call {first}", f"after={first},times=1"
        yield f"4 times from call {first}", f"after={first},times=4"
    for first in sorted({0, middle}):
        yield f"always from call {first}", f"after={first}"
    yield "late, each", "delay=3ms,times=50"
    if call in ENQUEUE:
        for first in sorted({0, middle}):
            yield f"never done, call {first}", f"after={first},times=1,delay=never"


def driver_cases(program: Path, scenarios: tuple[str, ...], folder: Path) -> list[Case]:
    """Finds the sites by running each scenario undisturbed."""
    cases: list[Case] = []
    for scenario in scenarios:
        path = folder / f"{scenario}.sites"
        if (
            scenario == TORCH
        ):  # what exact parts are has to be known before, or the first run asks the device more often
            run_once(program, scenario, {})
        trouble = TROUBLE if scenario == "troubled" else ""
        undisturbed = {"OOC_EMULATED_SITES": str(path), "OOC_EMULATED_FAULTS": trouble}
        outcome, _, output, errors = run_once(program, scenario, undisturbed)
        if outcome != "right" and not (trouble and outcome == "refused"):
            raise RuntimeError(f"{scenario} fails undisturbed: {outcome}\n{output}{errors}")
        for site, count in read_list(path).items():
            if site.module != CORE.name:
                continue
            for name, keys in modes(site.call, count):
                if scenario == TORCH and not (
                    name.startswith(("always from call 0", "once, call 0")) or "never" in keys
                ):
                    continue  # it takes seconds where the others take milliseconds
                settings = {"OOC_EMULATED_FAULTS": f"{site.call}:site={site.name},{keys};{trouble}"}
                if scenario == TORCH:
                    settings["FAULTS_DIGEST"] = output.split()[-1]
                if "never" in keys:
                    settings["FAULTS_NEVER_END"] = "1"
                cases.append(Case(scenario, site, name, settings))
    return cases


def _late(call: str) -> list[tuple[str, str]]:
    short = [("short, each", "0 1000000 -1")] if call in ("pread", "pwrite") else []
    return [] if call == "malloc" else [("late, each", "0 50 3"), *short]


def own_cases(program: Path, interposer: Path, scenarios: tuple[str, ...], folder: Path) -> list[Case]:
    """The same for calls of the system and memory of our own, which the interposer sees."""
    cases = []
    preload = {"LD_PRELOAD": str(interposer)}
    for scenario in scenarios:
        path = folder / f"{scenario}.own"
        outcome, _, output, errors = run_once(program, scenario, {**preload, "FAULT_SITES": str(path)})
        if outcome != "right":
            raise RuntimeError(f"{scenario} fails undisturbed: {outcome}\n{output}{errors}")
        for site, count in read_list(path).items():
            firsts = sorted({0, 1, count // 2, count - 1} & set(range(count)))
            shapes = [(f"once, call {first}", f"{first} 1 0") for first in firsts]
            shapes += [(f"always from call {first}", f"{first} 1000000 0") for first in sorted({0, count // 2})]
            for name, keys in shapes + _late(site.call):
                cases.append(Case(scenario, site, name, {**preload, "FAULT_RULE": f"{site.call} {site.name} {keys}"}))
    return cases


def carry_out(program: Path, cases: list[Case], jobs: int, said: Callable[[Result], None]) -> list[Result]:
    """Runs all cases, `jobs` at a time; `said` hears of each."""
    offsets = {case.site.offset for case in cases if case.site.module == CORE.name}
    lines = lines_of(CORE, sorted(offsets))

    def one(case: Case) -> Result:
        outcome, seconds, output, errors = run_once(program, case.scenario, case.settings)
        # Numbers differ from run to run.
        words = sorted(
            {re.sub(r"0x[0-9a-f]+|\d{3,}", "N", line) for line in output.splitlines() if line.startswith("refused ")}
        )
        if outcome not in GOOD:
            words.append(errors.strip()[-400:])
        line = lines.get(case.site.offset, ["?"])[0]
        result = Result(
            case.scenario, case.site.call, case.site.name, line, case.mode, outcome, round(seconds, 3), words
        )
        said(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, cases))


def report(results: list[Result]) -> dict[str, Any]:
    """Counts of what came of it, and the sites of the binary that nothing reached."""
    reached = {(result.call, result.site) for result in results}
    existing = driver_sites(CORE) | imported_sites(CORE, SYSTEM)
    missed = sorted(site for site in existing if (site.call, site.name) not in reached)
    lines = lines_of(CORE, [site.offset for site in missed]) if missed else {}
    kinds = Counter(
        "driver" if call.startswith("cu") else "memory" if call == "malloc" else "system" for call, _ in reached
    )
    outcomes = Counter(result.outcome for result in results)
    return {
        "sites": len(reached),
        "sites_by_kind": dict(kinds),
        "sites_of_driver_and_system_in_binary": len(existing),
        "sites_not_reached": [f"{site.call} {lines[site.offset][0]}" for site in missed],
        "runs": len(results),
        "outcomes": dict(outcomes),
        "bytes_lost": outcomes["bytes lost"],
        "hangs": outcomes["hang"],
        "longest_seconds": max(result.seconds for result in results),
    }
