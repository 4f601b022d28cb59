"""Trains one network in this process until its steps are steady, and notes each step.

    python -m benchmarks.recompute.child OUTPUT.json MODEL [--quick] [--checkpoint] [--steps N] [--until-steady N]
        [--state FOLDER] [--digests STEP ...] [--trace FILE]

Only OOC_ variables say whether the allocator is on. A step is timed from its batch to its loss, with all that the
allocator does at the boundary, and without what is noted here. What a step was run under is its `state`: the sequence,
whether its plan was followed, and the plan's moves. Steps are steady when the last ones, of which N count, all had the
same state, and that is a plan, or nothing moved.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.child import Turn, Watch
from benchmarks.gpu.models import checkpoint_blocks
from benchmarks.recompute.models import MODELS, Job
from benchmarks.runs import digest_of
from ooc import pytorch
from swapd.planner import Planner
from swapd.planning.problem import Problem
from swapd.trace.trace import Trace

SETTLING = 2  # steps of a state that do not count: the first ones begin where another state left things


class Notes(Watch):
    """An entry a step, with its state; and the traces of steps, if they are wanted."""

    def __init__(self, planner: Planner | None, keep_traces: bool) -> None:
        self.traces: list[Trace] = []
        self.keep_traces = keep_traces
        super().__init__(planner, Path(), Turn(""))

    def _counters(self) -> dict[str, Any]:
        if self.planner is None:
            return {}
        found = self.planner.figures().items()
        again = {name: value for name, value in found if name.startswith("recompute_")}
        return {**super()._counters(), **again}

    def _phases(self, planner: Planner) -> dict[str, Any]:
        ended = planner.last_iteration
        if ended is None:
            return {}
        if self.keep_traces:
            self.traces.append(planner.trace(ended))
        plan = planner.last_plan
        moves = hash((plan.outs, plan.ins, plan.write_backs)) if plan is not None else 0
        return {
            "followed_plan": bool(ended.followed_plan),
            "swapped_bytes": int(ended.swapped_bytes),
            "state": f"{ended.fingerprint:016x} {moves & (1 << 64) - 1:x} {bool(ended.followed_plan)}",
        }


def steady_steps(steps: list[dict[str, Any]]) -> int:
    """How many of the last steps have the same state and count; 0 as long as something moves without a plan."""
    last = steps[-1]
    if not last.get("followed_plan") and last.get("swapped_bytes"):
        return 0
    same = 0
    for step in reversed(steps):
        if step.get("state") != last.get("state"):
            break
        same += 1
    return max(0, same - SETTLING)


def usual(traces: list[Trace]) -> Trace:
    """The last trace, its functions' times the medians of those traces that have the same sequence."""
    last = traces[-1]
    rows = [Problem.from_trace(t, 0).seconds for t in traces if t.fingerprint == last.fingerprint]
    seconds = np.median(rows, axis=0)
    return replace(last, function_seconds=seconds, function_start=np.cumsum(seconds) - seconds)


def save_state(job: Job, losses: list[float], folder: Path) -> None:
    """Writes what training decides (`trained.pt`), and the running statistics of batch norms (`statistics.pt`)."""
    trained = {"model": dict(job.model.named_parameters()), "optimizer": job.optimizer.state_dict(), "losses": losses}
    torch.save(trained, folder / "trained.pt")
    torch.save(dict(job.model.named_buffers()), folder / "statistics.pt")


def digests(folder: Path) -> dict[str, str]:
    """Of what `save_state` wrote there, every bit."""
    return {name: digest_of(folder / f"{name}.pt") for name in ("trained", "statistics")}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="each block by torch.utils.checkpoint")
    parser.add_argument("--steps", type=int, default=8, help="at least; exactly, without --until-steady")
    parser.add_argument("--until-steady", type=int, default=0, help="steps that count; at most --most-steps in all")
    parser.add_argument("--most-steps", type=int, default=32)
    parser.add_argument("--state", type=Path, help="folder that gets the last step's state")
    parser.add_argument("--digests", type=int, nargs="*", default=[], help="steps whose state is hashed")
    parser.add_argument("--trace", type=Path, help="file that gets the trace of a usual step")
    return parser.parse_args(sys.argv[1:])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The record of all steps."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no real run writes that
    torch.ones(1).sqrt()  # as in examples/gpt.py: the first call of a process must not come from two threads at once
    job = MODELS[options.model](options.quick)
    if options.checkpoint:
        checkpoint_blocks(job.blocks)
    generator = torch.Generator().manual_seed(1)
    notes = Notes(pytorch._active().planner if pytorch.enabled() else None, options.trace is not None)
    losses: list[float] = []
    hashed: dict[str, Any] = {}
    wanted = options.until_steady
    for number in range(1, (options.most_steps if wanted else options.steps) + 1):
        notes.began = time.perf_counter()
        losses.append(job.step(generator))
        notes.step()
        if number in options.digests:
            with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
                save_state(job, losses, Path(folder))
                hashed[str(number)] = digests(Path(folder))
        if wanted and number >= options.steps and steady_steps(notes.steps) >= wanted:
            break
    record = {
        "threads": torch.get_num_threads(),
        "steps": notes.steps,
        "steady": steady_steps(notes.steps),
        "losses": losses,
        "digests": hashed,
        "summary": pytorch.summary() if pytorch.enabled() else None,
    }
    if options.trace is not None:
        usual(notes.traces[options.steps // 2 :]).save(options.trace)
    if options.state is not None:
        save_state(job, losses, options.state)
    return record


def main() -> None:
    options = parse_arguments()
    options.output.write_text(json.dumps(train(options)), encoding="utf-8")


if __name__ == "__main__":
    main()
