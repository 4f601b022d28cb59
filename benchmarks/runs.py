"""One run of a workload in a process of its own, as a record that is kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import machine
from benchmarks.child import TURNS
from benchmarks.workloads import CHUNK_BYTES, Workload

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 600
T = TypeVar("T")


class RunFailed(Exception):
    """A run ended badly; the message shows the end of its output."""


def run(
    workload: Workload,
    steps: int,
    *,
    quick: bool = False,
    threads: int = 1,
    alloc: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    budget_bytes: int | None = None,
    bytes_per_second: float | None = None,
    policy: str = "auto",
    faults: str = "",
    host_budget_bytes: int | None = None,
    disk: Path | None = None,
    trace_path: Path | None = None,
    turns: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Trains `workload` for so many steps and returns the record of the run.

    Args:
        threads: of PyTorch's kernels. One core is left for the copies where there is more than one.
        alloc: False is plain PyTorch.
        budget_bytes: None is as much as the device has.
        bytes_per_second: of the link, each way; None is as fast as memcpy.
        faults: rules of ``OOC_EMULATED_FAULTS``.
        host_budget_bytes: of host memory for swapped data; None is as much as there is.
        disk: a folder on a disk below host memory.
        trace_path: gets the trace of the last step.
        turns: pipes, where the steps wait for those of another run (`in_turns`).

    Raises:
        RunFailed: the program ended with an error or hung.
    """
    variables = {"OMP_NUM_THREADS": str(threads)}
    if alloc:
        variables |= {
            "OOC_ALLOC": "emulated",
            "OOC_CHUNK_SIZE": str(chunk_bytes),
            "OOC_SMALL_LIMIT": str(chunk_bytes // 2),
            "OOC_POLICY": policy,
            "OOC_PLANNING": "blocking",  # which steps are the warm-up is the same every time
        }
        if budget_bytes is not None:
            variables["OOC_BUDGET"] = str(budget_bytes)
        if bytes_per_second is not None:
            variables["OOC_EMULATED_BANDWIDTH"] = f"{bytes_per_second:.0f}B/s"
        if faults:
            variables["OOC_EMULATED_FAULTS"] = faults
        if host_budget_bytes is not None:
            variables["OOC_HOST_BUDGET"] = str(host_budget_bytes)
        if disk is not None:
            variables["OOC_DISK"] = str(disk)
    description, stolen = machine.describe(), machine.stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
        output, state = Path(folder) / "child.json", Path(folder) / "state.pt"
        command = [sys.executable, "-m", "benchmarks.child", str(output), *workload.command(quick=quick)]
        command += ["--steps", str(steps), "--save", str(state)]
        said = start(command, variables, turns)
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        digest = digest_of(state)
        if trace_path is not None:
            shutil.copy(output.with_suffix(".trace"), trace_path)
    if alloc and result["summary"] is None:
        raise RunFailed(f"the allocator was not active\n{said[-3000:]}")
    return {
        "workload": workload.name,
        "arguments": [*workload.command(quick=quick)[1:], "--steps", str(steps)],
        "environment": variables,
        "machine": description,
        "load_average_after": machine.load(),
        "stolen_seconds": machine.stolen_seconds() - stolen,
        "digest": digest,
        **result,
    }


def in_turns(*runs: Callable[[tuple[int, ...]], T]) -> list[T]:
    """Runs beside each other, whose steps take turns: what slows the machine down slows a step of each.

    Each of `runs` is called with the value for `turns` of :func:`run`. One that has ended is passed over.
    """
    begins, ends = [os.pipe() for _ in runs], [os.pipe() for _ in runs]

    def call(index: int) -> T:
        pipes = begins[index][0], ends[index][1]
        try:
            return runs[index](pipes)
        finally:
            for pipe in pipes:
                os.close(pipe)

    with ThreadPoolExecutor(len(runs)) as pool:
        found = [pool.submit(call, index) for index in range(len(runs))]
        left = list(zip((begin for _, begin in begins), (end for end, _ in ends)))
        while left:
            left = [turn for turn in left if _took(*turn)]
        for (_, begin), (end, _) in zip(begins, ends):
            os.close(begin)
            os.close(end)
        return [future.result() for future in found]


def _took(begin: int, end: int) -> bool:
    """Whether a run has had its turn and goes on; False if it has ended."""
    try:
        os.write(begin, b"!")
    except BrokenPipeError:
        return False
    return os.read(end, 1) != b""


def start(command: list[str], variables: dict[str, str], turns: tuple[int, ...] = ()) -> str:
    """Runs a command with these variables in its environment, and returns what it said; `turns` as of :func:`run`.

    Raises:
        RunFailed: it ended with an error or hung.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment | variables | {TURNS: " ".join(map(str, turns))},
            pass_fds=turns,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise RunFailed(f"no end after {TIMEOUT_SECONDS} s: {' '.join(command)}") from expired
    if done.returncode != 0:
        raise RunFailed(f"status {done.returncode}: {' '.join(command)}\n{done.stdout[-3000:]}")
    return done.stdout


def digest_of(path: Path) -> str:
    """SHA-256 over every tensor and number that `torch.save` wrote there: types, shapes and bits."""
    import torch

    total = hashlib.sha256()
    for name, leaf in _leaves(torch.load(path, weights_only=True)):
        if isinstance(leaf, torch.Tensor):
            words = f"{name} {leaf.dtype} {list(leaf.shape)}"
            data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, float):
            words, data = f"{name} float", struct.pack("<d", leaf)
        else:
            words, data = f"{name} {type(leaf).__name__}", repr(leaf).encode()
        total.update(words.encode() + b"\0" + data)
    return total.hexdigest()


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def torch_threads() -> int:
    """Threads for PyTorch's kernels: all cores but one, which is left for the copies (a GPU has engines for them)."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
