import random
from dataclasses import replace

import numpy as np
import pytest
from planning_traces import Builder, gpt, random_trace

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import get
from swapd.simulation.simulated_machine import SimulatedMachine
from swapd.simulation.simulator import simulate, simulate_once
from swapd.trace.trace import Machine

A = 0


def five(capacity: int = 6, latency: float = 0.0) -> Problem:
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
    return Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0, latency)), capacity)


PLAN = Plan((Out(A, 0, 4, 0),), (In(A, 0, 4, 2, 1, 4),))


def test_all_fits():
    timeline = simulate(five(8), Plan())
    assert (timeline.seconds, timeline.compute_seconds, timeline.stall_seconds) == (5.0, 5.0, 0.0)
    assert (timeline.out_bytes, timeline.in_bytes, timeline.dropped_bytes) == (0, 0, 0)
    assert timeline.peak_chunks == 8
    assert timeline.average_chunks == pytest.approx((4 + 8 + 8 + 4 + 4) / 5)
    assert timeline.starts == [0, 1, 2, 3, 4] or timeline.starts == [5, 6, 7, 8, 9]
    assert timeline.stall_by_function == {}


def test_a_timeline_by_hand():
    # f0 0-1, out 1-3, f1 waits for room until 3, f2 4-5, in 5-9 beside f3 5-6, f4 waits for A until 9.
    timeline = simulate(five(), PLAN, 1)
    assert timeline.seconds == 10.0
    assert timeline.starts == [0, 3, 4, 5, 9]
    assert timeline.stall_seconds == 5.0
    assert timeline.stall_by_function == {1: 2.0, 4: 3.0}
    assert timeline.stall_by_variable == {-1: 2.0, A: 3.0}
    assert (timeline.out_bytes, timeline.in_bytes, timeline.out_count, timeline.in_count) == (4, 4, 1, 1)
    assert (timeline.demand_in_count, timeline.demand_out_count) == (0, 0)
    assert timeline.peak_chunks == 4
    assert timeline.average_chunks == pytest.approx(4.0)


def test_what_is_free_is_for_a_function_that_waits_before_it_is_for_an_in():
    b = Builder()
    b.call("f0", [], [1, 1, 1], seconds=1.0)
    b.call("f1", [], [3], seconds=1.0)
    b.free(3)
    b.call("f2", [0, 1, 2], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), 4)
    plan = Plan((Out(0, 0, 1, 0), Out(1, 0, 1, 0)), (In(0, 0, 1, 0, 1, 2), In(1, 0, 1, 1, 2, 2)))
    timeline = simulate(problem, plan, 1)
    assert timeline.starts == [0, 2, 5], "the first chunk that left does not come back before f1 has room for its three"
    assert timeline.demand_out_count == 0


CHUNK = 4 << 20  # one piece of a copy


def in_pieces(map_seconds: float, unmap_seconds: float, capacity: int = 4) -> Problem:
    """Like `five`, in chunks that are a piece each; 0.5 s a chunk out, 1 s a chunk in."""
    problem, machine = five(capacity), Machine(2.0 * CHUNK, 1.0 * CHUNK, 0.0, map_seconds, unmap_seconds)
    return replace(problem, chunk_bytes=CHUNK, variable_bytes=problem.variable_bytes * CHUNK, machine=machine)


def test_mapping_is_hidden_behind_copies_but_for_the_first_piece_and_the_last():
    # f0 0-1, out 1-3, unmapped until 3.25, f1, f2 until 5.25, the first chunk mapped until 5.75, in until 9.75
    timeline = simulate(in_pieces(0.5, 0.25), PLAN, 1)
    assert timeline.starts == [0, 3.25, 4.25, 5.25, 9.75]
    assert timeline.stall_by_variable == {-1: 2.25, A: 3.5}
    assert (timeline.out_bytes, timeline.in_bytes) == (4 * CHUNK, 4 * CHUNK)
    # Several moves in a row are like one.
    outs = (Out(A, 0, 2, 0), Out(A, 2, 2, 0))
    ins = (In(A, 0, 2, 2, 2, 4), In(A, 2, 2, 2, 2, 4))
    assert simulate(in_pieces(0.5, 0.25), Plan(outs, ins), 1).starts == timeline.starts
    # A move that becomes due when the link is idle hides nothing: in 5.25-7.75, nothing until f3 has ended at 8.25.
    late = (ins[0], In(A, 2, 2, 3, 2, 4))
    slow = in_pieces(0.5, 0.25)
    slow = replace(slow, seconds=slow.seconds + np.array([0, 0, 0, 2, 0]))
    assert simulate(slow, Plan(outs, late), 1).starts == [0, 3.25, 4.25, 5.25, 8.25 + 0.5 + 2]


def test_a_chunk_that_is_used_in_part_hides_no_more_than_its_copy_takes():
    # f0 0-1, out 1-2.5 and unmapped until 2.75; the byte of the last chunk meanwhile, which is unmapped 2.75-3.
    problem = in_pieces(0.5, 0.25)
    problem = replace(problem, variable_bytes=problem.variable_bytes - np.array([CHUNK - 1, 0, 0]))
    outs = (Out(A, 0, 3, 0), Out(A, 3, 1, 0))
    timeline = simulate(problem, Plan(outs, PLAN.ins), 1)
    assert timeline.starts[:2] == pytest.approx([0, 3.0], abs=1e-6)


def test_mapping_that_is_slower_than_the_link_is_what_a_move_takes():
    # out: a copy of 0.5 and 4 chunks unmapped, 1 each; in: 4 chunks mapped, 2 each, and a copy of 1.
    assert simulate(in_pieces(2.0, 1.0), PLAN, 1).starts == [0, 5.5, 6.5, 7.5, 16.5]
    outs = (Out(A, 0, 2, 0), Out(A, 2, 2, 0))
    ins = (In(A, 0, 2, 2, 2, 4), In(A, 2, 2, 2, 2, 4))
    assert simulate(in_pieces(2.0, 1.0), Plan(outs, ins), 1).starts == [0, 5.5, 6.5, 7.5, 16.5]


def test_demand_pays_for_mapping():
    free = simulate(in_pieces(0.0, 0.0, 6), Plan(), 1)
    # Two chunks leave for f1, unmapped as they do; none for f2; they come in on demand for f4, mapped one by one.
    timeline = simulate(in_pieces(0.5, 0.25, 6), Plan(), 1)
    assert (free.starts, timeline.starts) == ([0, 2, 3, 4, 7], [0, 2.25, 3.25, 4.25, 7.75])


def test_policies_know_how_fast_chunks_can_follow_each_other():
    assert in_pieces(0.0, 0.0).link == in_pieces(0.0, 0.0).machine
    assert in_pieces(0.5, 0.25).link == in_pieces(0.5, 0.25).machine  # hidden behind the copies
    slow = in_pieces(4.0, 1.0).link
    assert (slow.out_bytes_per_second, slow.in_bytes_per_second) == (CHUNK / 1.0, CHUNK / 4.0)


BACK = (Out(A, 0, 4, 0),)


def idle_a(*, writes: bool = False, reads: bool = False) -> Problem:
    """Like `five`, but f1 uses no memory: there is time to copy A until f2 needs its room. f1 may use A."""
    b = Builder()
    b.call("f0", [], [4], seconds=1.0)
    b.call("f1", [A] if writes or reads else [], writes=[A] if writes else [], seconds=3.0)
    b.call("f2", [], [4], seconds=1.0)
    b.free(1)
    b.call("f3", [A], seconds=1.0)
    b.free(A)
    return Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), 6)


def test_what_was_written_back_leaves_at_once():
    plan = Plan((Out(A, 0, 4, 1),), (In(A, 0, 4, 2, 1, 3),))
    # f0 0-1, f1 1-4, out 4-6, f2 6-7, in 7-11, f3 11-12; with the copy made 1-3, f2 4-5, in 5-9, f3 9-10.
    assert simulate(idle_a(), plan, 1).seconds == 12.0
    timeline = simulate(idle_a(), replace(plan, write_backs=BACK), 1)
    assert (timeline.seconds, timeline.starts) == (10.0, [0, 1, 4, 9])
    assert (timeline.out_bytes, timeline.write_back_bytes, timeline.dropped_bytes, timeline.in_bytes) == (4, 4, 4, 4)
    assert timeline.average_chunks == pytest.approx((4 * 4 + 1 * 4 + 4 * 4 + 1 * 4) / 10)
    # A drop takes the time of unmapping: f2 at 5.
    unmapped = replace(idle_a(), machine=Machine(2.0, 1.0, unmap_seconds=0.25))
    assert simulate(unmapped, replace(plan, write_backs=BACK), 1).starts == [0, 1, 5, 10]


def test_a_write_back_is_of_no_use_once_the_variable_was_used():
    plan = Plan((Out(A, 0, 4, 1),), (In(A, 0, 4, 2, 1, 3),))
    for problem in (idle_a(writes=True), idle_a(reads=True)):
        timeline = simulate(problem, replace(plan, write_backs=BACK), 1)
        assert (timeline.seconds, timeline.write_back_bytes) == (12.0, 0)


def test_a_copy_under_way_does_not_hold_up_who_reads_and_is_void_when_it_was_written():
    for writes, seconds, copied in ((False, 11.0, 4), (True, 15.0, 8)):
        b = Builder()
        b.call("f0", [], [4], seconds=1.0)
        b.call("f1", [], seconds=1.0)
        b.call("f2", [A], writes=[A] if writes else [], seconds=3.0)
        b.call("f3", [], [4], seconds=1.0)
        b.free(1)
        b.call("f4", [A], seconds=1.0)
        b.free(A)
        problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 1.0)), 6)
        plan = Plan((Out(A, 0, 4, 2),), (In(A, 0, 4, 3, 1, 4),), BACK)
        # f0 0-1, copy 1-5, f1 1-2, f2 2-5, f3 5-6, in 6-10, f4 10-11; if f2 writes, out 5-9, f3 9-10, in 10-14, f4 -15.
        timeline = simulate(problem, plan, 1)
        assert timeline.starts[:3] == [0, 1, 2]
        assert (timeline.seconds, timeline.out_bytes) == (seconds, copied)


def test_outs_go_first_and_nothing_waits_for_a_write_back():
    timeline = simulate(five(), replace(PLAN, write_backs=(Out(A, 0, 4, -1), Out(A, 0, 4, 3))), 1)
    assert timeline.seconds == 10.0
    assert timeline.write_back_bytes == 0  # when its turn comes, A has left, or is clean


def test_latency_is_paid_per_copy():
    assert simulate(five(latency=0.5), PLAN).seconds == 11.0
    halves = Plan((Out(A, 0, 2, 0), Out(A, 2, 2, 0)), (In(A, 0, 4, 2, 2, 4),))
    assert simulate(five(latency=0.5), halves).starts == [10.0, 12.5, 13.5, 14.5, 19.0]


def test_function_starts_when_enough_pieces_have_left():
    halves = Plan((Out(A, 0, 2, 0), Out(A, 2, 2, 0)), (In(A, 0, 4, 2, 2, 4),))
    assert simulate(five(), halves, 1).starts == [0, 2, 3, 4, 8]


def test_an_in_waits_for_its_outs():
    b = Builder()
    v, w = b.entry(2), b.entry(2)
    b.call("f0", [v, w], seconds=1.0)
    b.call("f1", [], [2], seconds=0.0)
    b.free(2)
    b.call("f2", [], seconds=1.0)
    b.call("f3", [v], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 1.0)), 4)
    outs = (Out(v, 0, 2, 0), Out(w, 0, 2, 0))
    soon = Plan(outs, (In(v, 0, 2, 0, 1, 3), In(w, 0, 2, 2, 2, 4)))
    late = Plan(outs, (In(v, 0, 2, 0, 2, 3), In(w, 0, 2, 2, 2, 4)))
    # v is out at 3, and in again at 5 or, behind the out of w, at 7; f3 starts then.
    assert simulate(problem, soon, 1).starts[3] == 5.0
    assert simulate(problem, late, 1).starts[3] == 7.0


def test_clean_chunks_leave_without_a_copy():
    b = Builder()
    v = b.entry(4)
    for _ in range(2):
        b.call("read", [v], seconds=1.0)
        b.call("big", [], [4], seconds=1.0)
        b.free(len(b.sizes) - 1)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 4.0)), 5)
    plan = Plan((Out(v, 0, 4, 0), Out(v, 0, 4, 2)), (In(v, 0, 4, 1, 1, 2), In(v, 0, 4, 3, 2, 4)))
    timeline = simulate(problem, plan)
    assert (timeline.out_bytes, timeline.dropped_bytes, timeline.in_bytes) == (0, 8, 8)
    assert timeline.seconds == 6.0


def test_a_write_makes_dirty():
    b = Builder()
    v = b.entry(4)
    b.call("write", [], writes=[v], seconds=1.0)
    b.call("big", [], [4], seconds=1.0)
    b.free(1)
    b.call("read", [v], seconds=1.0)
    b.call("small", [], [2], seconds=1.0)
    b.free(2)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 4.0)), 5)
    plan = Plan((Out(v, 0, 4, 0), Out(v, 0, 1, 2)), (In(v, 0, 4, 1, 1, 2), In(v, 0, 1, 3, 2, 4)))
    timeline = simulate(problem, plan)
    # 4 leave from 1 to 5 and are back from 6 to 7; the fourth chunk makes room without a copy.
    assert (timeline.out_bytes, timeline.dropped_bytes, timeline.in_bytes) == (4, 1, 5)
    assert [start - timeline.starts[0] for start in timeline.starts] == [0, 5, 7, 8]


def test_what_is_freed_in_a_copy_is_free_when_the_copy_ends():
    b = Builder()
    b.call("f0", [], [4], seconds=1.0)
    b.call("f1", [], seconds=1.0)
    b.free(A)
    b.call("f2", [], [6], seconds=1.0)
    b.free(1)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 1.0)), 6)
    timeline = simulate(problem, Plan((Out(A, 0, 4, 0),)), 1)  # from 1 to 3
    assert timeline.starts == [0, 1, 3]
    assert timeline.peak_chunks == 6


def test_figures_that_are_kept_are_those_of_the_problem():
    tight, wide = five(), five(8)
    assert simulate_once(tight, PLAN).seconds == simulate(tight, PLAN).seconds
    assert simulate_once(wide, PLAN).seconds == simulate(wide, PLAN).seconds != simulate(tight, PLAN).seconds
    assert simulate_once(wide, PLAN) is simulate_once(wide, PLAN)


def test_demand_mode_by_hand():
    # f1 lacks 2 chunks: 2 of A leave, 1-2. f4 waits for them, 5-7.
    timeline = simulate(five(), Plan(), 1)
    assert timeline.starts == [0, 2, 3, 4, 7]
    assert timeline.seconds == 8.0
    assert (timeline.out_bytes, timeline.in_bytes) == (2, 2)
    assert (timeline.demand_in_count, timeline.demand_out_count) == (1, 1)


def test_demand_evicts_what_is_needed_last():
    b = Builder()
    soon, late = b.entry(2), b.entry(2)
    b.call("f0", [soon, late], seconds=1.0)
    b.call("f1", [], [2], seconds=1.0)
    b.free(2)
    b.call("f2", [soon], seconds=1.0)
    b.call("f3", [late], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 1.0)), 4)
    assert list(simulate(problem, Plan(), 1).stall_by_variable) == [-1, late]


def test_a_late_out_is_skipped():
    # The link is so slow that the second out has not begun when A is needed: it must not happen afterwards.
    b = Builder()
    v, w = b.entry(2), b.entry(2)
    b.call("f0", [], writes=[v, w], seconds=1.0)
    b.call("f1", [], seconds=1.0)
    b.call("f2", [w], seconds=1.0)
    b.call("f3", [], seconds=9.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(0.5, 1.0)), 4)
    plan = Plan((Out(v, 0, 2, 0), Out(w, 0, 2, 0)), (In(w, 0, 2, 1, 2, 2), In(v, 0, 2, 1, 2, 4)))
    timeline = simulate(problem, plan)
    assert (timeline.out_bytes, timeline.in_bytes, timeline.demand_in_count) == (2, 2, 0)
    assert timeline.seconds == 12.0


def test_an_out_is_late_when_a_function_that_uses_the_variable_waits():
    # While f2 waits for X, the link out gets to W, which f2 uses too.
    b = Builder()
    v, w, x = b.entry(2), b.entry(2), b.entry(2)
    b.call("f0", [v], writes=[v, w], seconds=1.0)
    b.call("f1", [], seconds=1.0)
    b.call("f2", [w, x], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 0.5)), 4)
    outs = (Out(v, 0, 2, 0), Out(w, 0, 2, 0), Out(x, 0, 2, 2))
    ins = (In(x, 0, 2, 0, 1, 2), In(w, 0, 2, 1, 2, 2), In(v, 0, 2, 2, 3, 3))
    timeline = simulate(problem, Plan(outs, ins), 1)
    # v leaves 1-3, x comes 3-7; w stays, and f2 starts at 7.
    assert timeline.starts == [0, 1, 7]
    assert (timeline.demand_in_count, timeline.demand_out_count) == (0, 0)


def test_moves_of_the_dead_are_skipped():
    plan = Plan((Out(A, 0, 4, 0), Out(1, 0, 4, 1)), (In(A, 0, 4, 2, 2, 4), In(2, 0, 4, 3, 2, 4)))
    timeline = simulate(five(), plan)
    assert (timeline.seconds, timeline.out_bytes, timeline.in_bytes) == (10.0, 4, 4)


def test_a_bad_plan_is_slow_and_not_wrong():
    for plan in (
        Plan((Out(A, 0, 4, 0),)),
        Plan((Out(A, 0, 4, 3),)),
        Plan((), PLAN.ins),
        Plan((Out(A, 0, 4, 0),), (In(A, 0, 4, 3, 1, 5),)),
        Plan((Out(A, 0, 4, 0),), (In(A, 0, 4, 4, 1, 5), In(A, 0, 4, 2, 1, 4))),
        Plan((Out(A, 0, 4, 0),), (In(A, 0, 4, -1, 0, 4),)),
    ):
        timeline = simulate(five(), plan, 3)
        assert len(timeline.starts) == 5
        assert timeline.peak_chunks <= 6
        assert timeline.in_bytes <= 4 and timeline.out_bytes <= 4


def test_a_plan_of_another_program_is_survived():
    r = random.Random(0)
    for seed in range(60):
        trace = random_trace(seed)
        problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes + 100 * r.randrange(5))
        functions, variables = problem.functions, max(problem.variables, 1)
        outs = [Out(r.randrange(variables), r.randrange(4), 1, r.randrange(-1, functions)) for _ in range(15)]
        ins = [In(r.randrange(variables), 0, 3, r.randrange(-1, functions), r.randrange(16), 0) for _ in range(15)]
        if problem.variables:
            timeline = simulate(problem, Plan(tuple(outs), tuple(ins)), 3)
            assert len(timeline.starts) == functions
            assert timeline.peak_chunks <= problem.capacity_chunks


def bytes_of(problem: Problem, move: Out | In) -> int:
    """Of a variable's last chunk only its own bytes move."""
    first, end = (chunk * problem.chunk_bytes for chunk in (move.first_chunk, move.first_chunk + move.chunk_count))
    return min(int(problem.variable_bytes[move.variable]), end) - first


@pytest.mark.parametrize("policy", ["idle", "window"])
def test_bytes_are_the_plans_when_transfers_keep_up(policy):
    compared = 0
    for seed in range(80):
        trace = random_trace(seed)
        problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes + 300)
        plan = get(policy)(problem, 700)
        # With an instant link every move of the plan happens, so the counts must be the plan's own.
        timeline = simulate(replace(problem, machine=Machine(1e15, 1e15)), plan, 3)
        assert timeline.in_bytes == sum(bytes_of(problem, move) for move in plan.ins)
        left_bytes = timeline.out_bytes - timeline.write_back_bytes + timeline.dropped_bytes
        assert left_bytes == sum(bytes_of(problem, move) for move in plan.outs)
        assert timeline.stall_seconds < 1e-6
        compared += bool(plan)
    assert compared > 40


def test_one_iteration_repeats_once_steady():
    trace = gpt(layers=4, width=256, batch=2, length=128, vocabulary=1000)
    peak = int(trace.live_bytes.max())
    problem = Problem.from_trace(trace, peak // 2, chunk_bytes=1 << 16, machine=Machine(2e9, 2e9))
    plan = get("idle")(problem, None)
    two, five_times = simulate(problem, plan, 2), simulate(problem, plan, 5)
    assert two.seconds == pytest.approx(five_times.seconds, rel=1e-6)
    assert (two.in_bytes, two.out_bytes) == (five_times.in_bytes, five_times.out_bytes)
    assert two.stall_seconds == pytest.approx(sum(two.stall_by_function.values()))
    assert two.stall_seconds == pytest.approx(sum(two.stall_by_variable.values()))


def test_infeasible_problems_are_refused():
    with pytest.raises(InfeasibleError, match="f0"):
        simulate(five(3), Plan())


class Counted(SimulatedMachine):
    waited = 0

    def _demand(self) -> bool:
        counts = [0] * len(self.queued)
        for v, *_ in self.ins:
            counts[v] += 1
        assert self.queued == counts
        self.waited += sum(counts)
        return super()._demand()


def test_it_knows_how_many_ins_of_each_variable_wait():
    """What a function waits for is swapped in on demand only if no in of the plan brings it."""
    waited, r = 0, random.Random(0)
    for seed in range(20):
        trace = random_trace(seed)
        problem = Problem.from_trace(trace, Problem.from_trace(trace, 0).min_budget_bytes)
        variables, functions = max(problem.variables, 1), problem.functions
        ins = [In(r.randrange(variables), 0, 3, r.randrange(functions), 0, 0) for _ in range(15)]
        machine = Counted(problem, Plan((), tuple(ins if problem.variables else ())))
        for _ in range(3):
            machine.iteration()
        waited += machine.waited
    assert waited
