"""First run: all that can be tried on a GPU, each in a process of its own, and one file that says what came of it.

    swapd doctor --first-run [--out FILE]       or, without click, python -m swapd.devices.first_run [FILE]

The file has JSON lines, each written as soon as it is known, so even a machine that freezes leaves what was found until
then: what there is, a line for each attempt, the verdict.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ooc_alloc import library_path
from swapd.devices.probe import CUDA_LIBRARY
from swapd.units import MIB, exact_bytes, parse_bytes

Row = dict[str, Any]  # name, problem (empty: it passed), advice, result (the JSON of its last line of output)
Env = Mapping[str, str]
NO_MORE: Env = {}
FILE = Path("first-run.jsonl")
CHECKOUT = Path(__file__).resolve().parents[2]
_CONTRACT = "build/{}/tests/native/driver_*_test"  # where a checkout has the driver's contract
_PACKAGES = ("ooc", "torch", "nvidia", "triton", "numpy", "cffi")  # whose versions matter
_KEPT_CHARACTERS = 20_000  # of what each attempt printed, from its end
_BUDGET, _LARGER_BUDGET = 0.4, 0.8  # of what lives at once
_SMALL = {"OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB", "OMP_NUM_THREADS": "1"}  # on the emulated device
_PLAIN, _ROOMY, _SWAPPED = "training, plain", "training, with room", "training, out-of-core"
_DEVICE = "import json, sys; from ooc_alloc.probe import Probe; print(json.dumps(Probe(sys.argv[1]).describe()))"
_DOCTOR = """
import dataclasses, json, sys
from swapd.devices.doctor import examine
checks = examine().checks
print(json.dumps([dataclasses.asdict(check) for check in checks]))
sys.exit("; ".join(f"{check.name}: {check.detail} -> {check.remedy}" for check in checks if check.status == "no") or 0)
"""
_PROBE = """
import dataclasses, json, sys
from swapd.devices.probe import QUICK, Effort, measure, open_device
device, emulated = open_device(sys.argv[1])
print(json.dumps(dataclasses.asdict(measure(device, effort=QUICK if emulated else Effort()))))
"""
_ADAPTER = "from ooc.pytorch import build; build.load()"
_ADVICE = (  # the first whose pattern is found in what is known of a failure
    (
        r"libcuda.*cannot open|no CUDA driver|NO_DEVICE|there is no CUDA device",
        "install NVIDIA's driver, look at nvidia-smi and CUDA_VISIBLE_DEVICES; start a container with the GPU",
    ),
    (r"lacks cu|NOT_SUPPORTED|driver version is insufficient|NOT_INITIALIZED", "take a newer NVIDIA driver"),
    (r"no virtual memory management", "take another GPU: compute capability 6.0 or later"),
    (r"No module named 'torch'|built for (the CPU|ROCm)|not compiled with CUDA", "install a PyTorch for CUDA"),
    (r"AdapterError", "install a C++ compiler (apt-get install g++), or name one (CXX=...)"),
    (r"OutOfMemory|(?<!host )out of memory", "end other programs on the GPU, or take a larger one"),
    (r"HOST_MEMORY|host memory", "ulimit -l unlimited, or a smaller OOC_HOST_BUDGET"),
    (r"did not end|device is lost", "OOC_SAFE=1; where the device is only slow, a larger OOC_WAIT_LIMIT"),
    (r"^(contract|training, (with|out))", "OOC_SAFE=1, another OOC_CHUNK_SIZE (8MiB), or a newer NVIDIA driver"),
    (r"", "do what it says; if it says nothing, send the file"),
)


class FirstRun:
    """Runs the attempts one after the other, and writes a line for each."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.alloc = "emulated" if os.environ.get("OOC_ALLOC", "").strip().lower() == "emulated" else "cuda"
        self.size, self.small = "large", dict[str, str]()
        self.table: list[Row] = []
        self.plain: dict[str, str] = {}  # the digests that are right

    def write(self, **line: Any) -> None:
        print(json.dumps(line, default=str), file=self.file, flush=True)

    def step(
        self, name: str, command: list[str], variables: Env = NO_MORE, limit_seconds: float = 300, again: bool = False
    ) -> Row:
        """Runs a command until it ends, or its time is over. It has to pass, unless it is there to learn from."""
        # The training turns the allocator on itself, with the budget that is meant. A process that hangs says where.
        always = {"OOC_ALLOC": "0", "OOC_BUDGET": "", "PYTHONFAULTHANDLER": "1"}
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **self.small, **os.environ, **always, **variables}
        began, problem = time.monotonic(), ""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
            process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
            try:
                process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                problem = f"it did not end within {limit_seconds:.0f} seconds"
            except KeyboardInterrupt:
                problem = "interrupted"
            if problem:
                _end(process)
            said, complained = _tail(output), _tail(errors)
        if not problem and process.returncode != 0:
            how = f"status {process.returncode}" if process.returncode > 0 else signal.Signals(-process.returncode).name
            words = (complained.strip() or said.strip() or "it said nothing").splitlines()
            problem = f"{how}: {next((line for line in reversed(words) if 'Error: ' in line), words[-1])}"
        result: Any = None
        with contextlib.suppress(ValueError, IndexError):
            result = json.loads(said.splitlines()[-1])
        if not problem and name.startswith("training"):
            problem = self.wrong(name, result)
        advice = next(advice for known, advice in _ADVICE if re.search(known, f"{name}: {problem}\n{complained}"))
        row: Row = {"name": name, "problem": problem, "advice": advice if problem else "", "result": result}
        seconds = round(time.monotonic() - began, 1)
        how_it_ran = {"command": command, "variables": variables, "seconds": seconds, "status": process.returncode}
        self.write(**row, **how_it_ran, output="" if result is not None else said, errors=complained)
        print(f"{name:42} {'FAILED' if problem else 'passed'} {seconds:6.1f} s  {problem}", flush=True)
        if not again:
            self.table.append(row)
        if problem == "interrupted":
            raise KeyboardInterrupt
        return row

    def wrong(self, name: str, result: dict[str, Any]) -> str:
        """What is wrong with what a training found, whose every bit is to be that of plain PyTorch."""
        self.plain = self.plain or result["digests"]
        wrong = [key for key, digest in self.plain.items() if result["digests"].get(key) != digest]
        figures = result.get("summary", {})
        if wrong:
            return f"wrong bits in {len(wrong)} of {len(self.plain)} tensors, first in {wrong[0]}"
        if figures and figures["device_peak_bytes"] > figures["budget_bytes"]:
            return "more memory was taken than the budget"
        return "nothing was moved" if name.startswith(_SWAPPED) and not figures["swap_in_bytes"] else ""

    def run(self) -> None:
        """Every attempt, but those that need something that does not work."""
        self.write(first_run=_what_there_is(), alloc=self.alloc)
        python = [sys.executable, "-c"]
        driver = CUDA_LIBRARY if self.alloc == "cuda" else str(library_path("libooc_emulated_cuda.so"))
        device = self.step("device", [*python, _DEVICE, driver], limit_seconds=60)
        self.step("doctor", [*python, _DOCTOR])
        if device["problem"]:
            said = device["problem"].rpartition("Error: ")[2]
            what = "GPU" if self.alloc == "cuda" else "emulated device"
            print(f"There is no {what} that can be used here ({said}), so nothing else was tried.")
            return
        if device["result"]["name"] == "emulated":
            self.size, self.small = "small", _SMALL
        for test in sorted(CHECKOUT.glob(_CONTRACT.format("gpu"))) or sorted(CHECKOUT.glob(_CONTRACT.format("native"))):
            self.step(f"contract, {test.name}", [str(test)], {"OOC_TEST_DRIVER": driver})
        self.step("probe", [*python, _PROBE, self.alloc])
        if not self.step("adapter", [*python, _ADAPTER], limit_seconds=600)["problem"]:
            self.train()

    def train(self) -> None:
        """The training in plain PyTorch, with the allocator and room for all, and with less than half of its needs."""
        module = [sys.executable, "-m", "ooc.pytorch.first_training"]
        where = ["cuda" if self.alloc == "cuda" else "cpu", self.size]
        plain, managed = [*module, "off", *where], [*module, self.alloc, *where]
        found = self.step(_PLAIN, plain)
        if found["problem"]:
            return
        failed, variables = self.step(_ROOMY, managed), dict[str, str]()
        needs = (failed["result"] or {}).get("summary", {}).get("live_peak_bytes") or found["result"].get("peak_bytes")
        if needs:
            budget = {"OOC_BUDGET": str(int(needs * _BUDGET))}
            swapped = self.step(_SWAPPED, managed, budget)
            if swapped["problem"]:
                failed, variables = swapped, budget
        if not failed["problem"]:
            return
        chunk = {**self.small, **os.environ}.get("OOC_CHUNK_SIZE")
        changes = [{"OOC_SAFE": "1"}, {"OOC_CHUNK_SIZE": exact_bytes(4 * (parse_bytes(chunk) if chunk else 2 * MIB))}]
        changes += [{"OOC_BUDGET": str(int(needs * _LARGER_BUDGET))}] if variables else []
        helped = []
        for change in changes:
            text = "=".join(*change.items())
            if not self.step(f"{failed['name']}, {text}", managed, {**variables, **change}, again=True)["problem"]:
                helped.append(text)
        if "wrong bits" in failed["problem"] and self.step("training, plain again", plain, again=True)["problem"]:
            failed["advice"] = "plain PyTorch differs from itself here, so the bits say nothing about the allocator"
        elif helped:
            order = "; the order between streams is wrong here: use it for now" if "OOC_SAFE=1" in helped else ""
            failed["advice"] = f"{' and '.join(helped)} helped{order}"
        else:
            failed["advice"] = f"neither {' nor '.join('='.join(*each.items()) for each in changes)} helped"


def first_run(path: Path = FILE) -> int:
    """Tries everything, prints a table, and returns the exit status: 0 only if all passed."""
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}; name another file", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    run, how = FirstRun(file), ""
    with file:
        try:
            run.run()
        except KeyboardInterrupt:
            how = "interrupted"
        except Exception:
            how = traceback.format_exc()
        failed = [row for row in run.table if row["problem"]]
        how = how or ("failed" if failed or run.table[-1]["name"] != _SWAPPED else "passed")
        run.write(verdict=how, failed=[{**row, "result": None} for row in failed])
    for row in failed:
        print(f"{row['name']}: {row['problem']}\n  -> {row['advice']}")
    print(f"{how}. All that was found is in {path}: send that file")
    return {"passed": 0, "interrupted": 130}.get(how, 1)


def _what_there_is() -> dict[str, Any]:
    packages = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    ask_gpu = "timeout 30 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "packages": {name: packages[name] for name in sorted(packages) if name.startswith(_PACKAGES)},
        "commit": subprocess.getoutput(f"git -C {shlex.quote(str(CHECKOUT))} rev-parse HEAD"),
        "python": sys.version,
        "kernel": platform.platform(),
        "glibc": " ".join(platform.libc_ver()),
        "gpu": subprocess.getoutput(ask_gpu),
        "variables": {key: text for key, text in os.environ.items() if key.startswith(("OOC_", "CUDA_", "PYTORCH_"))},
    }


def _tail(file: Any) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT_CHARACTERS))
    text: str = file.read().decode(errors="replace")
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    """Aborts it, so that it says where it was, and then kills it with its children."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGABRT)
        process.wait(10)
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):  # a driver that hangs keeps it for ever
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


if __name__ == "__main__":
    sys.exit(first_run(*map(Path, sys.argv[1:2])))
