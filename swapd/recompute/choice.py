"""Choice: which variables are dropped and made again, and which are swapped, so that a step is fastest.

Candidates come in an order: those that take the fewest seconds of computation for each byte that they save the link
come first. The search begins at what published ways choose, and at what the linear programme of `bound` makes again in
its least step. A set of drops is carried out on the trace, what is left to swap is planned, and the simulator says how
long a step takes. That counts what drops do to each other: where inputs were dropped too, more is made again at once,
and the memory that this takes may cost more than a drop saves.

From one set the search goes on to others that differ by a few candidates: first wherever the formula of two phases
(`swapd.planning.lower_bound.bound`) finds that faster, which takes no plan, then wherever the simulator does, unless
the lower bound rules it out. Others also let the same drops be fleeting, or stay. It begins twice, once with variables
that linger and once without, and goes on with what is faster. What it ends at is kept if it is faster than swapping
alone.

Final drops cost nothing, so they are not searched for: each set is judged with all of them. In the end those are left
out for which there is room. Where the trace is too long for that, nothing is dropped for good.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from swapd.planning.lower_bound import bound, lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.policies.idle import CLOSE, Way, plan_paced
from swapd.recompute.bound import relaxed
from swapd.recompute.candidates import Candidate, Drop, find_candidates
from swapd.recompute.history import History
from swapd.recompute.published import checkpointed, swap_then_recompute
from swapd.recompute.rewriting import Rewritten, rewrite
from swapd.simulation.simulator import simulate_events, simulate_once
from swapd.trace.trace import Machine, Trace

MOST_TOGETHER = 16  # functions that run again before one function, all drops considered
SEGMENTS = (2, 4, 8, 16, 32, 64)  # of checkpointing, where the search may start
SHARES = (0.9, 0.5, 0.1)  # the search starts with what the linear programme makes again to more than such a part
FEW_CUTS = 24  # of the lower bound that rules changes out
MOST_SEARCHED = 4_000  # functions of traces for which more is planned than one set of a published way
ESTIMATED, CHANGED = 200, 400  # changes that are tried, with the formula and with the simulator
FLEETING = 0.1  # of the seconds of a copy: what is made again in less need not stay
WIDEST = 5  # a change is of at most 2 ** WIDEST candidates
SIMULATED = 240_000  # functions and moves in all plans that are simulated; each takes about 12 us, planning included
TRIED_WAYS = Way(True, 2.0), Way(True, 4.0), Way(False, 0.0)
ANOTHER = 0.2  # of the changes are planned in one of these too, beside the way of the fastest plan
PROMISING = 1.06  # times the seconds of the fastest: sets of the beginning that are planned again; changes are at 1
ROUNDS = 3  # attempts with these
AT_ONCE = Machine(1e18, 1e18)  # copies take no time
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


Drops = frozenset[Drop]
Variant = tuple[Problem, Rewritten]  # of the program, with a set of drops
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
        histories = _histories(problem, trace, without_statistics)
        best = _best((_Search(problem, make_problem, history) for history in histories), plan)
    if best is None or best[0] >= WORTH * before:
        return Choice((), None, problem, alone, before, before)
    seconds, chosen, rewritten_problem, rewritten = best
    return Choice(rewritten.drops, rewritten, rewritten_problem, chosen, seconds, before)


def _histories(problem: Problem, trace: Trace, without_statistics: bool) -> Iterator[History]:
    """With variables that may linger and, if there are any, without."""
    lingering = History.beside(problem, trace, without_statistics=without_statistics)
    yield lingering
    if lingering.may_linger:
        yield History(trace, without_statistics=without_statistics)


def _best(searches: Iterable[_Search], plan: Callable[[Problem], Plan]) -> Planned | None:
    """The fastest of all sets that are planned; None if there is none.

    Args:
        searches: the last one without lingering.
        plan: makes another plan for that set.
    """
    begun: list[tuple[float, _Search]] = []
    for search in searches:
        search.begin(min((seconds for seconds, _ in begun), default=math.inf))
        if search.fastest is None:
            continue
        begun.append((search.fastest[0], search))
        if search.problem.functions > MOST_SEARCHED and not search.fastest[3].lingers:
            break  # without lingering it is much the same, and takes as long again
    if not begun:
        return None
    _, best = min(begun, key=lambda found: found[0])
    best.go_on()
    best.end(plan)
    return best.fastest


def _seconds(problem: Problem, plan: Plan) -> float:
    """Of a step under a plan, which may know it."""
    known = plan.predicted_seconds
    return simulate_once(problem, plan).seconds if known is None else known


def _phases(variant: Variant) -> float:
    """Of a step by the formula of two phases."""
    return bound(variant[0]).seconds


def _needed(problem: Problem, plan: Plan, rewritten: Rewritten) -> list[Candidate]:
    """The final drops for whose variables a plan has no room. With the others left out, the same moves are possible.

    What is on the device beside them is the most where copies take no time: that is looked at.
    """
    if not rewritten.final:
        return []
    events = simulate_events(replace(problem, machine=AT_ONCE), plan)[1]
    times, held = np.array([(at.start, at.chunks) for at in events.held]).T
    ends = np.array([run.end for run in events.runs])
    first = np.maximum(np.searchsorted(times, np.append(0.0, ends[:-1]), side="right") - 1, 0)
    stop = np.maximum(np.searchsorted(times, ends), first + 1)
    most = np.array([held[a:b].max() for a, b in zip(first, stop)])  # of chunks, until each function ends
    own = np.flatnonzero(~rewritten.repeated)
    needed = []
    for c in sorted(rewritten.final, key=lambda c: c.bytes):
        within, chunks = slice(own[c.drop.after] + 1, own[c.before - 1] + 1), problem.chunks[c.drop.variable]
        if most[within].max() + chunks > problem.capacity_chunks:
            needed.append(c)
        else:
            most[within] += chunks
    return needed


class _Search:
    def __init__(self, problem: Problem, make_problem: Callable[[Trace], Problem], history: History) -> None:
        self.problem, self.make_problem, self.history = problem, make_problem, history
        over = problem.live > problem.capacity_chunks
        ends = problem.functions <= MOST_SEARCHED  # which final drops are needed is not found out for longer traces
        found = find_candidates(self.history, least_bytes=problem.chunk_bytes, during=over, final=ends)
        self.candidates = [c for c in found if not c.final]
        self.final = [c for c in found if c.final]
        self.simulated = 0  # functions and moves
        self.fastest: Planned | None = None
        self.way = TRIED_WAYS[0]  # in which it was planned
        self.order = together(self.history, self._ordered(), MOST_TOGETHER)
        self.goal = 0.0  # in seconds: how near the bound the search ends

    def begin(self, known: float) -> None:
        """Plan the sets that the search begins at, if they may be faster than `known` seconds and than each other."""
        order = self.order
        if not order and not self.final:
            return
        starts: list[list[Drop]] = [[], swap_then_recompute(self.problem, order)]
        starts += [checkpointed(self.problem, order, segments) for segments in SEGMENTS]
        if self.problem.functions > MOST_SEARCHED:
            variant = min(map(self._problem, filter(None, starts)), key=_phases, default=None)
            if variant is not None:
                self._judge(*variant, TRIED_WAYS[:1], PROMISING)
            return
        least, parts = relaxed(self.problem, self.history, [*order, *self.final])
        starts += [[c.drop for c, part in zip(order, parts) if part > share] for share in SHARES]
        found = {drops: self._problem(drops) for drops in map(frozenset, starts)}
        drops, variant = self._estimated_faster(order, min(found, key=lambda drops: _phases(found[drops])))
        found[drops] = variant
        if not self.final:
            found.pop(frozenset(), None)
        for variant in sorted(found.values(), key=_phases):
            if self.simulated >= SIMULATED // 2:
                break
            if lower_bound(variant[0], FEW_CUTS) < (known if self.fastest is None else min(known, self.fastest[0])):
                self._judge(*variant, TRIED_WAYS, PROMISING)
        self._let_fleet()
        self.goal = CLOSE * least

    def _let_fleet(self) -> None:
        """Try the fastest set with those drops fleeting whose variables are made again much faster than copied."""
        if self.fastest is None:
            return
        cheap = {c.drop for c in self.order if c.seconds * self.problem.link.in_bytes_per_second < FLEETING * c.bytes}
        variant = self._problem(drop._replace(fleeting=plain(drop) in cheap) for drop in self.fastest[3].drops)
        if variant[1].drops != self.fastest[3].drops and lower_bound(variant[0], FEW_CUTS) < self.fastest[0]:
            self._judge(*variant, TRIED_WAYS, PROMISING)

    def _estimated_faster(self, order: Sequence[Candidate], drops: Drops) -> tuple[Drops, Variant]:
        """A set that is reached by changes which the formula finds faster."""
        variant, changes = self._problem(drops), _Changes(order)
        for _ in range(ESTIMATED if order else 0):
            if (trial := changes.of(drops)) is not None:
                other = self._problem(trial)
                if _phases(other) < _phases(variant):
                    drops, variant = trial, other
        return drops, variant

    def go_on(self) -> None:
        """Change the fastest set wherever that simulates faster, until that takes no longer than the goal."""
        changes = _Changes(self.order)
        for _ in range(CHANGED if self.order and self.problem.functions <= MOST_SEARCHED else 0):
            if self.fastest is None or self.fastest[0] <= self.goal or self.simulated >= SIMULATED:
                break
            if (trial := changes.of(frozenset(self.fastest[3].drops))) is not None:
                problem, rewritten = self._problem(trial)
                if lower_bound(problem, FEW_CUTS) < self.fastest[0]:
                    another = changes.chance.sample(TRIED_WAYS, int(changes.chance.random() < ANOTHER))
                    self._judge(problem, rewritten, (self.way, *another), 1.0)

    def end(self, make: Callable[[Problem], Plan]) -> None:
        """Plan the fastest set as well as can be, and leave out the final drops that this plan does not need."""
        if self.fastest is None or self.problem.functions > MOST_SEARCHED:
            return
        seconds, plan, problem, rewritten = self.fastest
        better = make(problem)
        if _seconds(problem, better) < seconds:
            seconds, plan = _seconds(problem, better), better
        needed = _needed(problem, plan, rewritten)
        if len(needed) < len(rewritten.final):
            rewritten = rewrite(self.history, rewritten.drops, needed)
            problem = self.make_problem(rewritten.trace)
            seconds = simulate_once(problem, plan).seconds
        self.fastest = (seconds, plan, problem, rewritten)

    def _ordered(self) -> list[Candidate]:
        """The candidates that save more time of the link than they cost, the cheapest first."""
        link = self.problem.link
        saved = 1 / link.out_bytes_per_second + 1 / link.in_bytes_per_second  # of the link, for each byte
        worth = [c for c in self.candidates if c.seconds < c.bytes * saved]
        return sorted(worth, key=lambda c: (c.seconds / c.bytes, c.drop.after - c.before))

    def _problem(self, drops: Iterable[Drop]) -> Variant:
        rewritten = rewrite(self.history, drops, self.final)
        return self.make_problem(rewritten.trace), rewritten

    def _judge(self, problem: Problem, rewritten: Rewritten, ways: Sequence[Way], near: float) -> None:
        """Plan what is left to swap with a set of drops, and keep it if it simulates faster than all others.

        What takes `near` times the seconds of the fastest at most is planned again with stretched times.
        """
        try:
            problem.require_feasible()
        except InfeasibleError:
            return
        for way in ways:
            plan, seconds, attempts = Plan(policy="idle"), problem.compute_seconds, 1
            if not problem.fits:
                promising = near * self.fastest[0] if self.fastest is not None else 0.0
                goal = CLOSE * lower_bound(problem, FEW_CUTS)
                plan, seconds, attempts = plan_paced(problem, way, ROUNDS, promising, goal)
            self.simulated += attempts * (problem.functions + len(plan.outs) + len(plan.ins))
            if self.fastest is None or seconds < self.fastest[0]:
                self.fastest, self.way = (seconds, plan, problem, rewritten), way


class _Changes:
    """Changes that were not tried before, at random: candidates that are neighbours in some order come or go.

    Or all of them come, and from now on they are fleeting, or are not.
    """

    def __init__(self, order: Sequence[Candidate]) -> None:
        in_program = (sorted(order, key=key) for key in (lambda c: c.drop.after, lambda c: c.before))
        self.orders = [[c.drop for c in each] for each in (order, *in_program)]
        self.chance = random.Random(0)
        self.tried: set[Drops] = {frozenset()}

    def of(self, drops: Drops) -> Drops | None:
        """Another set; None if this change makes no difference, or leads to a set that was tried."""
        neighbours = self.chance.choice(self.orders)
        first, width = self.chance.randrange(len(neighbours)), int(2 ** self.chance.uniform(0, WIDEST))
        group = frozenset(neighbours[first : first + width])
        inside = frozenset(drop for drop in drops if plain(drop) in group)
        rest, others = drops - inside, group.difference(map(plain, inside))
        fleeting = frozenset(drop._replace(fleeting=True) for drop in group)
        trial = self.chance.choice((rest, drops | others, rest | others, rest | fleeting, rest | group))
        if trial == drops or trial in self.tried:
            return None
        self.tried.add(trial)
        return trial


def plain(drop: Drop) -> Drop:
    """The drop, not fleeting."""
    return drop._replace(fleeting=False)


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
