"""The simulated machine's log: the same timeline with and without it, and events that add up to the timeline."""

import itertools

import pytest
from planning_traces import Builder, random_trace

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.policies import get
from swapd.simulation.events import Copy, Held, Run, Stall
from swapd.simulation.simulator import simulate, simulate_events
from swapd.trace.trace import Machine

A = 0
PLAN = Plan((Out(A, 0, 4, 0),), (In(A, 0, 4, 2, 1, 4),))


def five(capacity: int = 6) -> Problem:
    """Functions of 1 s; A (4 chunks) lives through 0 to 4 and is used at both ends; 1 and 2 take 4 chunks each."""
    b = Builder()
    b.call("f0", [], [4], seconds=1.0)
    b.call("f1", [], [4], seconds=1.0)
    b.free(1)
    b.call("f2", [], [4], seconds=1.0)
    b.free(2)
    b.call("f3", [], seconds=1.0)
    b.call("f4", [A], seconds=1.0)
    b.free(A)
    return Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), capacity)


def test_events_by_hand():
    # f0 0-1, out 1-3, f1 waits for room until 3, f2 4-5, in 5-9 beside f3, f4 waits for A until 9.
    timeline, events = simulate_events(five(), PLAN)
    assert events.seconds == timeline.seconds == 10.0
    assert events.runs == (Run(0, 0, 1), Run(1, 3, 4), Run(2, 4, 5), Run(3, 5, 6), Run(4, 9, 10))
    assert events.stalls == (Stall(1, -1, 1, 3), Stall(4, A, 6, 9))
    assert events.copies == (Copy(True, A, 4, True, 1, 3, 15), Copy(False, A, 4, True, 5, 9, 15))
    assert events.held == (Held(0, 4), Held(1, 4), Held(3, 4), Held(4, 4), Held(5, 4), Held(6, 4), Held(9, 4))


def test_demand_is_told_from_what_was_planned():
    _, events = simulate_events(five(), Plan())
    assert [(copy.is_out, copy.is_planned) for copy in events.copies] == [(True, False), (False, False)]


def test_a_copy_that_goes_on_from_the_iteration_before():
    b = Builder()
    old = b.entry(4, survives=False)  # what the iteration before left behind, under another number
    b.call("f0", [], [4], seconds=1.0)
    b.free(1)
    b.call("f1", [old], seconds=1.0)
    b.free(old)
    (new,) = b.call("f2", [], [4], seconds=1.0)
    b.call("f3", [], seconds=0.5)
    b.previous[old] = new
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 4.0)), 4)
    _, events = simulate_events(problem, Plan((Out(new, 0, 4, 2),), (In(old, 0, 4, 0, 0, 1),)), 3)
    # Out begins as f3 does, lasts 2 s, and so keeps f0 from its room for 1.5 s of the next iteration.
    outs = [copy for copy in events.copies if copy.is_out]
    assert outs == [
        Copy(True, old, 4, True, -0.5, 1.5, 15),
        Copy(True, new, 4, True, 5.5, 7.5, 15),
    ]
    assert events.stalls[0] == Stall(0, -1, 0, 1.5)
    assert events.seconds == 6.0


@pytest.mark.parametrize("seed", range(40))
def test_events_add_up_to_the_timeline(seed):
    trace = random_trace(seed)
    problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes + 100 * (seed % 5))
    for plan in (Plan(), get("idle")(problem, None)):
        timeline, events = simulate_events(problem, plan, 3)
        assert timeline == simulate(problem, plan, 3)
        assert [run.function for run in events.runs] == list(range(problem.functions))
        assert sum(s.end - s.start for s in events.stalls) == pytest.approx(sum(timeline.stall_by_function.values()))
        for is_out, count, size in (
            (True, timeline.out_count, timeline.out_bytes),
            (False, timeline.in_count, timeline.in_bytes),
        ):
            copies = [copy for copy in events.copies if copy.is_out == is_out]
            carried, begun = copies[: len(copies) - count], copies[len(copies) - count :]
            assert len(begun) == count and sum(copy.bytes for copy in begun) == size
            assert len(carried) <= 1 and all(copy.start <= 0 < copy.end for copy in carried)
            for one, other in itertools.pairwise(copies):
                assert one.end <= other.start + 1e-12  # one at a time
        starts = [held.start for held in events.held] + [events.seconds]
        area = sum(h.chunks * (end - h.start) for h, end in zip(events.held, starts[1:]))
        assert area == pytest.approx(timeline.average_chunks * timeline.seconds)
        for h in events.held:  # what appears before the first function may be too much until that starts
            if any(run.start <= h.start < run.end for run in events.runs):
                assert h.chunks <= problem.capacity_chunks
