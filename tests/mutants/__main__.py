"""Planted mistakes: `python -m tests.mutants [--sample N] [--only WORD ...] [--jobs N] [--out FILE] [--table]`.

Each file of `patches/` is one mistake: two lines of words and a patch of a few lines::

    Costs: what a user would lose, in a sentence.
    Suite: native core_demand_test | pytest tests/unit/test_plan.py -k words | cuda side_streams graphs
    --- a/file
    +++ b/file

A mistake is planted in a copy of the checkout, built there, and given to its suite, which must fail. Results are kept
by a digest of the patch and of the file that it changes: a run goes on from where the last one stopped. A mistake in
code that has changed since is planted again, and so is one that survived, as tests may have been written meanwhile.
The suite `cuda` is some whole programs of `make test-cuda`, each with two seeds, in the environment of that target;
`cuda-checks` is some of `make check-cuda-build`.

A mistake that changes nothing which a program or its budget could show has a third line, `Equivalent: why`. It may
survive, and is expected to.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

from swapd.progress import note

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).with_name("patches")
RESULTS = ROOT / "benchmarks" / "results" / "emulated" / "mutants" / "results.jsonl"
PLACE = ROOT / "build" / "mutants"  # the copies, each with its environment and its build
TIMEOUT_SECONDS = 1800  # of a suite
CUDA_TESTS = {"cuda": "tests/cuda_build/test_programs.py", "cuda-checks": "tests/cuda_build/test_cuda_build.py"}
CUDA_PYTHON = ROOT / os.environ.get("CUDA_VENV", ".venv-cuda") / "bin" / "python"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A planted mistake; `name` is mechanism/mistake."""

    name: str
    costs: str
    suite: str
    patch: str
    equivalent: str = ""  # why nothing can notice it; empty for what must be noticed

    @property
    def expected(self) -> str:
        """The outcome that is wanted."""
        return "survived" if self.equivalent else "noticed"

    @property
    def file(self) -> str:
        """The file that it changes."""
        (line,) = (line for line in self.patch.splitlines() if line.startswith("+++ b/"))
        return line.removeprefix("+++ b/")

    def planted(self, text: str) -> str:
        """The file's text with the mistake in it. Raises ValueError unless each hunk fits in exactly one place."""
        for hunk in self.patch.split("\n@@ ")[1:]:
            lines = hunk.splitlines(keepends=True)[1:]
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            if text.count(old) != 1:
                raise ValueError(f"{self.name} fits {self.file} in {text.count(old)} places")
            text = text.replace(old, new)
        return text

    @property
    def digest(self) -> str:
        """Of the patch, its suite and the file as it is."""
        text = f"{self.suite}\n{self.patch}".encode() + (ROOT / self.file).read_bytes()
        return hashlib.sha256(text).hexdigest()[:16]


def read(path: Path) -> Mutant:
    """The mistake in a file. Raises ValueError if its words are missing."""
    head, mark, patch = path.read_text(encoding="utf-8").partition("--- a/")
    words = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if not mark or set(words) - {"Equivalent"} != {"Costs", "Suite"}:
        raise ValueError(f"{path}: a mistake has a line 'Costs: ...', a line 'Suite: ...', and a patch")
    name, equivalent = f"{path.parent.name}/{path.stem}", words.get("Equivalent", "")
    return Mutant(name, words["Costs"], words["Suite"], mark + patch, equivalent)


def all_mutants() -> list[Mutant]:
    """Every mistake that there is, by name."""
    return [read(path) for path in sorted(PATCHES.glob("*/*.patch"))]


class Copy:
    """A copy of the checkout with an environment of its own, which knows nothing of the checkout's editable install."""

    def __init__(self, number: int, compilers: int) -> None:
        self.place = PLACE / str(number)
        self.compilers = compilers
        self.tree = self.place / "tree"
        self._update()
        environment = self.place / "environment"
        if not environment.exists():
            venv.create(environment, with_pip=False)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        # A path file behind a path file is not read, so the editable install stays unknown; the others are copied.
        libraries = Path(sysconfig.get_path("purelib"))
        (packages / "0-libraries.pth").write_text(f"{libraries}\n")
        for path in libraries.glob("*.pth"):
            if "editable" not in path.name:
                shutil.copyfile(path, packages / path.name)
        self.python = environment / "bin" / "python"
        self.build = self.place / "build"
        # Compiling takes most of the time.
        options = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DOOC_INPLACE=ON")
        subprocess.run(["cmake", "-S", self.tree, "-B", self.build, *options], check=True, capture_output=True)
        self.make("ooc_alloc", "ooc_emulated_cuda")

    def _update(self) -> None:
        """Makes the copy's files those of the checkout. What is the same is left, so that little is built again."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        wanted = {name for name in names if name and (ROOT / name).is_file()}
        known = self.place / "files.json"
        for name in set(json.loads(known.read_text()) if known.exists() else []) - wanted:
            (self.tree / name).unlink(missing_ok=True)
        self.tree.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            target = self.tree / name
            if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target)
        known.write_text(json.dumps(sorted(wanted)))

    def make(self, *targets: str) -> bool:
        """Builds targets. Returns false if they do not compile."""
        command = ["cmake", "--build", str(self.build), "--parallel", str(self.compilers), "--target", *targets]
        return subprocess.run(command, capture_output=True).returncode == 0

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """A mistake is in the copy until the end of the block. Raises ValueError if its patch does not fit."""
        path = self.tree / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.planted(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def failure(self, suite: str, timeout: float = TIMEOUT_SECONDS) -> str | None:
        """The first test of a suite that fails on the copy as it is; empty if all pass, None if it does not compile."""
        kind, _, arguments = suite.partition(" ")
        if not self.make(*(arguments.split() if kind == "native" else ("ooc_alloc", "ooc_emulated_cuda"))):
            return None
        if kind == "native":
            chosen = f"^({'|'.join(arguments.split())})(_on_disk|_in_three_tiers)?$"
            command = ["ctest", "--test-dir", str(self.build), "-R", chosen]
        else:
            python, words = self.python, arguments.split()
            if kind in CUDA_TESTS:
                python, words = CUDA_PYTHON, [CUDA_TESTS[kind], "-k", " or ".join(words)]
            command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
        kept["CUDA_SEEDS"] = "1 2"
        kept["PYTHONPATH"] = f"{self.tree}{os.pathsep}{self.tree / 'integrations'}"
        said = self.place / "output.txt"
        with (
            said.open("w") as file,
            subprocess.Popen(
                command, cwd=self.tree, env=kept, start_new_session=True, stdout=file, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                if process.wait(timeout) == 0:
                    return ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
                return f"no end within {timeout:.0f} s"
        found = re.search(r"^FAILED (?:\S+::)?(\S+)|^\s*\d+ - (\w+) \(", said.read_text(errors="replace"), re.MULTILINE)
        return found[1] or found[2] if found else "how it ends"


def plant(copy: Copy, mutant: Mutant, timeout: float) -> dict[str, object]:
    """Plants one mistake and returns what its suite made of it. A suite that takes longer hangs, and so notices it."""
    began = time.monotonic()
    with copy.planted(mutant):
        by = copy.failure(mutant.suite, timeout)
    outcome = "does not compile" if by is None else "noticed" if by else "survived"
    seconds = round(time.monotonic() - began, 1)
    return {"name": mutant.name, "outcome": outcome, "by": by or "", "seconds": seconds, "digest": mutant.digest}


def kept_results(path: Path) -> dict[str, dict[str, object]]:
    """The newest result of each mistake, by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def table(mutants: list[Mutant], results: dict[str, dict[str, object]]) -> str:
    """The results as a table for docs/trust.md."""
    rows = ["| planted in | what it would cost | suite | outcome | seconds |", "|---|---|---|---|---|"]
    for mutant in mutants:
        found = results.get(mutant.name, {})
        outcome, seconds = found.get("outcome", "not run"), found.get("seconds", "")
        outcome = f"{outcome} by {found['by']}" if found.get("by") else outcome
        if mutant.equivalent:
            outcome = f"{outcome}; equivalent: {mutant.equivalent}"
        rows.append(f"| {mutant.name} | {mutant.costs} | `{mutant.suite}` | {outcome} | {seconds} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="only so many, drawn by the day")
    parser.add_argument("--only", nargs="*", help="only those whose names hold one of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies at work beside each other")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of results [%(default)s]")
    parser.add_argument("--table", action="store_true", help="run nothing: the table of the results")
    options = parser.parse_args()
    mutants = all_mutants()
    results = kept_results(options.out)
    if options.table:
        print(table(mutants, results), end="")
        return 0
    if not CUDA_PYTHON.exists():
        print("mistakes for whole programs on CUDA are left out: `make test-cuda` makes the environment", flush=True)
        mutants = [mutant for mutant in mutants if mutant.suite.split()[0] not in CUDA_TESTS]
    chosen = [mutant for mutant in mutants if not options.only or any(word in mutant.name for word in options.only)]
    if options.sample is not None:
        chosen = random.Random(datetime.date.today().toordinal()).sample(chosen, min(options.sample, len(chosen)))
    settled = {(name, row["digest"], row["outcome"]) for name, row in results.items()}
    waiting = [mutant for mutant in chosen if (mutant.name, mutant.digest, mutant.expected) not in settled]
    print(f"{len(chosen)} mistakes, {len(chosen) - len(waiting)} of them known from before", flush=True)
    suites: dict[str, list[Mutant]] = {}
    for mutant in waiting:
        suites.setdefault(mutant.suite, []).append(mutant)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = min(options.jobs, len(suites))
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(number, max(1, (os.cpu_count() or 2) // jobs)))

    def plant_all(suite: str) -> bool:
        """Returns false if the suite fails by itself, and so notices nothing."""
        copy = copies.get()
        try:
            began = time.monotonic()
            if (by := copy.failure(suite)) != "":
                print(f"{suite}: it does not pass without a mistake: {by or 'it does not compile'}", flush=True)
                return False
            # The adapter may have to be compiled, which is no hang.
            timeout = min(300 + 5 * (time.monotonic() - began), TIMEOUT_SECONDS)
            for mutant in suites[suite]:
                row = plant(copy, mutant, timeout)
                results[mutant.name] = row
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(said := f"{row['outcome']}: {mutant.name} ({row['seconds']} s) {row['by']}", flush=True)
                note(said)
            return True
        finally:
            copies.put(copy)

    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        if not all(list(pool.map(plant_all, suites))):
            return 2
    return 0 if all(results[mutant.name]["outcome"] == mutant.expected for mutant in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
