"""A program that runs one layer in parts of the size that the planner says, on the emulated device; prints JSON.

    OOC_EMULATED_BANDWIDTH=200MB/s python part_sizes_child.py

Convolutions that need little memory are followed by a layer whose weight is three times the budget. Times are sleeps.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from parts_child import view

from ooc_alloc import READ, WRITE, Core, library_path
from swapd.planner import Planner
from swapd.trace.trace import Machine

CHUNK = 64 << 10
BUDGET = 64 * CHUNK
WEIGHT = 3 * BUDGET
CONVOLUTION_SECONDS, LAYER_SECONDS = 2e-3, 30e-3
ITERATIONS = 9


class Program:
    def __init__(self) -> None:
        driver = str(library_path("libooc_emulated_cuda.so"))
        self.core = Core(driver, budget_bytes=BUDGET, host_budget_bytes=1 << 30, chunk_bytes=CHUNK, small_limit_bytes=0)
        self.planner = Planner(self.core, machine=Machine(200e6, 200e6, 20e-6))
        self.names = {name: self.core.function_id(name) for name in ("fill", "convolution", "linear")}
        self.weight = self.core.malloc_absent(WEIGHT)
        self.expected = np.random.default_rng(5).integers(0, 1 << 32, WEIGHT // 4, np.uint32)
        for first in range(0, WEIGHT, BUDGET // 2):
            self.core.function_begin(self.names["fill"], [(self.weight + first, WRITE, BUDGET // 2)])
            view(self.weight + first, BUDGET // 2)[:] = self.expected[first // 4 : (first + BUDGET // 2) // 4]
            self.core.function_end()
        self.features = self.core.malloc(CHUNK)
        self.sizes: list[int] = []  # of parts, in bytes, by iteration
        self.wrong = 0

    def iteration(self) -> None:
        for _ in range(4):
            self.core.function_begin(self.names["convolution"], [(self.features, READ | WRITE)])
            time.sleep(CONVOLUTION_SECONDS)
            self.core.function_end()
        log = self.planner.splits
        limit = log.part_bytes("aten::linear", "f32[1]") or BUDGET // 2
        size = (limit - CHUNK) // CHUNK * CHUNK  # beside the features
        with log.split("aten::linear", "f32[1]", limit):
            for first in range(0, WEIGHT, size):
                self._part(first, min(size, WEIGHT - first))
        self.sizes.append(size)

    def _part(self, first: int, size: int) -> None:
        at = self.weight + first
        self.core.function_begin(self.names["linear"], [(self.features, READ), (at, READ, size)])
        self.wrong += int((view(at, size) != self.expected[first // 4 : (first + size) // 4]).sum())
        time.sleep(LAYER_SECONDS * size / WEIGHT)
        self.core.function_end()


def main() -> None:
    program = Program()
    planner = program.planner
    planner.boundary()
    planned = []
    for _ in range(ITERATIONS):
        program.iteration()
        planned.append(planner.boundary().followed_plan)
    choice, stats = planner.part_sizes, program.core.stats()
    program.core.audit()
    result: dict[str, Any] = {
        "wrong": program.wrong,
        "sizes": program.sizes,
        "planned": planned,
        "chosen": choice.part_bytes if choice else None,
        "predicted": choice.predicted if choice else (),
        "plan_count": stats["plan_count"],
        "peak": stats["device_peak_bytes"],
        "divergences": stats["divergence_count"],
    }
    program.core.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
