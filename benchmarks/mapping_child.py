"""Replays a recorded step on the emulated device, with functions on a stream that sleep as long as they are to take.

    python -m benchmarks.mapping_child OUTPUT.json TRACE PACE ITERATIONS BUDGET CHUNK

Nothing is computed and no processor is needed for it, so copies and memory calls have the machine to themselves, as
they have a GPU's. As on a GPU, the host enqueues ahead of the device and waits for it at the end of each step.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.child import Turn, Watch
from benchmarks.runs import ROOT
from ooc_alloc import Core, library_path
from swapd.planner import Planner
from swapd.summary import derived_figures
from swapd.trace.trace import Trace

NON_BLOCKING = 1


class StreamCore(Core):
    """A core whose functions run on a stream; `work` has the seconds of those to come."""

    def __init__(self, budget_bytes: int, chunk_bytes: int) -> None:
        path = str(library_path("libooc_emulated_cuda.so"))
        super().__init__(
            path,
            budget_bytes=budget_bytes,
            host_budget_bytes=4 << 30,
            chunk_bytes=chunk_bytes,
            small_limit_bytes=chunk_bytes // 2,
            asynchronous=True,
        )
        self.driver = ctypes.CDLL(path)
        self.sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        stream = ctypes.c_void_p()
        if self.driver.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING) != 0:
            raise RuntimeError("the emulated device gives no stream")
        self.stream = int(stream.value or 0)
        self.work: Iterator[float] = iter(())

    def function_begin(self, identifier: int, operands: Iterable[Any], stream: int | None = None) -> None:
        super().function_begin(identifier, operands, self.stream)

    def function_end(self, keep_allocations: bool = False) -> None:
        microseconds = round(next(self.work, 0.0) * 1e6)
        stream, argument = ctypes.c_void_p(self.stream), ctypes.c_void_p(microseconds)
        if microseconds and self.driver.cuLaunchHostFunc(stream, self.sleep, argument) != 0:
            raise RuntimeError("the emulated device takes no work")
        super().function_end(keep_allocations)

    def free(self, address: int) -> None:
        self.free_on(address, self.stream)


def main() -> None:
    output, path, pace, iterations, budget, chunk = sys.argv[1:]
    sys.path.append(str(ROOT / "tests" / "unit"))
    trace = Trace.load(path)
    core = StreamCore(int(budget), int(chunk))
    planner = Planner(core, asynchronous=True)
    replay = import_module("replay").Replay(core, trace, planner, pace=0.0)
    watch = Watch(planner, Path(output).with_suffix(".trace"), Turn(""))
    seconds = float(pace) * trace.function_seconds
    for _ in range(int(iterations)):
        core.work = iter(seconds.tolist())
        replay.iteration()
        core.synchronize()
        watch.step()
        step = watch.steps[-1]
        if step["forward_seconds"] + step["backward_seconds"] < float(seconds.sum()):
            step.pop("simulated_seconds", None)  # the device was not asked how long functions took, only the host
    stats = core.stats()
    core.audit()
    result = {"steps": watch.steps, "summary": stats | derived_figures(stats, True)}
    Path(output).write_text(json.dumps(result), encoding="utf-8")
    replay.close()
    core.close()


if __name__ == "__main__":
    main()
