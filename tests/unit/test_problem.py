import pickle
from dataclasses import replace

import numpy as np
import pytest
from planning_traces import Builder, random_trace

from swapd.planning.lower_bound import bound
from swapd.planning.problem import InfeasibleError, Problem
from swapd.trace.trace import Machine, Trace


def chain() -> Trace:
    """Weights of 25 bytes, updated at the end; an activation of 30 bytes from 0 to 2; one of 41 at 1 only."""
    b = Builder()
    weight = b.entry(25)
    (x,) = b.call("first", [weight], [30], seconds=1.0)
    (y,) = b.call("second", [], [41], seconds=2.0)
    b.free(y)
    b.call("third", [x], writes=[weight], seconds=4.0)
    b.free(x)
    return b.trace(chunk_bytes=10)


def test_sizes_are_rounded_up_to_chunks():
    problem = Problem.from_trace(chain(), 109)
    assert problem.chunks.tolist() == [3, 3, 5]
    assert problem.capacity_chunks == 10
    assert problem.live.tolist() == [6, 11, 6]
    assert (problem.live_peak_chunks, problem.live_peak_function, problem.fits) == (11, 1, False)
    assert Problem.from_trace(chain(), 110).fits


def test_slabs_take_from_the_capacity():
    problem = Problem.from_trace(chain(), 100, slab_chunks_peak=3)
    assert problem.capacity_chunks == 7
    assert problem.min_budget_bytes == 90


def test_what_is_not_given_comes_from_the_trace():
    machine = Machine(1e6, 2e6, 1e-6)
    b = Builder()
    b.call("f", [], [10])
    trace = b.trace(chunk_bytes=64, machine=machine)
    assert Problem.from_trace(trace, 1000).machine == machine
    assert Problem.from_trace(trace, 1000).chunk_bytes == 64
    other = Machine(1.0, 1.0)
    assert Problem.from_trace(trace, 1000, machine=other, chunk_bytes=5).machine == other
    assert Problem.from_trace(trace, 1000, chunk_bytes=5).chunk_bytes == 5


def test_an_allocation_is_a_use_that_writes():
    b = Builder()
    b.call("f", [], [10, 10])
    trace = b.trace()
    bare = Trace(
        **{name: getattr(trace, name) for name in Trace.__dataclass_fields__ if not name.startswith("use_")},
        use_offsets=[0, 0],
        use_variables=[],
        use_flags=[],
    )
    uses = Problem.from_trace(bare, 100).uses
    assert uses.variable.tolist() == [0, 1]
    assert uses.function.tolist() == [0, 0]
    assert uses.write.all()


def test_pinned_counts_each_variable_once():
    b = Builder()
    v = b.entry(10)
    b.call("f", [v], [20], writes=[v])
    problem = Problem.from_trace(b.trace(chunk_bytes=1), 100)
    assert problem.pinned.tolist() == [30]
    assert problem.min_budget_bytes == 30


@pytest.mark.parametrize("seed", range(30))
def test_profiles_match_a_count_by_hand(seed):
    problem = Problem.from_trace(random_trace(seed), 1000)
    uses = problem.uses
    for i in range(problem.functions):
        live = [v for v in range(problem.variables) if problem.born[v] <= i <= problem.died[v]]
        live = [v for v in live if not problem.dormant[v]]
        assert problem.live[i] == problem.chunks[live].sum()
        assert problem.pinned[i] == problem.chunks[uses.variable[uses.function == i]].sum()
    assert problem.live_peak_chunks == problem.live.max(initial=0)


def test_a_function_that_cannot_fit_is_named():
    problem = Problem.from_trace(chain(), 50, slab_chunks_peak=1)
    with pytest.raises(InfeasibleError) as caught:
        problem.require_feasible()
    error = caught.value
    assert (error.function, error.function_name) == (0, "first")
    assert (error.need_bytes, error.budget_bytes, error.min_budget_bytes) == (70, 50, 70)
    for part in ("function 0 (first)", "70 bytes", "50 bytes"):
        assert part in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    Problem.from_trace(chain(), 70, slab_chunks_peak=1).require_feasible()
    with pytest.raises(InfeasibleError):
        Problem.from_trace(chain(), 60, slab_chunks_peak=1).require_feasible()


def test_waiting_between_functions_is_no_computation():
    trace = chain()
    waited = replace(trace, function_start=np.array([0.5, 1.75, 13.75]))  # 0.5 s, 0.25 s and 10 s of waiting
    problem = Problem.from_trace(waited, 100)
    assert problem.seconds.tolist() == trace.function_seconds.tolist() == [1.0, 2.0, 4.0]
    assert problem.compute_seconds == 7.0


def test_survivors_lead_to_their_successors():
    b = Builder()
    kept, stranger, inherited = b.entry(10), b.entry(10, survives=False), b.entry(10, survives=False)
    (left,) = b.call("f", [kept, stranger, inherited], [10])
    b.free(stranger, inherited)
    b.previous[inherited] = left
    problem = Problem.from_trace(b.trace(), 100)
    assert problem.successor.tolist() == [kept, -1, -1, inherited]


def test_what_nothing_uses_is_dormant():
    b = Builder()
    asleep, used = b.entry(10), b.entry(10)
    b.call("f", [used])
    problem = Problem.from_trace(b.trace(chunk_bytes=1), 100)
    assert problem.dormant.tolist() == [True, False]
    assert problem.live.tolist() == [10]
    assert asleep == 0


@pytest.mark.parametrize("values", [(-1, {}), (10, {"chunk_bytes": -5}), (10, {"slab_chunks_peak": -1})])
def test_negative_sizes_are_refused(values):
    with pytest.raises(ValueError, match="negative"):
        Problem.from_trace(chain(), values[0], **values[1])


@pytest.mark.parametrize("arguments", [(0.0, 1.0), (1.0, -1.0), (1.0, float("inf")), (1.0, 1.0, -1.0)])
def test_a_machine_has_sensible_speeds(arguments):
    with pytest.raises(ValueError, match="must"):
        Machine(*arguments)


def test_bound_by_hand():
    """Of 96 bytes at the peak, in 3 + 3 + 5 chunks, 70 have room."""
    problem = Problem.from_trace(chain(), 70, machine=Machine(6.5, 20.0))
    found = bound(problem)
    assert (found.forward_seconds, found.backward_seconds) == (3.0, 4.0)
    assert (found.spill_bytes, found.out_seconds, found.in_seconds) == (26, 4.0, 1.3)
    assert found.seconds == 8.0


def test_bound_is_the_compute_time_when_all_fits():
    problem = Problem.from_trace(chain(), 200)
    assert bound(problem).spill_bytes == 0
    assert bound(problem).seconds == problem.compute_seconds == 7.0
