"""What is run: how a budget and a link follow from a recorded step, and each arm in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.children import measure_in_child
from benchmarks.planning.recompute import LATENCY_SECONDS, held_link
from benchmarks.recompute.child import digests
from benchmarks.runs import RunFailed, in_turns, torch_threads
from benchmarks.workloads import CHUNK_BYTES
from swapd.planning.lower_bound import lower_bound
from swapd.planning.problem import Problem
from swapd.recompute.bound import recompute_bound
from swapd.recompute.candidates import find_candidates
from swapd.recompute.history import History
from swapd.trace.trace import Machine, Trace

NAME = "recompute"
IN_CORE, SWAP_ONLY, TIMED, OURS, CHECKPOINT = "in-core", "swap only", "timed", "ours", "checkpoint"
# `TIMED` has all the memory it wants: its functions' times give the case's bounds, as the machine's speed drifts.
ARMS = (IN_CORE, SWAP_ONLY, TIMED, OURS, CHECKPOINT)
COMPARED = (SWAP_ONLY, OURS, CHECKPOINT)
IN_CORE_ALONE = "in-core alone"  # before each case: it holds the case's link
TRACED, CHECKPOINT_IN_CORE, PLAIN = "traced", "checkpoint in-core", "plain"  # once for a model
BOUND_PLACES = 96  # a run looks at 32 at most
WHOLE_PLACES, WHOLE_SECONDS = (32, 96), 30.0  # where candidates are made again wholly or not at all
OVERSUBSCRIPTIONS = (2.0, 4.0, 8.0)
SLOWDOWNS = (2.0, 4.0)  # how many times the in-core step swapping alone takes at least
# Two plans of what is recorded; ours then times swapping alone, tries what it drops, plans that twice, and compares.
LEAST_STEPS = {SWAP_ONLY: 6, OURS: 15, CHECKPOINT: 6}


@dataclass(frozen=True)
class Case:
    """One model in one budget on one link."""

    oversubscription: float
    slowdown: float
    budget_bytes: int
    bytes_per_second: float  # of the link, each way

    def facts(self) -> dict[str, Any]:
        """The case in a record."""
        return dict(vars(self))


def budgets_of(trace: Trace, live_peak_bytes: int, oversubscriptions: Sequence[float]) -> dict[float, int]:
    """{oversubscription: budget in bytes}, of those that hold the largest function."""
    budgets = {x: int(live_peak_bytes / x) for x in oversubscriptions}
    return {x: budget for x, budget in budgets.items() if Problem.from_trace(trace, budget).min_budget_bytes <= budget}


def case_of(trace: Trace, oversubscription: float, slowdown: float, budget_bytes: int, in_core_seconds: float) -> Case:
    """The case with the link on which swapping alone takes at least `slowdown` times the in-core step."""
    machine = held_link(trace, budget_bytes, slowdown * in_core_seconds)
    return Case(oversubscription, slowdown, budget_bytes, machine.in_bytes_per_second)


def bounds(case: Case, trace: Trace) -> dict[str, float]:
    """Seconds that no plan for these functions' times is faster than: of swapping alone, and of both; and their sum."""
    machine = Machine(case.bytes_per_second, case.bytes_per_second, LATENCY_SECONDS)
    problem = Problem.from_trace(trace, case.budget_bytes, machine=machine)
    history = History.beside(problem, trace)
    candidates = find_candidates(history, final=True)
    both = max(
        recompute_bound(problem, history, candidates, BOUND_PLACES),
        *(recompute_bound(problem, history, candidates, places, WHOLE_SECONDS) for places in WHOLE_PLACES),
    )
    seconds = {"compute": problem.compute_seconds, "swap_only_bound": lower_bound(problem), "bound": both}
    return {f"{name}_seconds": value for name, value in seconds.items()}


def environment(case: Case | None, recompute: str | None) -> dict[str, str]:
    """Of a process with the allocator: within a case, or with all the memory there is. No mode leaves it unset."""
    variables = {
        "OOC_ALLOC": "emulated",
        "OOC_CHUNK_SIZE": str(CHUNK_BYTES),
        "OOC_SMALL_LIMIT": str(CHUNK_BYTES // 2),
        "OOC_PLANNING": "blocking",
    }
    if recompute is not None:
        variables["OOC_RECOMPUTE"] = recompute
    if case is not None:
        variables["OOC_BUDGET"] = str(case.budget_bytes)
        latency = f"latency={LATENCY_SECONDS * 1e6:.0f}us"
        variables["OOC_EMULATED_BANDWIDTH"] = f"{case.bytes_per_second:.0f}B/s,{latency}"
    return variables


class Runner:
    """Runs processes for one model. `quick`: at toy sizes. All methods raise RunFailed."""

    def __init__(self, model: str, *, quick: bool, turns: int) -> None:
        self.model, self.quick, self.turns = model, quick, turns

    def _run(self, arm: str, variables: dict[str, str], *arguments: str, turns: tuple[int, ...] = ()) -> dict[str, Any]:
        variables = variables | {"OMP_NUM_THREADS": str(torch_threads())}
        words = [self.model, *(["--quick"] if self.quick else []), *arguments]
        record = measure_in_child("recompute.child", *words, turns=turns, **variables)
        return {"model": self.model, "arm": arm, "environment": variables} | record

    def _turns(self, least_steps: int = 2) -> list[str]:
        return ["--steps", str(least_steps), "--turns", str(self.turns)]

    def in_core(self) -> dict[str, Any]:
        """The in-core step that a case's link is held by.

        It takes turns with what `traced` runs: a step after another process's takes longer than after its own.
        """

        def alone(turns: tuple[int, ...]) -> Any:
            return self._run(IN_CORE_ALONE, {}, *self._turns(), turns=turns)

        def beside(turns: tuple[int, ...]) -> Any:
            return self.traced(turns=turns)

        record: dict[str, Any] = in_turns(alone, beside)[0]
        return record

    def traced(self, arm: str = TRACED, turns: tuple[int, ...] = ()) -> tuple[dict[str, Any], Trace]:
        """A run that has all the memory it wants, and a usual step of it."""
        with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
            path = Path(folder) / "trace"
            record = self._run(arm, environment(None, "off"), *self._turns(), "--trace", str(path), turns=turns)
            return record, Trace.load(path)

    def checkpoint_in_core(self) -> dict[str, Any]:
        """What checkpointing by hand takes, in memory and time, if nothing is moved."""
        return self._run(CHECKPOINT_IN_CORE, environment(None, "off"), "--checkpoint", *self._turns())

    def plain(self, steps: list[int]) -> dict[str, Any]:
        """PyTorch without us, and the digests of its state after each of some steps."""
        wanted = [str(number) for number in steps]
        return self._run(PLAIN, {}, "--steps", str(max(steps)), "--digests", *wanted)

    def arms(self, arms: Iterable[str], case: Case) -> dict[str, dict[str, Any] | RunFailed]:
        """Arms of a case, their steps in turns; each with the digests of its state at its end."""

        def attempt(arm: str, turns: tuple[int, ...]) -> dict[str, Any] | RunFailed:
            try:
                if arm != TIMED:
                    return self._arm(arm, case, turns) | case.facts()
                record, trace = self.traced(TIMED, turns)
                return record | bounds(case, trace) | case.facts()
            except RunFailed as failure:
                return failure

        chosen = list(arms)
        return dict(zip(chosen, in_turns(*(partial(attempt, arm) for arm in chosen))))

    def _arm(self, arm: str, case: Case, turns: tuple[int, ...]) -> dict[str, Any]:
        if arm == IN_CORE:
            return self._run(arm, {}, *self._turns(), turns=turns)
        with tempfile.TemporaryDirectory(prefix="ooc-bench-") as folder:
            arguments = [*self._turns(LEAST_STEPS[arm]), "--state", folder]
            if arm == CHECKPOINT:
                arguments.append("--checkpoint")
            record = self._run(arm, environment(case, "exact" if arm == OURS else "off"), *arguments, turns=turns)
            return record | {"digests": {str(len(record["steps"])): digests(Path(folder))}}
