"""Times single operators in this process: `python -m benchmarks.operators OUTPUT.json ROUNDS`; see interception.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ooc

CALLS = 100  # in one measurement: short, so that many rounds are not interrupted
WARM_CALLS = 10


class Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a mode written in Python costs before it does anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def per_call(function: Callable[[], Any], calls: int) -> float:
    """Nanoseconds."""
    repeat = range(calls)
    began = time.perf_counter_ns()
    for _ in repeat:
        function()
    return (time.perf_counter_ns() - began) / calls


def operators() -> dict[str, Callable[[], Any]]:
    small, large = torch.zeros(16), torch.zeros(1 << 20)
    view = large[:16]
    return {
        "add_, 16 elements in a slab": lambda: small.add_(1),
        "add_, 16 elements of a 4 MiB variable": lambda: view.add_(1),
        "add, two operands of a 4 MiB variable": lambda: torch.add(view, view),
        "empty, 16 elements": lambda: torch.empty(16),
        "view, of a 4 MiB variable": lambda: large.view(1024, 1024),
        "exp_, 16 elements of a 4 MiB variable": lambda: view.exp_(),
        "trunc_, 16 elements of a 4 MiB variable (boxed)": lambda: view.trunc_(),
    }


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """{operator: {plain, intercepted, dispatch mode: nanoseconds a call, one for each round}}."""
    intercept = torch.ops.ooc.intercept_thread
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, function in operators().items():
            row = found.setdefault(name, {"plain": [], "intercepted": [], "dispatch mode": []})
            for kind, on in (("plain", False), ("intercepted", True)):
                intercept(on)
                per_call(function, WARM_CALLS)
                row[kind].append(per_call(function, CALLS))
            intercept(False)
            with Nothing():  # type: ignore[no-untyped-call]
                per_call(function, WARM_CALLS)
                row["dispatch mode"].append(per_call(function, CALLS))
            intercept(True)
        ooc.step()  # the recorder starts afresh
    return found


def main() -> None:
    output, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    ooc.enable(alloc="emulated", budget="1GiB", chunk_size="128KiB", small_limit="64KiB")
    Path(output).write_text(json.dumps({"nanoseconds": measure(int(rounds))}), encoding="utf-8")


if __name__ == "__main__":
    main()
