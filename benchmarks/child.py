"""Runs a script in this process and notes, after every optimizer step, the time and the core's counters.

    python -m benchmarks.child OUTPUT.json SCRIPT [ARGUMENT ...]

The trace of the last step is left beside the output, as OUTPUT.trace.

The script knows nothing of it. The allocator is active if OOC_ALLOC says so. A step is the time from one return of
the optimizer's post-step hooks to the next, so it includes what the allocator does at the boundary, and does not
include what is done here.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from swapd.planner import Planner
from swapd.planning.lower_bound import bound
from swapd.planning.problem import Problem
from swapd.simulation.simulator import simulate

TURNS = "BENCHMARK_TURNS"
COUNTERS = """
    swap_out_bytes swap_in_bytes swap_out_count swap_in_count demand_swap_in_count demand_swap_in_bytes
    demand_swap_out_bytes clean_drop_bytes cancelled_swap_out_count divergence_count
    stall_seconds stall_swap_in_seconds stall_room_seconds copy_out_seconds copy_in_seconds
    driver_calls_map driver_calls_unmap driver_calls_set_access functions map_seconds unmap_seconds
""".split()


class Turn:
    """Waits until it is this process's turn again, where processes step in turns (`benchmarks.runs.in_turns`)."""

    def __init__(self, pipes: str) -> None:
        self.pipes = [int(number) for number in pipes.split()]  # one that a turn begins by, one that it ends by
        self.has_it = False

    def __call__(self) -> None:
        if not self.pipes:
            return
        begin, end = self.pipes
        if self.has_it:
            os.write(end, b"!")
        os.read(begin, 1)
        self.has_it = True


class Watch:
    """Collects one entry a step."""

    def __init__(self, planner: Planner | None, trace_path: Path, turn: Turn) -> None:
        self.planner = planner
        self.turn = turn
        self.trace_path = trace_path
        self.steps: list[dict[str, Any]] = []
        self.before = self._counters()
        self.waited = machine.waited_seconds()
        self.began = time.perf_counter()

    def _counters(self) -> dict[str, Any]:
        if self.planner is None:
            return {}
        stats = self.planner.core.stats()
        return {name: stats[name] for name in COUNTERS} | {"planning_seconds": self.planner.planning_seconds}

    def step(self, *_: Any) -> None:
        """The hook."""
        self._note()
        self.turn()
        self.waited = machine.waited_seconds()
        self.began = time.perf_counter()

    def _note(self) -> None:
        entry: dict[str, Any] = {"seconds": time.perf_counter() - self.began}
        entry["waited_seconds"] = machine.waited_seconds() - self.waited
        now = self._counters()
        entry |= {name: value - self.before[name] for name, value in now.items()}
        if self.planner is not None:
            entry |= self._plan(self.planner) | self._phases(self.planner)
        self.steps.append(entry)
        self.before = now

    @staticmethod
    def _plan(planner: Planner) -> dict[str, Any]:
        plan = planner.last_plan
        if plan is None:
            return {}
        return {
            "policy": plan.policy,
            "window_bytes": plan.window_bytes,
            "outs": len(plan.outs),
            "ins": len(plan.ins),
            "predicted_seconds": plan.predicted_seconds,
            "plan_bound_seconds": plan.bound_seconds,
        }

    def _phases(self, planner: Planner) -> dict[str, Any]:
        """Compute before and after the live peak, as the recorder timed this step's functions (stalls left out)."""
        ended = planner.last_iteration
        if ended is None:
            return {}
        trace = planner.trace(ended)
        trace.save(self.trace_path)
        problem = Problem.from_trace(trace, int(planner.core.stats()["budget_bytes"]))
        terms = bound(problem)
        replayed: dict[str, Any] = {}
        if planner.last_plan is not None and ended.followed_plan:
            link = planner.link()  # as the process's own transfers were
            free = replace(link, map_seconds=0.0, unmap_seconds=0.0)
            replayed = {
                "simulated_seconds": planner.simulated_seconds(replace(problem, machine=link)),
                "simulated_free_calls_seconds": simulate(replace(problem, machine=free), planner.last_plan).seconds,
                "machine": asdict(link),
            }
        return replayed | {
            "fingerprint": f"{ended.fingerprint:016x}",
            "forward_seconds": terms.forward_seconds,
            "backward_seconds": terms.backward_seconds,
            "live_peak_chunks": problem.live_peak_chunks,
            "slab_chunks": problem.slab_chunks,
            "min_budget_bytes": problem.min_budget_bytes,
        }


def main() -> None:
    """Runs the script, then writes what was seen."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ooc import pytorch

    output, script, *arguments = sys.argv[1:]
    planner = pytorch._active().planner if pytorch.enabled() else None
    watch = Watch(planner, Path(output).with_suffix(".trace"), Turn(os.environ.pop(TURNS, "")))
    register_optimizer_step_post_hook(watch.step)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    result = {
        "threads": torch.get_num_threads(),
        "steps": watch.steps,
        "summary": pytorch.summary() if pytorch.enabled() else None,
    }
    Path(output).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
