"""Trains one network in this process until its steps are steady, then in turns with others, and notes each step.

    python -m benchmarks.recompute.child OUTPUT.json MODEL [--quick] [--checkpoint] [--steps N] [--turns N]
        [--state FOLDER] [--digests STEP ...] [--trace FILE]

Only OOC_ variables say whether the allocator is on. A step is timed from its batch to its loss, with all that the
allocator does at the boundary, and without what is noted here. What a step was run under is its `state`: the sequence,
whether its plan was followed, and the plan's moves. Steps are steady when the last ones all had the same state, and
that is a plan, or nothing moved. A turn is a few steps; all but the first, which begins after a pause, count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.child import TURNS, Turn, Watch
from benchmarks.gpu.models import checkpoint_blocks
from benchmarks.recompute.models import MODELS, Job
from benchmarks.runs import digest_of
from ooc import pytorch
from swapd.planner import Planner
from swapd.planning.problem import Problem
from swapd.trace.trace import Trace

SETTLING = 2  # steps of a state before it is steady: the first ones begin where another state left things
TURN_STEPS = 3


class Notes(Watch):
    """An entry a step, with its state; and the trace of each step, if it is wanted."""

    def __init__(self, planner: Planner | None, keep_traces: bool) -> None:
        self.traces: dict[int, Trace] = {}
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
            self.traces[len(self.steps)] = planner.trace(ended)
        plan = planner.last_plan
        moves = hash((plan.outs, plan.ins, plan.write_backs)) if plan is not None else 0
        return {
            "followed_plan": bool(ended.followed_plan),
            "swapped_bytes": int(ended.swapped_bytes),
            "state": f"{ended.fingerprint:016x} {moves & (1 << 64) - 1:x} {bool(ended.followed_plan)}",
        }


def is_steady(steps: list[dict[str, Any]]) -> bool:
    """Whether the last steps were alike; not as long as something moves without a plan."""
    last = steps[-1]
    if not last.get("followed_plan") and last.get("swapped_bytes"):
        return False
    return len(steps) > SETTLING and all(step.get("state") == last.get("state") for step in steps[-SETTLING:])


def counted(steps: list[dict[str, Any]]) -> list[int]:
    """Which steps count: those of turns, in the state of the last one; none if that is no steady one."""
    if not is_steady(steps):
        return []
    return [place for place, step in enumerate(steps) if step["counts"] and step.get("state") == steps[-1].get("state")]


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
    parser.add_argument("--steps", type=int, default=8, help="exactly; with --turns at least so many, before them")
    parser.add_argument("--turns", type=int, default=0, help="once steps are steady, or after --most-steps of them")
    parser.add_argument("--most-steps", type=int, default=32)
    parser.add_argument("--state", type=Path, help="folder that gets the last step's state")
    parser.add_argument("--digests", type=int, nargs="*", default=[], help="steps whose state is hashed")
    parser.add_argument("--trace", type=Path, help="file that gets the trace of a usual step")
    return parser.parse_args(sys.argv[1:])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """The record of all steps."""
    turn = Turn(os.environ.pop(TURNS, ""))
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

    def step(counts: bool) -> None:
        notes.began = time.perf_counter()
        losses.append(job.step(generator))
        notes.step()
        notes.steps[-1]["counts"] = counts
        number = len(notes.steps)
        if number in options.digests:
            with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
                save_state(job, losses, Path(folder))
                hashed[str(number)] = digests(Path(folder))

    def is_settled() -> bool:
        number = len(notes.steps)
        return number >= options.most_steps or (number >= options.steps and is_steady(notes.steps))

    turn()
    while len(notes.steps) < options.steps or (options.turns and not is_settled()):
        step(counts=False)
    for _ in range(options.turns):
        turn()
        for place in range(TURN_STEPS):
            step(counts=place > 0)
    record = {
        "threads": torch.get_num_threads(),
        "steps": notes.steps,
        "counted": counted(notes.steps),
        "losses": losses,
        "digests": hashed,
        "summary": pytorch.summary() if pytorch.enabled() else None,
    }
    if options.trace is not None:
        usual([notes.traces[place] for place in counted(notes.steps)]).save(options.trace)
    if options.state is not None:
        save_state(job, losses, options.state)
    return record


def main() -> None:
    options = parse_arguments()
    options.output.write_text(json.dumps(train(options)), encoding="utf-8")


if __name__ == "__main__":
    main()
