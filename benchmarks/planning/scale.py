"""Planning time against the number of functions: GPTs of more and more layers, at twice the budget.

Traces are those of the planner's tests (`tests/unit/planning_traces.py`), as recording takes longer than planning. The
link is such that moving what does not fit takes as long as the computation. Planning is timed twice: of swapping alone,
and with recomputation, which begins with a plan of swapping alone.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning.cases import SIMULATED, machine
from benchmarks.runs import ROOT
from swapd.planning.lower_bound import PLANNING_CUTS, lower_bound
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.recompute.choice import choose
from swapd.trace.trace import Trace

NAME = "scale"
FUNCTIONS = (300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
QUICK = (300, 1_000)
OVERSUBSCRIPTION = 2.0
OPERATORS = {  # the names that functions of the planner's tests have in recorded traces
    "layer_norm": "aten::native_layer_norm",
    "linear": "aten::addmm",
    "gelu": "aten::gelu",
    "add": "aten::add.Tensor",
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "embedding": "aten::embedding",
    "convolution": "aten::convolution",
    "batch_norm": "aten::native_batch_norm",
    "relu_": "aten::relu_",
    "add_": "aten::add_.Tensor",
    "max_pool": "aten::max_pool2d_with_indices",
}


def with_operators(trace: Trace) -> Trace:
    """The trace with names that say what may run again."""
    return replace(trace, function_names=tuple(OPERATORS.get(name, name) for name in trace.function_names))


def trace_of_about(functions: int) -> Any:
    """The trace of a GPT with about so many functions, and a budget of half its live peak."""
    folder = str(ROOT / "tests" / "unit")
    if folder not in sys.path:
        sys.path.append(folder)
    traces = import_module("planning_traces")
    small, large = (traces.gpt(layers=layers, width=256, batch=8, length=256).functions for layers in (1, 2))
    layers = max(1, round((functions - small) / (large - small)) + 1)
    trace = traces.gpt(layers=layers, width=256, batch=8, length=256)
    peak = int(trace.live_bytes.max())
    return trace, int(peak / OVERSUBSCRIPTION), traces.at_balance(trace, peak - peak / OVERSUBSCRIPTION)


def point(functions: int) -> dict[str, Any]:
    """One size: the seconds that planning takes in this process, and how good the plan is."""
    trace, budget, link = trace_of_about(functions)
    trace, make_problem = with_operators(trace), partial(Problem.from_trace, budget_bytes=budget, machine=link)
    problem = make_problem(trace)
    gc.collect()
    began, busy = time.perf_counter(), time.process_time()
    plan = make_plan(problem)
    seconds, busy_seconds = time.perf_counter() - began, time.process_time() - busy
    assert plan.predicted_seconds is not None
    gc.collect()
    began_busy = time.process_time()
    choice = choose(trace, make_problem, swap_only=plan, without_statistics=True)
    choosing_seconds = time.process_time() - began_busy
    return {
        "functions": problem.functions,
        "variables": problem.variables,
        "policy": plan.policy,
        "moves": len(plan.outs) + len(plan.ins),
        "planning_seconds": seconds,
        "planning_busy_seconds": busy_seconds,
        "over_lower_bound": plan.predicted_seconds / lower_bound(problem, PLANNING_CUTS),
        "drops": len(choice.drops),
        "recomputing_busy_seconds": busy_seconds + choosing_seconds,
        "recomputing_over_swapping": choice.seconds / choice.swap_only_seconds,
    }


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data: a point for each size."""
    results.clear(target, NAME)
    facts = machine.describe()
    points = []
    for functions in QUICK if quick else FUNCTIONS:
        points.append(point(functions))
        say(f"{points[-1]['functions']} functions: {points[-1]['planning_seconds']:.2f} s")
        record = {"points": points, "kind": SIMULATED, "planned_on": facts}
        results.save(target, NAME, "gpt", record)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    return "".join(_table(record) for record in records)


def _table(record: dict[str, Any]) -> str:
    rows = [
        [
            f"{p['functions']:,}",
            f"{p['variables']:,}",
            f"{p['moves']:,}",
            f"{p['planning_seconds']:.3f}",
            f"{p['planning_busy_seconds']:.3f}",
            f"{1e6 * p['planning_seconds'] / p['functions']:.0f}",
            f"{p['over_lower_bound']:.3f}",
            f"{p['recomputing_busy_seconds']:.3f}",
            f"{p['drops']:,}",
            f"{p['recomputing_over_swapping']:.3f}",
        ]
        for p in record["points"]
    ]
    header = ["functions", "variables", "moves", "planning s", "of the processor", "us a function", "simulated / bound"]
    header += ["processor s, recomputation included", "drops", "step / swapping alone"]
    return (
        f"{machine.words(record['planned_on'])}; load {record['planned_on']['load_average'][0]}: a busy machine "
        f"makes the seconds longer. GPTs of more and more layers, `auto`, at {OVERSUBSCRIPTION:g}x.\n\n"
    ) + results.markdown(header, rows)
