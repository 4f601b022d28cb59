"""The lower bound beside the best of all schedules, found by looking at every one of tiny problems."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from exhaustive import best_steady_seconds
from planning_traces import Builder, at_balance, gpt, random_trace, resnet50

from swapd.planning.lower_bound import lower_bound, two_link_bound
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

SEEDS = range(120)
SMALL_BYTES = 1 << 20  # what is no larger lies in slabs, as by default


def tiny(seed: int) -> Problem | None:
    """A few functions over a few chunks with just enough room for the largest function; None if everything fits.

    Every other time chunks have two bytes, and a variable may have half of its last one.
    """
    r = random.Random(seed)
    b = Builder()
    chunk_bytes = 1 + seed % 2
    unused = chunk_bytes - 1
    entries = [b.entry(r.choice([1, 1, 2]) * chunk_bytes - r.randint(0, unused)) for _ in range(r.randint(1, 2))]
    alive = list(entries)
    for _ in range(r.randint(3, 5)):
        used = r.sample(alive, min(len(alive), r.randint(1, 2)))
        written = [v for v in used if r.random() < 0.3]
        room = sum(b.sizes[v] for v in alive) < 4 * chunk_bytes
        fresh = [r.randint(1, chunk_bytes)] if room and r.random() < 0.6 else []
        alive += b.call("f", used, fresh, writes=written, seconds=float(r.randint(0, 3)))
        for v in [v for v in alive if v not in entries and r.random() < 0.3]:
            alive.remove(v)
            b.free(v)
    b.free(*(v for v in alive if v not in entries))
    trace = b.trace(chunk_bytes=chunk_bytes, machine=Machine(r.choice([1.0, 0.5]), r.choice([1.0, 0.5])))
    problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes)
    return None if problem.fits else problem


@pytest.fixture(scope="module")
def solved() -> list[tuple[Problem, float]]:
    problems = [problem for problem in map(tiny, SEEDS) if problem is not None]
    assert len(problems) >= 40
    return [(problem, best_steady_seconds(problem)) for problem in problems]


@pytest.mark.medium
def test_no_schedule_beats_the_bound(solved: list[tuple[Problem, float]]) -> None:
    ratios = []
    for problem, best in solved:
        found = lower_bound(problem)
        assert problem.compute_seconds - 1e-9 <= found <= best + 1e-9
        ratios.append(found / best if best else 1.0)
    assert max(ratios) == pytest.approx(1.0)
    assert np.mean(ratios) > 0.7, "far below the best schedules: of no use"


def test_no_schedule_beats_the_bound_of_two_links(solved: list[tuple[Problem, float]]) -> None:
    """A device over some host memory is slower than a device that has both, whose best schedule is known."""
    above = 0
    for problem, best in solved:
        swift = replace(problem, machine=Machine(1e9, 1e9))
        found = two_link_bound(swift, 0, problem.machine)
        assert problem.compute_seconds - 1e-9 <= found <= best + 1e-6
        above += found > problem.compute_seconds + 1e-6
        if problem.capacity_chunks > 2:  # a chunk of the two is the host's
            smaller = replace(swift, capacity_chunks=problem.capacity_chunks - 1)
            assert two_link_bound(smaller, 1, problem.machine) <= best + 1e-6
    assert above > 20


@pytest.mark.parametrize(("policy", "most"), [("auto", 1.06), ("idle", 1.2), ("window", 1.3)])
def test_policies_are_near_the_best_schedule(solved: list[tuple[Problem, float]], policy: str, most: float) -> None:
    """And never better, as they follow the same rules."""
    ratios = []
    for problem, best in solved:
        seconds = simulate(problem, make_plan(problem, policy), 4).seconds
        assert seconds >= best - 1e-9
        ratios.append(seconds / best if best else 1.0)
    assert np.mean(ratios) <= most


def in_turn(capacity: int, machine: Machine) -> Problem:
    """Three variables of 2 chunks, each written by one function of a second, for ever."""
    b = Builder()
    for _ in range(3):
        b.entry(2)
    for v in range(3):
        b.call(f"f{v}", [v], writes=[v], seconds=1.0)
    return Problem.from_trace(b.trace(chunk_bytes=1, machine=machine), capacity)


@pytest.mark.parametrize(
    ("capacity", "machine", "seconds"),
    [
        (6, Machine(1.0, 1.0), 3.0),  # all fits
        (4, Machine(100.0, 100.0), 3.0),
        # From the end of one to the start of the next but one: 2 chunks in use, 4 others used by then, room for 2 of
        # them: 1 s and 4 s for two functions, and at least 1 s, the computation, for the third.
        (4, Machine(100.0, 0.5), 6.0),
        # With room for one variable each function has to wait for its own 2 chunks, or for those before it to leave.
        (2, Machine(100.0, 0.5), 15.0),
        (2, Machine(0.5, 100.0), 15.0),
        # Each time the 2 chunks take a copy, and a copy a latency.
        (2, Machine(100.0, 0.5, 0.25), 15.75),
    ],
)
def test_cases_worked_out_by_hand(capacity: int, machine: Machine, seconds: float) -> None:
    assert lower_bound(in_turn(capacity, machine)) == pytest.approx(seconds)


def test_two_links_by_hand() -> None:
    swift, fast, slow = Machine(1e9, 1e9), Machine(100.0, 100.0), Machine(100.0, 0.5)
    # As with room for 4 chunks over the slow link, wherever the 4 are.
    for device, host in ((2, 2), (3, 1), (4, 0)):
        assert two_link_bound(in_turn(device, swift), host, slow) == pytest.approx(6.0)
    # 5 s for two functions because of the disk, and for the third one 0.02 s over the first link and 1 s: more than
    # either link alone makes of it.
    assert two_link_bound(in_turn(2, fast), 2, slow) == pytest.approx(6.02)
    assert lower_bound(in_turn(2, fast)) == pytest.approx(3.06) and lower_bound(in_turn(4, slow)) == pytest.approx(6.0)
    # Room for all 6: the first link is what is left.
    assert two_link_bound(in_turn(2, slow), 4, slow) == pytest.approx(lower_bound(in_turn(2, slow)))
    assert two_link_bound(Problem.from_trace(Builder().trace(), 10), 1, slow) == 0.0


def test_fewer_cuts_give_a_smaller_bound_and_no_function_none() -> None:
    problem = networks()["gpt"]
    whole, few = lower_bound(problem, cuts=10_000), lower_bound(problem, cuts=40)
    assert problem.compute_seconds <= few <= whole + 1e-12
    assert few > 0.95 * whole
    assert lower_bound(Problem.from_trace(Builder().trace(), 10)) == 0.0


def test_random_programs_never_run_faster() -> None:
    above = 0
    for seed in range(60):
        trace = random_trace(seed)
        problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes)
        found = lower_bound(problem)
        for policy in ("idle", "window"):
            assert simulate(problem, make_plan(problem, policy), 4).seconds >= found - 1e-9, seed
        above += found > problem.compute_seconds + 1e-9
    assert above > 10


def networks() -> dict[str, Problem]:
    """Small tensors are no variables: they lie in slabs."""
    traces: dict[str, Trace] = {"resnet50": resnet50(64), "gpt": gpt()}
    made = {}
    for name, whole in traces.items():
        trace = replace(whole, variable_bytes=np.where(whole.variable_bytes <= SMALL_BYTES, 0, whole.variable_bytes))
        peak = int(trace.live_bytes.max())
        made[name] = Problem.from_trace(trace, peak // 2, machine=at_balance(trace, peak - peak // 2))
    return made


@pytest.mark.parametrize(("network", "most"), [("resnet50", 1.05), ("gpt", 1.02)])
def test_plans_of_networks_are_close(network: str, most: float) -> None:
    problem = networks()[network]
    found, plan = lower_bound(problem), make_plan(problem)
    assert plan.predicted_seconds is not None
    assert found <= plan.predicted_seconds <= most * found
