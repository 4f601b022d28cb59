"""Choice: which variables are dropped and made again, and which are swapped, so that a step is fastest.

Candidates come in an order: those that take the fewest seconds of computation for each byte that they save the link
come first. Groups of them are taken in that order, and given back later, wherever the time of a step becomes shorter by
the formula of two phases (`swapd.planning.lower_bound.bound`) for the rewritten trace. That counts what groups do to
each other: where inputs were dropped too, more is made again at once, and the memory that this takes may cost more than
a drop saves. The search begins at none and at what published ways choose. The most promising sets that it meets are
planned and simulated. The formula knows nothing of how little room single functions leave, so where there is time the
search goes on from the fastest set with the simulator as judge. What it ends at is kept if it is faster than swapping
alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swapd.planning.lower_bound import bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.policies.idle import WAYS, plan_in
from swapd.recompute.candidates import Candidate, Drop, find_candidates
from swapd.recompute.history import History
from swapd.recompute.published import checkpointed, swap_then_recompute
from swapd.recompute.rewriting import Rewritten, rewrite
from swapd.simulation.simulator import simulate_once
from swapd.trace.trace import Trace

MOST_TOGETHER = 16  # functions that run again before one function, all drops considered
STARTS = 2  # sets from which the search climbs: nothing, and the most promising of the published ways'
SEGMENTS = (2, 4, 8, 16, 32, 64)  # of checkpointing, where a climb may start
ROUNDS = 2  # times through all groups of candidates
GROUPS, LEAST_GROUPS = 64, 4
ESTIMATED = 160_000  # functions in all traces for which the formula is asked; each takes about 2 us
JUDGED = 16_000  # functions and moves in all plans that are simulated to find the fastest; each takes about 15 us
IMPROVED = 45_000  # in these and in all that are simulated to make it faster
MOST_PLANNED = 4_000  # functions of traces for which more than one plan is made
CHANGES = 200  # that are tried, most of which the formula already tells to be slower
WIDEST = 5  # a change of the fastest set is of at most 2 ** WIDEST candidates
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
Chosen = frozenset[Drop]


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
        self.estimated: dict[Chosen, float] = {}
        self.judged = 0  # functions and moves of all plans that were simulated
        self.fastest: Planned | None = None  # of them
        over = problem.live > problem.capacity_chunks
        self.candidates = find_candidates(self.history, least_bytes=problem.chunk_bytes, during=over)

    def best(self) -> Planned | None:
        """The fastest of the sets of candidates that are planned; None if there is none."""
        large = self.problem.functions > MOST_PLANNED
        order = together(self.history, self._ordered(), MOST_TOGETHER)
        if not order:
            return None
        starts = sorted(self._starts(order, large), key=self._estimate)
        reached = set(starts)
        climbed = starts[:1] if large else dict.fromkeys([frozenset(), *starts[:STARTS]])
        for start in list(climbed)[:STARTS]:
            reached.update(self._climb(order, start, 1 if large else ROUNDS))
        for chosen in sorted(reached - {frozenset()}, key=lambda chosen: (self._estimate(chosen), sorted(chosen))):
            self._judge(chosen)
            if self.judged >= JUDGED:
                break
        if not large:
            self._improve(order)
        return self.fastest

    def _improve(self, order: Sequence[Candidate]) -> None:
        """Take or give back a few candidates that are neighbours in some order, wherever that simulates faster."""
        after, before = (sorted(order, key=key) for key in (lambda c: c.drop.after, lambda c: c.before))
        chance = random.Random(0)
        for _ in range(CHANGES if self.fastest is not None else 0):
            assert self.fastest is not None
            seconds, chosen = self.fastest[0], frozenset(self.fastest[3].drops)
            neighbours = chance.choice((order, after, before))
            first, width = chance.randrange(len(order)), int(2 ** chance.uniform(0, WIDEST))
            group = frozenset(c.drop for c in neighbours[first : first + width])
            trial = chance.choice((chosen - group, chosen | group, chosen ^ group))
            if trial not in (chosen, frozenset()) and self._estimate(trial) < seconds:
                self._judge(trial)
                if self.judged >= IMPROVED:
                    break

    def _starts(self, order: Sequence[Candidate], large: bool) -> list[Chosen]:
        """Where to climb from: nothing, and what published ways choose."""
        drops = [swap_then_recompute(self.problem, order)]
        for segments in () if large else SEGMENTS:
            drops.append(checkpointed(self.problem, self.candidates, segments))
        return [frozenset(), *(frozenset(chosen) for chosen in drops)]

    def _climb(self, order: Sequence[Candidate], start: Chosen, rounds: int) -> Iterator[Chosen]:
        """Take groups of candidates, or give them back, wherever the formula of two phases finds that faster.

        One set comes out of each round. The groups are of candidates that follow each other in the order; in every
        other round, in the program.
        """
        count = ESTIMATED // (ROUNDS * STARTS * self.problem.functions)
        count = min(len(order), GROUPS, max(LEAST_GROUPS, count))
        ends = np.linspace(0, len(order), count + 1).astype(int).tolist()
        orders = ([c.drop for c in order], sorted((c.drop for c in order), key=lambda drop: drop.after))
        chosen, best = start, self._estimate(start)
        for round_ in range(rounds):
            for first, last in pairwise(ends):
                group = frozenset(orders[round_ % 2][first:last])
                mostly = 2 * len(group & chosen) > len(group)
                trial = chosen - group if mostly else chosen | group
                seconds = self._estimate(trial)
                if seconds < best:
                    chosen, best = trial, seconds
            yield chosen

    def _estimate(self, chosen: Chosen) -> float:
        if chosen not in self.estimated:
            self.estimated[chosen] = bound(self._problem(chosen)[0] if chosen else self.problem).seconds
        return self.estimated[chosen]

    def _ordered(self) -> list[Candidate]:
        """The candidates that save more time of the link than they cost, the cheapest first."""
        link = self.problem.link
        saved = 1 / link.out_bytes_per_second + 1 / link.in_bytes_per_second  # of the link, for each byte
        worth = [c for c in self.candidates if c.seconds < c.bytes * saved]
        return sorted(worth, key=lambda c: (c.seconds / c.bytes, c.drop.after - c.before))

    def _problem(self, chosen: Chosen) -> tuple[Problem, Rewritten]:
        rewritten = rewrite(self.history, chosen)
        return self.make_problem(rewritten.trace), rewritten

    def _judge(self, chosen: Chosen) -> None:
        """Plan what is left to swap with a set of drops, and keep it if it simulates faster than all others."""
        problem, rewritten = self._problem(chosen)
        try:
            problem.require_feasible()
        except InfeasibleError:
            return
        plan = Plan(policy="idle") if problem.fits else plan_in(problem, WAYS[0])
        seconds = simulate_once(problem, plan).seconds
        self.judged += problem.functions + len(plan.outs) + len(plan.ins)
        if self.fastest is None or seconds < self.fastest[0]:
            self.fastest = seconds, plan, problem, rewritten


def together(history: History, order: Sequence[Candidate], most: int) -> list[Candidate]:
    """The candidates of an order that may all be dropped, with at most `most` functions running again before any."""
    chosen: list[Candidate] = []
    needed: list[list[int]] = []  # what runs again for each of `chosen`
    spans: dict[int, list[tuple[int, int]]] = {}  # of each variable: over which functions it is dropped
    readers: dict[int, set[int]] = {}  # which of `chosen` read each variable to be made again

    def repeats(v: int, i: int) -> list[int] | None:
        """What runs again for `chosen[i]` now that `v` is dropped."""
        own, at = chosen[i].drop.variable, chosen[i].before

        def dropped(u: int) -> bool:
            return u == own or (u in spans and any(after < at < before for after, before in spans[u]))

        return history.repeats([history.version(v, at)], at, dropped, most, needed[i])

    for candidate in order:
        v, span = candidate.drop.variable, (candidate.drop.after, candidate.before)
        affected = [i for i in readers.get(v, ()) if span[0] < chosen[i].before < span[1]]
        spans.setdefault(v, []).append(span)
        chosen.append(candidate)
        needed.append([])
        longer = {i: repeats(v, i) for i in (*affected, len(chosen) - 1)}
        if None in longer.values():
            spans[v].pop()
            chosen.pop()
            needed.pop()
            continue
        for i, functions in longer.items():
            for f in set(functions or ()).difference(needed[i]):
                for u in history.reads[f]:
                    readers.setdefault(u, set()).add(i)
            needed[i] = functions or []
    return chosen
