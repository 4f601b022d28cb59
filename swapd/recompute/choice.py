"""Choice: which variables are dropped and made again, and which are swapped, so that a step is fastest.

Candidates come in an order: those that take the fewest seconds of computation for each byte that they save the link
come first. Groups of them are taken in that order, and given back later, wherever the time of a step becomes shorter by
the formula of two phases (`swapd.planning.lower_bound.bound`) for the rewritten trace. That counts what groups do to
each other: where inputs were dropped too, more is made again at once, and the memory that this takes may cost more than
a drop saves. What comes out is planned and simulated, and kept if it is faster than swapping alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swapd.planning.lower_bound import bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.policies.idle import idle
from swapd.recompute.candidates import Candidate, Drop, find_candidates
from swapd.recompute.history import History
from swapd.recompute.rewriting import Rewritten, rewrite
from swapd.simulation.simulator import simulate_once
from swapd.trace.trace import Trace

MOST_TOGETHER = 64  # functions that run again before one function, all drops considered
ROUNDS = 2  # times through all groups of candidates; what comes out of each is planned
GROUPS, LEAST_GROUPS = 64, 4
ESTIMATED_FUNCTIONS = 80_000  # in all traces for which the formula is asked; each takes about 5 us
MOST_PLANNED = 4_000  # functions of traces for which more than one plan is made
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
    before = _seconds(problem, alone)
    best = None
    if before > problem.compute_seconds / WORTH:
        best = _Search(trace, problem, make_problem, without_statistics).best()
    if best is not None and best[2].functions <= MOST_PLANNED:
        better = plan(best[2])
        seconds = _seconds(best[2], better)
        if seconds < best[0]:
            best = (seconds, better, best[2], best[3])
    if best is None or best[0] >= WORTH * before:
        return Choice((), None, problem, alone, before, before)
    seconds, chosen, rewritten_problem, rewritten = best
    return Choice(rewritten.drops, rewritten, rewritten_problem, chosen, seconds, before)


def _seconds(problem: Problem, plan: Plan) -> float:
    """Of a step under a plan, which may know it."""
    known = plan.predicted_seconds
    return simulate_once(problem, plan).seconds if known is None else known


class _Search:
    def __init__(
        self, trace: Trace, problem: Problem, make_problem: Callable[[Trace], Problem], without_statistics: bool
    ) -> None:
        self.problem, self.make_problem = problem, make_problem
        self.history = History(trace, without_statistics=without_statistics)
        over = problem.live > problem.capacity_chunks
        self.candidates = find_candidates(self.history, least_bytes=problem.chunk_bytes, during=over)

    def best(self) -> Planned | None:
        """The fastest of the sets of candidates that are planned; None if there is none."""
        order = together(self.history, self._ordered(), MOST_TOGETHER)
        rounds = 1 if self.problem.functions > MOST_PLANNED else ROUNDS
        judged = [self._judge(chosen) for chosen in self._climb(order, rounds) if chosen]
        return min((result for result in judged if result is not None), key=lambda result: result[0], default=None)

    def _climb(self, order: Sequence[Candidate], rounds: int) -> Iterator[list[Candidate]]:
        """Take groups of candidates, or give them back, wherever the formula of two phases finds that faster.

        One set comes out of each time through the groups.
        """
        if not order:
            return
        count = min(len(order), GROUPS, max(LEAST_GROUPS, ESTIMATED_FUNCTIONS // (ROUNDS * self.problem.functions)))
        ends = np.linspace(0, len(order), count + 1).astype(int).tolist()
        groups = [order[start:end] for start, end in pairwise(ends)]
        taken: frozenset[int] = frozenset()
        best = bound(self.problem).seconds
        for _ in range(rounds):
            before = taken
            for index in range(count):
                trial = taken ^ {index}
                seconds = bound(self._problem([c for i in sorted(trial) for c in groups[i]])[0]).seconds
                if seconds < best:
                    taken, best = trial, seconds
            if taken == before:
                return
            yield [c for i in sorted(taken) for c in groups[i]]

    def _ordered(self) -> list[Candidate]:
        """The candidates that save more time of the link than they cost, the cheapest first."""
        link = self.problem.link
        saved = 1 / link.out_bytes_per_second + 1 / link.in_bytes_per_second  # of the link, for each byte
        worth = [c for c in self.candidates if c.seconds < c.bytes * saved]
        return sorted(worth, key=lambda c: (c.seconds / c.bytes, c.drop.after - c.before))

    def _problem(self, chosen: Sequence[Candidate]) -> tuple[Problem, Rewritten]:
        rewritten = rewrite(self.history, [candidate.drop for candidate in chosen])
        return self.make_problem(rewritten.trace), rewritten

    def _judge(self, chosen: Sequence[Candidate]) -> Planned | None:
        problem, rewritten = self._problem(chosen)
        try:
            plan = idle(problem, work=1)
        except InfeasibleError:
            return None
        return simulate_once(problem, plan).seconds, plan, problem, rewritten


def together(history: History, order: Sequence[Candidate], most: int) -> list[Candidate]:
    """The candidates of an order that may all be dropped, with at most `most` functions running again before any."""
    chosen: list[Candidate] = []
    spans: dict[int, list[tuple[int, int]]] = {}  # of each variable: over which functions it is dropped
    readers: dict[int, dict[Candidate, None]] = {}  # chosen candidates that need each variable to be made again

    def functions(candidate: Candidate) -> list[int] | None:
        v, at = candidate.drop.variable, candidate.before

        def dropped(u: int) -> bool:
            return u == v or (u in spans and any(after < at < before for after, before in spans[u]))

        return history.repeats([history.version(v, at)], at, dropped, most)

    for candidate in order:
        v, span = candidate.drop.variable, (candidate.drop.after, candidate.before)
        spans.setdefault(v, []).append(span)
        affected = [other for other in readers.get(v, ()) if span[0] < other.before < span[1]]
        lengthened = {other: functions(other) for other in (candidate, *affected)}
        if None in lengthened.values():
            spans[v].pop()
            continue
        chosen.append(candidate)
        for other, needed in lengthened.items():
            for f in needed or ():
                for u in history.reads[f]:
                    readers.setdefault(u, {})[other] = None
    return chosen
