"""Programs whose variables are larger than the budget and used in ranges, on the emulated device; prints JSON.

    python parts_child.py weights|activations|host POLICY

A function reads and writes real bytes through the addresses, as a kernel would. `test_parts_executed.py` looks at what
the core moved, and when.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc_alloc import READ, WRITE, Core, library_path
from swapd.planner import Planner
from swapd.trace.trace import Machine

CHUNK = 64 << 10
PARTS, PART = 24, 6 * CHUNK + 4096  # a part ends within a chunk, which the next one begins in
LAYERS = 2
BUDGET = 40 * CHUNK
WEIGHT = PARTS * PART
ITERATIONS, WATCHED = 8, 3
_COUNTED = ("swap_in_bytes", "swap_out_bytes", "demand_swap_in_count", "demand_swap_in_bytes", "clean_drop_bytes")


def view(address: int, size: int) -> NDArray[np.uint32]:
    """The device's memory as numbers."""
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint32)


class Program:
    def __init__(self, policy: str) -> None:
        driver = str(library_path("libooc_emulated_cuda.so"))
        self.core = Core(driver, budget_bytes=BUDGET, host_budget_bytes=1 << 30, chunk_bytes=CHUNK, small_limit_bytes=0)
        self.planner = Planner(self.core, policy=policy, machine=Machine(1e9, 1e9))
        self.names = {name: self.core.function_id(name) for name in ("fill", "layer", "forward", "backward", "sum")}
        self.wrong = 0

    def run(self, name: str, *operands: tuple[int, ...]) -> None:
        """Begins a function; the daemon then does what the plan lets it do while the function runs.

        A part takes 0.4 ms to come in; a function takes longer, so that a plan can bring in the next part ahead of it.
        """
        self.core.function_begin(self.names[name], list(operands))  # type: ignore[arg-type]
        self.core.settle()
        time.sleep(0.001)

    def run_on_host(self, *operands: tuple[int, ...]) -> None:
        self.core.function_begin_host(self.names["sum"], list(operands))  # type: ignore[arg-type]
        self.core.settle()

    def same(self, found: NDArray[np.uint32], expected: NDArray[np.uint32]) -> None:
        self.wrong += int((found != expected).sum())


class Weights(Program):
    """Layers that read their weight part by part, and add all of it up into a vector as long as a part."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        random = np.random.default_rng(7)
        self.expected = [random.integers(0, 1 << 32, WEIGHT // 4, np.uint32) for _ in range(LAYERS)]
        self.weights = []
        for numbers in self.expected:
            address = self.core.malloc_absent(WEIGHT)
            for part in range(PARTS):
                at = address + part * PART
                self.run("fill", (at, WRITE, PART))
                view(at, PART)[:] = numbers[part * PART // 4 : (part + 1) * PART // 4]
                self.core.function_end()
            self.weights.append(address)

    def iteration(self) -> None:
        for weight, numbers in zip(self.weights, self.expected):
            self.run("sum")
            total = self.core.malloc(PART)
            view(total, PART)[:] = 0
            self.core.function_end()
            for part in range(PARTS):
                at = weight + part * PART
                self.run("layer", (at, READ, PART), (total, READ | WRITE))
                view(total, PART)[:] += view(at, PART)
                self.core.function_end()
            self.run("sum", (total, READ))
            self.same(view(total, PART), numbers.reshape(PARTS, -1).sum(axis=0, dtype=np.uint32))
            self.core.function_end()
            self.core.free(total)


class Activations(Program):
    """Results that are written part by part, and read again in the opposite order."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.step = 0

    def iteration(self) -> None:
        self.step += 1
        made = []
        for layer in range(LAYERS):
            address = self.core.malloc_absent(WEIGHT)
            for part in range(PARTS):
                at = address + part * PART
                self.run("forward", (at, WRITE, PART))
                view(at, PART)[:] = self.numbers(layer, part)
                self.core.function_end()
            made.append(address)
        for layer in reversed(range(LAYERS)):
            for part in reversed(range(PARTS)):
                at = made[layer] + part * PART
                self.run("backward", (at, READ, PART))
                self.same(view(at, PART), self.numbers(layer, part))
                self.core.function_end()
            self.core.free(made[layer])

    def numbers(self, layer: int, part: int) -> NDArray[np.uint32]:
        start = (self.step * 100 + layer) * WEIGHT + part * PART // 4
        return np.arange(start, start + PART // 4, dtype=np.uint64).astype(np.uint32)


class OnHost(Weights):
    """The same, and a result of several times the budget that only functions on host memory use."""

    def iteration(self) -> None:
        super().iteration()
        self.run_on_host((self.weights[0], READ))
        made = self.core.malloc_absent(WEIGHT)
        self.core.function_end()
        self.run_on_host((self.weights[0], READ), (made, WRITE))
        view(made, WEIGHT)[:] = view(self.weights[0], WEIGHT)
        self.core.function_end()
        self.run_on_host((made, READ))
        self.same(view(made, WEIGHT), self.expected[0])
        self.core.function_end()
        self.core.free(made)


KINDS = {"weights": Weights, "activations": Activations, "host": OnHost}


def main() -> None:
    kind, policy = sys.argv[1], sys.argv[2]
    program = KINDS[kind](policy)
    core, planner = program.core, program.planner
    planner.boundary()
    before: dict[str, Any] = {}
    ended = None
    for iteration in range(ITERATIONS):
        if iteration == ITERATIONS - WATCHED:
            before = core.stats()
        program.iteration()
        ended = planner.boundary()
    assert ended is not None
    after = core.stats()
    core.audit()
    plan = planner.last_plan
    result = {name: after[name] - before[name] for name in _COUNTED}
    result |= {
        "wrong": program.wrong,
        "followed": ended.followed_plan,
        "peak": after["device_peak_bytes"],
        "divergences": after["divergence_count"],
        "ins": len(plan.ins) if plan else 0,
        "unplannable": planner.unplannable_sequences,
        "host_functions": after["host_backed_function_count"],
        "late_ins": sum(move.before_function <= move.after_function + 1 for move in plan.ins) if plan else 0,
        "variables": ended.variables,
        "parts": planner.trace(ended).variables,
    }
    core.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
