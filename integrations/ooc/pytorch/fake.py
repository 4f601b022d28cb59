"""Fake recording: makes a trace of a model's iteration without its memory, its arithmetic or its device.

    trace = record(resnet50, batch=1440, device=get_device("v100-nvlink2"))

`make(batch, ...)` builds the model and returns what runs one iteration; it is called under fake tensors, so a model of
any size takes no memory. Function times come from a roofline model of the device, or from a trace that was recorded
in a real run of the same sequence. The docstrings of `fake_mode` and `like_cuda` say what such a trace lacks.

`swapd record --fake` runs this file as a program of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ooc.pytorch.fake_compiled import recording_kernels
from ooc.pytorch.fake_mode import SLICE_BYTES, FakeError, FakeRun, Make, fake_tensors, iteration
from ooc.pytorch.like_cuda import like_cuda
from ooc.pytorch.roofline import Roofline
from ooc.pytorch.source_lines import without_lines
from swapd.devices.roofline import Device, get_device
from swapd.trace.sequence import SequenceRecorder
from swapd.trace.trace import Trace
from swapd.trace.trace_file import TraceError

ITERATIONS = 6  # run at most, until two that follow each other are the same
SUITE = "benchmarks.models"  # has NAMED: name -> make; only in a source checkout


def record(
    make: Make,
    batch: int,
    device: Device | None = None,
    *,
    times: Trace | None = None,
    chunk_bytes: int = 2 << 20,
    small_limit_bytes: int = 1 << 20,
    slice_bytes: int = SLICE_BYTES,
    **arguments: Any,
) -> Trace:
    """The trace of one iteration in the steady state.

    Args:
        make: ``make(batch, **arguments)`` returns a function without arguments that runs one iteration.
        batch: passed on to `make`.
        device: its roofline gives the functions' times, and the program chooses as on CUDA. If it is None, the program
            chooses as on the CPU, and functions take no time unless `times` says otherwise.
        times: a trace of the same sequence of functions, recorded in a real run, whose times are taken over.
        chunk_bytes: the chunk size of the allocator that the trace is for.
        small_limit_bytes: the largest allocation that stays in a slab and so is no variable.
        slice_bytes: operators over whole lists run in slices of so many bytes.

    Raises:
        FakeError: a function's result depends on data, iterations differ, or `times` has another sequence.
    """
    recorder = SequenceRecorder(chunk_bytes, small_limit_bytes, device.link if device is not None else None)
    run = FakeRun(recorder, None if device is None else Roofline(device), slice_bytes)
    with like_cuda() if device is not None else nullcontext(), fake_tensors(), run, recording_kernels(run):
        trace = _steady(recorder, iteration(make, batch, arguments))
    return trace if times is None else with_times(trace, times)


def _steady(recorder: SequenceRecorder, step: Callable[[], Any]) -> Trace:
    """Runs iterations until two in a row are the same: only then does the trace's `previous` mean something."""
    recorder.finish()  # ends the record of what `make` did
    last = None
    for _ in range(ITERATIONS):
        step()
        trace = recorder.finish()
        if trace.functions == 0:
            raise FakeError("an iteration runs no operator")
        if trace.fingerprint == last:
            return trace
        last = trace.fingerprint
    raise FakeError(f"iterations differ: {ITERATIONS} were run, and no two that follow each other are the same")


def with_times(trace: Trace, times: Trace) -> Trace:
    """Returns `trace` with the functions' names and times, and the link, of `times`.

    Kernels are the same with and without source lines, which a module from Inductor's caches may have lost.

    Raises:
        FakeError: `times` has other functions; the message names the first that differs.
    """
    ours, theirs = (list(map(without_lines, a_trace.function_names)) for a_trace in (trace, times))
    if ours != theirs:
        pairs = zip([*ours, "the end"], [*theirs, "the end"])
        index, here, there = next((i, a, b) for i, (a, b) in enumerate(pairs) if a != b)
        raise FakeError(
            f"the trace with the times is of another sequence: function {index} is {there} there, and {here} here"
        )
    return replace(
        trace,
        function_names=times.function_names,
        function_start=times.function_start,
        function_seconds=times.function_seconds,
        machine=times.machine or trace.machine,
    )


# ---- as a program ----------------------------------------------------------------------------------------------------


def find(name: str) -> Make:
    """The function that "SCRIPT.py:FUNCTION", "MODULE:FUNCTION" or a model's name in the suite stands for.

    Raises:
        FakeError: there is no such thing; the message says what there is.
    """
    where, colon, function = name.rpartition(":")
    if not colon:
        return _named(name)
    try:
        module = _load_script(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (OSError, ModuleNotFoundError) as error:
        raise FakeError(f"cannot load {where}: {error}") from None
    made = getattr(module, function, None)
    if not callable(made):
        raise FakeError(f"{where} has no function {function!r}")
    return made  # type: ignore[no-any-return]


def _named(name: str) -> Make:
    root = Path(__file__).resolve().parents[2]
    if (root / SUITE.replace(".", "/")).is_dir() and str(root) not in sys.path:
        sys.path.append(str(root))
    try:
        named: dict[str, Make] = importlib.import_module(SUITE).NAMED
    except ModuleNotFoundError:
        raise FakeError(f"{name!r} is no SCRIPT.py:FUNCTION; models with names are in a source checkout only") from None
    by_letters = {_letters(known): made for known, made in named.items()}
    if _letters(name) not in by_letters:
        raise FakeError(f"no model {name!r}; there are {', '.join(named)}, or give SCRIPT.py:FUNCTION")
    return by_letters[_letters(name)]


def _letters(name: str) -> str:
    """A name as names are compared: papers write ResNet-50 and AlexNet, the suite resnet50 and alexnet."""
    return "".join(filter(str.isalnum, name.lower()))


def _load_script(path: Path) -> ModuleType:
    """Loads the script as a module that is not `__main__`. Its imports are looked for in its own folder first."""
    if not path.is_file():
        raise OSError("there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OSError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def main(text: str) -> int:
    """Records what the JSON object `text` asks for; its keys are those that `swapd/cli/record.py` writes."""
    wanted = json.loads(text)
    try:
        trace = record(
            find(wanted["program"]),
            wanted["batch"],
            None if wanted["device"] is None else get_device(wanted["device"]),
            times=None if wanted["times"] is None else Trace.load(wanted["times"]),
            chunk_bytes=wanted["chunk_bytes"],
            small_limit_bytes=wanted["small_limit_bytes"],
            **wanted["arguments"],
        )
        trace.save(wanted["output"])
    except (FakeError, TraceError, OSError) as error:
        print(f"swapd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1]))
