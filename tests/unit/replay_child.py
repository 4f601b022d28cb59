"""Replays a trace on the emulated device, in a process of its own, and prints JSON: see `test_replay.py`.

    python replay_child.py TRACE BUDGET CHUNK POLICY

The trace is replayed to be recorded, so that its variables have the numbers that the core gives them. That recording,
which stays beside TRACE as TRACE.again, is replayed within the budget.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from replay import Replay

from benchmarks.planning.validator import planned_residency, validate
from ooc_alloc import Core, library_path
from swapd.planner import Planner
from swapd.planning.problem import Problem
from swapd.simulation.steps import steps_of
from swapd.trace.trace import Trace

ITERATIONS = 6


def make_core(budget: int, chunk: int) -> Core:
    driver = str(library_path("libooc_emulated_cuda.so"))
    return Core(driver, budget_bytes=budget, host_budget_bytes=1 << 30, chunk_bytes=chunk, small_limit_bytes=0)


def record(trace: Trace, budget: int, chunk: int) -> Trace:
    core = make_core(budget, chunk)
    planner = Planner(core, policy="none")
    replay = Replay(core, trace, planner)
    replay.iteration()
    recorded = planner.trace(replay.iteration())
    replay.close()
    core.close()
    return recorded


def main() -> None:
    path, budget, chunk, policy = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # Twice: what is allocated between iterations is recorded as the first function's, and so gets another number.
    recorded = record(record(Trace.load(path), budget, chunk), budget, chunk)
    recorded.save(path + ".again")
    core = make_core(budget, chunk)
    planner = Planner(core, policy=policy)
    replay = Replay(core, recorded, planner)
    for iteration in range(ITERATIONS):
        if iteration == ITERATIONS - 1:
            before = core.stats()["demand_swap_in_count"]
        ended = replay.iteration(lambda index, run: core.settle())
    demand = core.stats()["demand_swap_in_count"] - before
    result: dict[str, Any] = {
        "followed": ended.followed_plan,
        "planned": planner.last_plan is not None,
        "different": [],
    }
    result["demand_ins_of_the_last"] = demand
    if planner.last_plan is not None:
        problem = Problem.from_trace(planner.trace(ended), budget)
        trace = planner.trace(ended)
        planned, steps = planned_residency(problem, planner.last_plan), steps_of(problem)

        def compare(index: int, run: Replay) -> None:
            core.settle()
            resident = {number: set(mask.nonzero()[0].tolist()) for number, mask in run.resident().items()}
            for v, chunks in planned[index].items():
                first, count = trace.chunk_range(v)
                of_part = resident.get(trace.recorded(v), set()) & set(range(first, first + count))
                real = {chunk - first for chunk in of_part} if trace.recorded(v) in resident else None
                if real != chunks:
                    result["different"].append((index, v, sorted(real or {-1}), sorted(chunks)))

        planner.policy = "none"
        replay.iteration(compare)
        result["compared"] = sum(len(row) for row in planned)
        result["absent"] = sum(steps.chunks[v] - len(chunks) for row in planned for v, chunks in row.items())
        result["violations"] = [str(violation) for violation in validate(problem, planner.last_plan)]
        result["planned_ins"] = len(planner.last_plan.ins)
        # These begin as the function begins that needs them.
        result["late_ins"] = sum(move.before_function <= move.after_function + 1 for move in planner.last_plan.ins)
        result["parts"] = 0 if trace.part_of is None else trace.variables
    result["stats"] = core.stats()
    core.audit()
    replay.close()
    core.audit()
    core.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
