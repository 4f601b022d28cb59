"""The bound of swapping and recomputing beside the best of all schedules of all sets of drops, on tiny problems."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np
import pytest
from exhaustive import best_steady_seconds
from numpy.typing import NDArray
from planning_traces import Builder

from swapd.planning.lower_bound import lower_bound
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.recompute.bound import _Programme, recompute_bound
from swapd.recompute.candidates import Drop, find_candidates
from swapd.recompute.history import History
from swapd.recompute.rewriting import rewrite
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

# Of random problems, and of those of each kind: a half of them for each run.
HALVES = [(range(200), range(30)), pytest.param((range(200, 400), range(30, 60)), marks=pytest.mark.slow)]


def tiny(seed: int) -> Trace:
    """A few functions over a few chunks, some of which may run again. Every other time chunks may be half used."""
    r = random.Random(seed)
    b = Builder()
    chunk_bytes = 1 + seed % 2
    entries = [b.entry(r.randint(1, chunk_bytes)) for _ in range(r.randint(1, 2))]
    alive = list(entries)
    for _ in range(r.randint(4, 5)):
        used = r.sample(alive, min(len(alive), r.randint(1, 2)))
        written = [v for v in used if r.random() < 0.2]
        room = sum(b.sizes[v] for v in alive) < 4 * chunk_bytes
        fresh = [r.randint(1, chunk_bytes)] if room and r.random() < 0.7 else []
        name = "aten::add_.Tensor" if written and not fresh else "aten::gelu"
        alive += b.call(name, used, fresh, writes=written, seconds=float(r.randint(0, 3)))
        for v in [v for v in alive if v not in entries and r.random() < 0.2]:
            alive.remove(v)
            b.free(v)
    b.free(*(v for v in alive if v not in entries))
    return b.trace(chunk_bytes=chunk_bytes, machine=Machine(r.choice([1.0, 0.5, 0.25]), r.choice([1.0, 0.5, 0.25])))


def tiny_that_lingers(seed: int) -> Trace:
    """A layer that is read once or twice and ends, others in between, and then what was made of it is used again."""
    r = random.Random(seed)
    b = Builder()
    source = b.entry(1)
    (layer,) = b.call("aten::gelu", [source], [1], seconds=float(r.randint(0, 3)))
    made = []
    for _ in range(r.randint(1, 2)):
        made += b.call("aten::gelu", [layer], [r.randint(1, 2)], seconds=float(r.randint(0, 2)))
    b.free(layer)
    (other,) = b.call("other", r.sample([source, *made], 1), [r.randint(1, 3)], seconds=float(r.randint(0, 3)))
    if r.random() < 0.5:
        b.call("reads it", [other], seconds=1.0)
    b.free(other)
    for v in r.sample(made, len(made)):
        b.call("uses it again", [v], seconds=float(r.randint(0, 2)))
        b.free(v)
    return b.trace(chunk_bytes=1, machine=Machine(r.choice([1.0, 0.5, 0.25]), r.choice([1.0, 0.5, 0.25])))


def tiny_that_presses(seed: int) -> Trace:
    """A layer that takes long and ends, something large behind it, and then what was made of it is used again."""
    r = random.Random(seed)
    b = Builder()
    chunk_bytes = 1 + seed % 2

    def size(least: int, most: int) -> int:
        return chunk_bytes * r.randint(least, most) - r.randint(0, chunk_bytes - 1)

    source = b.entry(size(1, 1))
    (layer,) = b.call("aten::gelu", [source], [size(1, 2)], seconds=float(r.randint(1, 6)))
    late = r.random() < 0.3
    made = []
    for _ in range(r.randint(1, 2)):
        made += b.call("aten::gelu", [layer], [size(1, 3)], seconds=float(r.randint(0, 1)))
        if r.random() < 0.2:
            b.call("aten::add_.Tensor", [layer], [], writes=[layer], seconds=1.0)
    if not late:
        b.free(layer)
    (other,) = b.call("other", [layer] if late else [], [size(2, 4)], seconds=float(r.randint(0, 3)))
    if late:
        b.free(layer)
    b.free(other)
    for v in r.sample(made, len(made)):
        b.call("uses it again", [v], seconds=float(r.randint(0, 2)))
        b.free(v)
        if r.random() < 0.4:
            b.free(*b.call("other", [], [size(1, 3)], seconds=float(r.randint(0, 2))))
    return b.trace(chunk_bytes=chunk_bytes, machine=Machine(r.choice([1.0, 0.5, 0.25]), r.choice([1.0, 0.5, 0.25])))


def tiny_chain(seed: int) -> Trace:
    """One is made of another and used before that, with something in between each time that takes much memory."""
    r = random.Random(seed)
    b = Builder()
    chain_of = [b.entry(1)]
    for _ in range(2):
        chain_of += b.call("aten::gelu", chain_of[-1:], [r.randint(1, 2)], seconds=float(r.randint(0, 2)))
    for v in reversed(chain_of[1:]):
        if r.random() < 0.8:
            b.free(*b.call("other", [], [r.randint(2, 3)], seconds=float(r.randint(0, 3))))
        used = chain_of[1:] if v == chain_of[-1] and r.random() < 0.5 else [v]
        b.call("uses it again", used, seconds=float(r.randint(0, 2)))
        b.free(v)
    return b.trace(chunk_bytes=1, machine=Machine(r.choice([1.0, 0.5, 0.25]), r.choice([1.0, 0.5, 0.25])))


Solved = tuple[Problem, History, float, float]  # with the best of swapping alone and of all


class Solver:
    """Tries every schedule of every set of drops, and counts what the sets did."""

    def __init__(self) -> None:
        self.found: list[Solved] = []
        self.lingering = self.last = self.fled = 0

    def add(self, trace: Trace, largest: float = np.inf) -> None:
        """Solves a problem, unless it has many drops, or is larger than so many functions times chunks."""
        problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes)
        history = History.beside(problem, trace)
        drops = [c.drop for c in find_candidates(history)]
        plain = {c.drop for c in find_candidates(History(trace))}
        final = [c for c in find_candidates(history, final=True) if c.final]
        if problem.fits or not 1 <= len(drops) <= 3 or problem.functions * problem.capacity_chunks > largest:
            return
        best = alone = best_steady_seconds(problem)
        for subset in chain.from_iterable(combinations(drops, count) for count in range(len(drops) + 1)):
            ways = [rewrite(history, subset, final)]
            self.lingering += len(ways[0].lingers)
            self.last += len(ways[0].final)
            if ways[0].final:
                ways.append(rewrite(history, subset))
            if plain.issuperset(subset):
                ways.append(rewrite(History(trace), subset))
            for flags in product((False, True), repeat=len(subset)):
                fleeting = rewrite(history, [drop._replace(fleeting=flag) for drop, flag in zip(subset, flags)], final)
                if fleeting.trace != ways[0].trace:
                    ways.append(fleeting)
                    self.fled += 1
            for way in ways:
                again = Problem.from_trace(way.trace, problem.budget_bytes)
                if again.min_budget_bytes <= problem.budget_bytes and again.compute_seconds < best:
                    best = min(best, best_steady_seconds(again))
        self.found.append((problem, history, alone, best))


@pytest.fixture(scope="module", params=HALVES, ids=["some", "others"])
def solved(request: pytest.FixtureRequest) -> list[Solved]:
    seeds, more = request.param
    solver = Solver()
    for trace in (*map(tiny, seeds), *map(tiny_that_lingers, more), *map(tiny_chain, more)):
        solver.add(trace)
    assert solver.lingering >= 10 and solver.last >= 50 and solver.fled >= 10
    return solver.found


@pytest.mark.medium
def test_no_schedule_of_any_drops_beats_the_bound(solved: list[Solved]) -> None:
    ratios, gained = [], 0
    for problem, history, alone, best in solved:
        found = recompute_bound(problem, history, find_candidates(history, final=True))
        assert problem.compute_seconds - 1e-9 <= found <= best + 1e-9
        ratios.append(found / best if best else 1.0)
        gained += best < alone - 1e-9
    assert len(solved) >= 20 and gained >= 8, "too few problems in which recomputing helps"
    assert max(ratios) == pytest.approx(1.0)
    assert np.mean(ratios) > 0.7, "far below the best schedules: of no use"


def test_it_knows_that_what_was_dropped_comes_before_what_is_made_from_it(
    solved: list[Solved], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bounds() -> NDArray[np.float64]:
        return np.array(
            [recompute_bound(p, history, find_candidates(history, final=True)) for p, history, *_ in solved]
        )

    found = bounds()
    monkeypatch.setattr(_Programme, "_in_order", lambda self: None)
    assert np.all(bounds() <= found + 1e-6) and np.count_nonzero(bounds() < found - 1e-3) >= 2


@pytest.mark.parametrize(
    "seeds", [(*range(100), 169, 185, 1071, 1185), pytest.param(range(100, 800), marks=pytest.mark.slow)]
)
def test_what_lingers_takes_room_and_copies_or_is_made_again(
    seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = Solver()
    for seed in seeds:
        solver.add(tiny_that_presses(seed), largest=24)
    assert len(solver.found) >= 40 and solver.lingering >= 30
    jobs = [(problem, history, find_candidates(history, final=True)) for problem, history, *_ in solver.found]
    found = np.array([recompute_bound(*job) for job in jobs])
    assert np.all(found <= [best + 1e-6 for *_, best in solver.found])
    monkeypatch.setattr(_Programme, "_lingering", lambda self: None)
    without = np.array([recompute_bound(*job) for job in jobs])
    assert np.all(without <= found + 1e-6) and np.count_nonzero(without < found - 1e-3) >= 10


def test_candidates_that_are_made_again_wholly_give_a_bound_that_is_no_less(solved: list[Solved]) -> None:
    more = 0
    for problem, history, _, best in solved:
        candidates = find_candidates(history, final=True)
        part, whole = (recompute_bound(problem, history, candidates, whole_seconds=s) for s in (None, 60.0))
        assert part - 1e-6 <= whole <= best + 1e-6
        assert recompute_bound(problem, history, candidates, whole_seconds=1e-9) <= whole + 1e-6, "in no time"
        more += whole > part + 1e-3
    assert more >= 5


def test_without_candidates_it_is_a_bound_of_swapping(solved: list[Solved]) -> None:
    for problem, history, alone, _ in solved:
        found = recompute_bound(problem, history, [])
        assert lower_bound(problem) - 1e-9 <= found <= alone + 1e-9, "all cuts at once are no less than the best one"
        assert found >= recompute_bound(problem, history, find_candidates(history, final=True)) - 1e-9


def two_in_turn(seconds: float) -> Trace:
    """x and y of 4 chunks from an input of 1, both needed twice, with room for one of them."""
    b = Builder()
    source = b.entry(1)
    (x,) = b.call("aten::gelu", [source], [4], seconds=seconds)
    (y,) = b.call("aten::gelu", [source], [4], seconds=seconds)
    b.call("reads y", [y], seconds=1.0)
    b.free(y)
    b.call("reads x", [x], seconds=1.0)
    b.free(x)
    return b.trace(chunk_bytes=1, machine=Machine(1.0, 1.0))


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        (1.0, 5.0),  # x costs a second to make again, which is less than 4 s out and 3 s in
        (3.0, 11.0),
        # 4 s out before y is there, 3 s in once it was read, as a chunk may come while it is: 209 s. The bound lets
        # 3/104 of x be made again while the rest comes in.
        (100.0, 209.0 - 8 * 3 / 104),
    ],
)
def test_cases_worked_out_by_hand(seconds: float, bound: float) -> None:
    trace = two_in_turn(seconds)
    problem, history = Problem.from_trace(trace, 5), History(trace)
    candidates = find_candidates(history)
    assert [c.drop.variable for c in candidates] == [1]
    assert recompute_bound(problem, history, candidates) == pytest.approx(bound, abs=0.02)


def test_one_run_may_serve_two() -> None:
    """What made x and y runs once more for both: 10 s, 1 s, 10 s again, 1 s. Moving them would take 80 s.

    From the second function to the next iteration the input comes in too, so what is not made again of x and y, and may
    be a part in the bound, takes (4 - 4 y) 10 s after that function's second: y = 0.78, as 2 + 10 y = 1 + 40 - 40 y.
    """
    b = Builder()
    source = b.entry(1)
    x, y = b.call("aten::max_pool2d_with_indices", [source], [2, 2], seconds=10.0)
    (z,) = b.call("between", [], [4], seconds=1.0)
    b.free(z)
    b.call("reads both", [x, y], seconds=1.0)
    b.free(x, y)
    trace = b.trace(chunk_bytes=1, machine=Machine(0.1, 0.1))
    problem, history = Problem.from_trace(trace, 5), History(trace)
    candidates = find_candidates(history)
    assert [c.drop for c in candidates] == [Drop(x, 0), Drop(y, 0)]
    rewritten = Problem.from_trace(rewrite(history, [c.drop for c in candidates]).trace, 5)
    assert simulate(rewritten, make_plan(rewritten)).seconds == pytest.approx(22.0)
    assert recompute_bound(problem, history, candidates) == pytest.approx(12.0 + 0.78 * 10.0)


def test_it_needs_no_functions() -> None:
    trace = Builder().trace()
    assert recompute_bound(Problem.from_trace(trace, 10), History(trace), []) == 0.0


@pytest.mark.medium
def test_random_plans_are_never_faster() -> None:
    from test_recompute import program

    above = 0
    for seed in range(60):
        trace = replace(program(random.Random(seed)), machine=Machine(50.0, 50.0))
        history = History(trace)
        candidates = find_candidates(history, final=True)
        drops, final = [c.drop for c in candidates if not c.final], [c for c in candidates if c.final]
        problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes)
        found = recompute_bound(problem, history, candidates, places=10)
        r = random.Random(seed)
        for share in (0.3, 0.6, 1.0):
            result = rewrite(history, [drop for drop in drops if r.random() < share], final)
            again = Problem.from_trace(result.trace, problem.budget_bytes)
            if again.min_budget_bytes <= problem.budget_bytes:
                assert simulate(again, make_plan(again, "idle"), 4).seconds >= found - 1e-9, seed
        above += found > problem.compute_seconds + 1e-9
    assert above > 10


def test_what_the_solver_did_not_prove_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that was broken off has a sum, too, which may be above the least one."""
    from scipy import optimize

    def broken_off(cost: NDArray[np.float64], *_: object, **__: object) -> optimize.OptimizeResult:
        return optimize.OptimizeResult(success=False, fun=1e9, x=np.ones(len(cost)))

    trace = two_in_turn(1.0)
    problem, history = Problem.from_trace(trace, 5), History(trace)
    monkeypatch.setattr(optimize, "linprog", broken_off)
    assert recompute_bound(problem, history, find_candidates(history, final=True)) == problem.compute_seconds


def test_what_is_made_of_a_variable_before_its_drop_takes_that_no_second_time() -> None:
    """y is made again of x, for 0 s, before x is dropped and made again for 5 s. To copy anything takes days."""
    b = Builder()
    data = b.entry(1)
    (x,) = b.call("aten::gelu", [data], [2], seconds=5.0)
    (y,) = b.call("aten::gelu", [x], [2], seconds=0.0)
    b.free(*b.call("other", [x], [3], seconds=1.0))
    b.call("reads both", [x, y], seconds=1.0)
    b.free(y)
    b.free(*b.call("other", [], [5], seconds=1.0))
    b.call("reads x", [x], seconds=1.0)
    b.free(x)
    trace = b.trace(chunk_bytes=1, machine=Machine(1e-6, 1e-6))
    problem, history = Problem.from_trace(trace, 6), History(trace)
    candidates = find_candidates(history)
    assert [c.drop for c in candidates] == [Drop(x, 3), Drop(y, 1)]
    best = make_plan(Problem.from_trace(rewrite(history, [c.drop for c in candidates]).trace, 6)).predicted_seconds
    assert recompute_bound(problem, history, candidates) == pytest.approx(problem.compute_seconds + 5.0, abs=1e-3)
    assert best == pytest.approx(problem.compute_seconds + 5.0)
