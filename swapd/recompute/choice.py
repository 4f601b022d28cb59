"""Choice: which variables are dropped and made again, and which are swapped, so that a step is fastest.

Candidates come in an order: those that take the fewest seconds of computation for a second of the link that they save
come first. A formula of two phases says how many of them are about right; a few beginnings of the order around that are
planned and simulated, as the trace that each of them makes. The fastest is kept, if it is faster than swapping alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.policies.idle import idle
from swapd.recompute.candidates import Candidate, Drop, find_candidates
from swapd.recompute.history import History
from swapd.recompute.rewriting import Rewritten, rewrite
from swapd.simulation.simulator import simulate_once
from swapd.trace.trace import Trace

MOST_TOGETHER = 16  # functions that run again before one function, all drops considered
JUDGED_FUNCTIONS = 12_000  # in all traces that are planned to find the fastest
MOST_PLANNED = 4_000  # functions of traces whose last plan is made by the policy, and not in one attempt
WORTH = 0.99  # times the seconds of swapping alone: less gain than that is not worth it


@dataclass(frozen=True, eq=False)
class Choice:
    """What to drop, and the plan that swaps the rest."""

    drops: tuple[Drop, ...]
    rewritten: Rewritten | None  # None if nothing is dropped
    problem: Problem  # of the rewritten trace, or of the trace itself
    plan: Plan  # for that problem
    seconds: float  # of a step, simulated
    swap_only_seconds: float


Planned = tuple[float, Plan, Problem, Rewritten]


def choose(
    trace: Trace,
    make_problem: Callable[[Trace], Problem],
    *,
    swap_only: Plan | None = None,
    plan: Callable[[Problem], Plan] = make_plan,
    without_statistics: bool = False,
) -> Choice:
    """The drops with which a step is fastest, and the plan for what is left; no drops where nothing is gained.

    Args:
        trace: one iteration.
        make_problem: the problem of running a trace; it gives each trace the same budget, chunks and machine.
        swap_only: the plan that `plan` makes for the trace, if it is there already.
        plan: makes plans.
        without_statistics: as in `History`.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem = make_problem(trace)
    alone = swap_only if swap_only is not None else plan(problem)
    before = simulate_once(problem, alone).seconds
    best = None
    if before > problem.compute_seconds / WORTH:
        best = _Search(trace, problem, make_problem, without_statistics).best(before)
    if best is not None and best[2].functions <= MOST_PLANNED:
        better = plan(best[2])
        seconds = simulate_once(best[2], better).seconds
        if seconds < best[0]:
            best = (seconds, better, best[2], best[3])
    if best is None or best[0] >= WORTH * before:
        return Choice((), None, problem, alone, before, before)
    seconds, chosen, rewritten_problem, rewritten = best
    return Choice(rewritten.drops, rewritten, rewritten_problem, chosen, seconds, before)


class _Search:
    def __init__(
        self, trace: Trace, problem: Problem, make_problem: Callable[[Trace], Problem], without_statistics: bool
    ) -> None:
        self.problem, self.make_problem = problem, make_problem
        self.history = History(trace, without_statistics=without_statistics)
        over = problem.live > problem.capacity_chunks
        self.candidates = find_candidates(self.history, least_bytes=problem.chunk_bytes, during=over)

    def best(self, limit: float) -> Planned | None:
        """The fastest of the beginnings that are tried."""
        order = together(self.history, self._ordered(), MOST_TOGETHER)
        if not order:
            return None
        found: dict[int, Planned | None] = {}
        for count in self._counts(order, found):
            found[count] = self._judge(order[:count])
        planned = [result for result in found.values() if result is not None]
        return min(planned, key=lambda result: result[0]) if planned else None

    def _ordered(self) -> list[Candidate]:
        """The candidates that save more time of the link than they cost, the cheapest first."""
        link = self.problem.link
        saved = 1 / link.out_bytes_per_second + 1 / link.in_bytes_per_second  # of the link, for each byte
        worth = [c for c in self.candidates if c.seconds < c.bytes * saved]
        return sorted(worth, key=lambda c: (c.seconds / c.bytes, c.drop.after - c.before))

    def _counts(self, order: Sequence[Candidate], found: dict[int, Planned | None]) -> Iterator[int]:
        """How many candidates to take: first what the formula says, then on both sides of the best so far."""
        most = max(1, JUDGED_FUNCTIONS // self.problem.functions)
        first = self._estimate(order)
        yield first
        step = max(1, first // 3)
        while len(found) < most:
            seconds = {count: result[0] for count, result in found.items() if result is not None}
            at = min(seconds, key=seconds.__getitem__) if seconds else first // 2
            near = [c for c in (at + step, at - step) if 1 <= c <= len(order) and c not in found]
            if near:
                yield near[0]
            elif step > 1:
                step //= 2
            else:
                return

    def _estimate(self, order: Sequence[Candidate]) -> int:
        """How many candidates the formula of two phases finds best."""
        problem, machine = self.problem, self.problem.link
        turn = problem.live_peak_function + 1
        forward = float(problem.seconds[:turn].sum())
        backward = float(problem.seconds[turn:].sum())
        freed = np.zeros(problem.functions + 1, np.int64)
        best, best_seconds, again = 1, float("inf"), 0.0
        marks = set(np.linspace(1, len(order), 24).astype(int).tolist())
        for count, candidate in enumerate(order, 1):
            chunks = int(problem.chunks[candidate.drop.variable])
            freed[candidate.drop.after + 1] += chunks
            freed[candidate.before] -= chunks
            again += candidate.seconds
            if count in marks:
                live: NDArray[np.int64] = problem.live - np.cumsum(freed[:-1])
                spill = max(0, int(live.max()) - problem.capacity_chunks) * problem.chunk_bytes
                seconds = max(forward, spill / machine.out_bytes_per_second)
                seconds += max(backward + again, spill / machine.in_bytes_per_second)
                if seconds < best_seconds:
                    best, best_seconds = count, seconds
        return best

    def _judge(self, chosen: Sequence[Candidate]) -> Planned | None:
        rewritten = rewrite(self.history, [candidate.drop for candidate in chosen])
        problem = self.make_problem(rewritten.trace)
        try:
            plan = idle(problem, work=1)
        except InfeasibleError:
            return None
        return simulate_once(problem, plan).seconds, plan, problem, rewritten


def together(history: History, order: Sequence[Candidate], most: int) -> list[Candidate]:
    """The candidates of an order that may all be dropped, with at most `most` functions running again before any."""
    chosen: list[Candidate] = []
    spans: dict[int, list[tuple[int, int]]] = {}  # of each variable: over which functions it is dropped
    readers: dict[int, list[Candidate]] = {}  # chosen candidates that need each variable to be made again

    def functions(candidate: Candidate) -> list[int] | None:
        v, at = candidate.drop.variable, candidate.before

        def dropped(u: int) -> bool:
            return u == v or any(after < at < before for after, before in spans.get(u, ()))

        return history.repeats([history.version(v, at)], at, dropped, most)

    for candidate in order:
        v, span = candidate.drop.variable, (candidate.drop.after, candidate.before)
        spans.setdefault(v, []).append(span)
        affected = [other for other in readers.get(v, ()) if span[0] < other.before < span[1]]
        own = functions(candidate)
        if own is None or any(functions(other) is None for other in affected):
            spans[v].pop()
            continue
        chosen.append(candidate)
        for f in own:
            for u in history.reads[f]:
                readers.setdefault(u, []).append(candidate)
    return chosen
