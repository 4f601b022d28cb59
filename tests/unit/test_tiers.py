"""Three tiers: the second level's problem by hand, times worked out by hand, and what holds for every program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import event, given
from hypothesis import strategies as st
from planning_traces import Builder, at_balance, gpt, in_whole_chunks
from program_strategies import examples, problems

from benchmarks.planning.validator import validate
from swapd.planning.lower_bound import lower_bound
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import PolicyInfeasibleError, Problem
from swapd.policies import make_plan
from swapd.tiers.first_level import UnsteadyError, first_level
from swapd.tiers.host_blocks import host_blocks
from swapd.tiers.joint import simulate_jointly
from swapd.tiers.moves import BlockMoves, of_whole_blocks, shifts_of
from swapd.tiers.three_tiers import (
    HostInfeasibleError,
    LowerTiers,
    exclusive,
    plan_tiers,
    run_tiers,
    second_level,
)
from swapd.trace.trace import READ, WRITE, Machine, Trace

ENDLESS = 1 << 40  # bytes of host memory
INSTANT = Machine(1e15, 1e15)


def trace_in_turn(writes: bool, seconds: float = 1.0, rate: float = 2.0) -> Trace:
    """Three variables of 2 chunks, each used by one function, for ever."""
    b = Builder()
    for _ in range(3):
        b.entry(2)
    for v in range(3):
        b.call(f"f{v}", [v], writes=[v] if writes else [], seconds=seconds)
    return b.trace(chunk_bytes=1, machine=Machine(rate, rate))


def in_turn(writes: bool, seconds: float = 1.0, rate: float = 2.0) -> Problem:
    """The same on a device that has room for one of them."""
    return Problem.from_trace(trace_in_turn(writes, seconds, rate), 2)


def test_the_second_level_of_what_is_written() -> None:
    # Out of 2 0-1, in of 0 1-2, f0 2-3, out of 0 3-4, in of 1 4-5, f1 5-6, out of 1 6-7, in of 2 7-8, f2 8-9.
    level, blocks = second_level(in_turn(True), Plan(), LowerTiers(ENDLESS, INSTANT))
    assert level.seconds == 9.0 and level.starts == [0, 1, 3, 4, 6, 7]
    assert blocks.names[:2] == ("copy out of variable 2", "copy in of variable 0")
    assert blocks.seconds.tolist() == [1, 2, 1, 2, 1, 2]
    # A block is born with a copy out and dies with the copy in that reads it, in the next iteration for two of them.
    lives = {(born, died) for born, died in zip(blocks.born.tolist(), blocks.died.tolist())}
    assert lives == {(0, 5), (2, 6), (-1, 1), (4, 6), (-1, 3)}
    for v in np.flatnonzero(blocks.born == -1).tolist():
        before = int(blocks.previous[v])
        assert blocks.died[before] == 6 and blocks.born[before] == {1: 2, 3: 4}[int(blocks.died[v])]
    assert blocks.chunks.tolist() == [2] * 5 and blocks.live.tolist() == [6] * 6 and blocks.pinned.tolist() == [2] * 6
    assert sorted(blocks.uses.function[blocks.uses.write].tolist()) == [0, 2, 4]


def test_the_second_level_of_what_is_read() -> None:
    """Nothing is copied out: the same three blocks live for ever, and no copy writes them."""
    level, blocks = second_level(in_turn(False), Plan(), LowerTiers(ENDLESS, INSTANT))
    assert [copy.is_out for copy in level.copies] == [False] * 3
    assert blocks.born.tolist() == [-1] * 3 and blocks.died.tolist() == [3] * 3
    assert blocks.previous.tolist() == [0, 1, 2] and not blocks.uses.write.any()


def test_parts_that_move_by_themselves_have_one_block() -> None:
    b = Builder()
    b.call("f0", [], [6], seconds=1.0)
    b.call("f1", [], [4], seconds=1.0)
    b.free(1)
    b.call("f2", [], seconds=8.0)
    b.call("f3", [0], seconds=1.0)
    b.free(0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(4.0, 4.0)), 6)
    plan = Plan((Out(0, 0, 4, 0),), (In(0, 0, 1, 1, 1, 3), In(0, 1, 3, 1, 1, 3)))
    level, blocks = second_level(problem, plan, LowerTiers(ENDLESS, INSTANT))
    assert [(copy.is_out, copy.mask) for copy in level.copies] == [(True, 0b1111), (False, 0b1), (False, 0b1110)]
    assert list(zip(blocks.chunks.tolist(), blocks.born.tolist(), blocks.died.tolist())) == [(6, 0, 2)]
    assert blocks.owner == (0,) and blocks.use_flags.tolist() == [WRITE, READ, READ]


def test_what_is_freed_without_coming_back_stays_on_the_host_until_then() -> None:
    b = Builder()
    b.call("f0", [], [4], seconds=1.0)
    b.call("f1", [], [4], seconds=1.0)
    b.free(1)
    b.call("f2", [], [4], seconds=1.0)
    b.call("f3", [], [6], seconds=1.0)
    b.free(3, 0)
    b.call("f4", [2], seconds=1.0)
    b.free(2)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(4.0, 4.0)), 6)
    plan = Plan((Out(0, 0, 4, 0), Out(2, 0, 4, 2)), (In(2, 0, 4, 3, 2, 4),))
    level, blocks = second_level(problem, plan, LowerTiers(ENDLESS, INSTANT))
    # Out of 0 1-2, f1 2-3, f2 3-4, out of 2 4-5, f3 5-6, in of 2 6-7. Variable 0 is freed at 6.
    copies = [(copy.is_out, copy.variable, copy.start) for copy in level.copies]
    assert copies == [(True, 0, 1), (True, 2, 4), (False, 2, 6)]
    assert [tuple(lost) for lost in level.lost] == [(0, 0b1111, 6.0)]
    assert sorted(zip(blocks.born.tolist(), blocks.died.tolist())) == [(0, 2), (1, 2)]


# Seconds of a step. Each variable's turn takes 1 s in, 1 s for the function and, if it was written, 1 s out.
BY_HAND = [
    # All fits into host memory: the disk does nothing.
    (True, 6, 0.01, 9.0),
    (False, 6, 0.01, 6.0),
    # Host memory for one block: after a turn (2 s of reads, 3 s with the copy out), the next block is read from the
    # disk, 2 bytes at that rate, beside nothing; what was copied out is written before.
    (False, 2, 1.0, 3 * (2 + 2)),
    (False, 2, 0.5, 3 * (2 + 4)),
    (True, 2, 1.0, 3 * (3 + 2 + 2)),
    (True, 2, 0.5, 3 * (3 + 4 + 4)),
    # Host memory for two blocks: one is read while the other is copied and used, which hides 2 s of each turn.
    (False, 4, 1.0, 6.0),
    (True, 4, 2.0, 9.0),
]


@pytest.mark.parametrize(("writes", "host", "rate", "seconds"), BY_HAND)
def test_times_by_hand(writes: bool, host: int, rate: float, seconds: float) -> None:
    lower = LowerTiers(host, Machine(rate, rate))
    tiers = run_tiers(in_turn(writes), Plan(), lower, "auto")
    assert tiers.seconds == pytest.approx(seconds)
    assert tiers.disk_stall_seconds == pytest.approx(seconds - (9.0 if writes else 6.0))
    assert tiers.link_stall_seconds == pytest.approx((9.0 if writes else 6.0) - 3.0)
    assert lower.bound(in_turn(writes)) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(("writes", "host", "seconds"), [(True, 6, 3.0), (True, 2, 15.0), (False, 2, 9.0)])
def test_copies_that_take_no_time(writes: bool, host: int, seconds: float) -> None:
    """A turn is 1 s, a block read from the disk 2 s, and one written as long, after the copy out."""
    tiers = run_tiers(in_turn(writes, rate=1e30), Plan(), LowerTiers(host, Machine(1.0, 1.0)), "auto")
    assert tiers.seconds == pytest.approx(seconds)


def test_the_moves_that_the_core_makes() -> None:
    tiers = run_tiers(in_turn(True), Plan(), LowerTiers(2, Machine(2.0, 2.0)), "auto")
    downs, ups = shifts_of(tiers.plan, tiers.level, tiers.blocks, trace_in_turn(True))
    # As the iteration starts variable 2 leaves, its block goes down, and that of 0 comes up; then it goes on in turn.
    assert downs == ((2, -1), (0, 0), (1, 1)) and ups == ((0, -1), (1, 0), (2, 1))
    columns = BlockMoves(downs, ups, True).columns()
    assert [column.tolist() for column in columns["downs"]] == [[2, 0, 1], [-1, 0, 1]] and columns["exclusive"]
    assert BlockMoves().columns() == {"downs": [], "ups": [], "exclusive": False}


def test_moves_of_parts_become_moves_of_whole_blocks() -> None:
    problem = replace(in_turn(True), chunks=np.array([3, 1, 1]))
    plan = Plan(
        (Out(0, 1, 1, 0), Out(1, 0, 1, 0), Out(0, 0, 1, 1), Out(0, 2, 1, 7)),
        (In(0, 0, 1, 2, 2, 4), In(1, 0, 1, 2, 3, 4), In(0, 1, 1, 3, 3, 4), In(0, 2, 1, 8, 4, 9)),
    )
    late = of_whole_blocks(plan, replace(problem, previous=np.array([-1, -1, -1])))
    assert late.outs == (Out(0, 0, 3, 0), Out(1, 0, 1, 0), Out(0, 0, 3, 7))
    assert late.ins == (In(1, 0, 1, 2, 2, 4), In(0, 0, 3, 3, 2, 4), In(0, 0, 3, 8, 3, 9))
    # A block whose first part is back before the iteration ends comes with the last one, in the next iteration.
    over = Plan((Out(0, 0, 3, 5),), (In(0, 1, 2, 2, 1, 4), In(0, 0, 1, 6, 1, 9)))
    assert of_whole_blocks(over, problem).ins == (In(0, 0, 3, 2, 1, 4),)


def test_a_disk_that_everything_waits_for() -> None:
    """The step takes the time of the bytes: each block is read once, and written once if it changed."""
    for writes, ways in ((False, 1), (True, 2)):
        tiers = run_tiers(in_turn(writes, 0.0, 1e9), Plan(), LowerTiers(2, Machine(0.5, 0.5)), "auto")
        second = tiers.result.second
        assert (second.in_bytes, second.out_bytes) == (6, 6 if writes else 0)
        assert tiers.seconds == pytest.approx(ways * 6 / 0.5)


def test_reads_and_writes_have_their_own_speed() -> None:
    tiers = run_tiers(in_turn(True), Plan(), LowerTiers(2, Machine(0.5, 2.0)), "auto")
    assert tiers.seconds == pytest.approx(3 * (3 + 4 + 1))
    tiers = run_tiers(in_turn(True), Plan(), LowerTiers(2, Machine(0.5, 2.0, 0.25)), None)
    assert tiers.seconds == pytest.approx(3 * (3 + 4 + 1 + 2 * 0.25))


def test_a_block_larger_than_host_memory() -> None:
    with pytest.raises(HostInfeasibleError) as caught:
        run_tiers(in_turn(True), Plan(), LowerTiers(1, INSTANT), "auto")
    assert str(caught.value) == (
        "copy out of variable 2 (copy 0 of an iteration) needs 2 bytes of host memory at once, the host budget is 1 "
        "bytes; the smallest that works with this plan is 2 bytes"
    )
    with pytest.raises(HostInfeasibleError, match=r"policy lms finds no plan for host memory: copy in of variable"):
        run_tiers(in_turn(False), Plan(), LowerTiers(2, INSTANT), "lms")


def test_nothing_moves_where_everything_fits() -> None:
    problem = replace(in_turn(True), capacity_chunks=6)
    tiers = plan_tiers(problem, LowerTiers(0, Machine(0.1, 0.1)))
    assert (tiers.seconds, tiers.blocks.functions, tiers.result.second.in_bytes) == (3.0, 0, 0)


def test_a_copy_that_goes_on_from_the_iteration_before() -> None:
    b = Builder()
    old = b.entry(4, survives=False)
    b.call("f0", [], [4], seconds=1.0)
    b.free(1)
    b.call("f1", [old], seconds=1.0)
    b.free(old)
    (new,) = b.call("f2", [], [4], seconds=1.0)
    b.call("f3", [], seconds=0.5)
    b.previous[old] = new
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(2.0, 4.0)), 4)
    plan = Plan((Out(new, 0, 4, 2),), (In(old, 0, 4, 0, 0, 1),))
    level, blocks = second_level(problem, plan, LowerTiers(4, INSTANT))
    # In 2.5-3.5, out 5.5-7.5, which is 1.5 in the next iteration: the block is there from then to the next copy in.
    assert [(copy.is_out, copy.start, copy.end) for copy in level.copies] == [(False, 2.5, 3.5), (True, 5.5, 7.5)]
    assert (level.carried[0].start, level.carried[0].end) == (-0.5, 1.5)
    assert sorted(zip(blocks.born.tolist(), blocks.died.tolist())) == [(-1, 0), (1, 2)]
    assert blocks.seconds.tolist() == [3.0, 3.0]
    assert run_tiers(problem, plan, LowerTiers(4, INSTANT), "auto").seconds == 6.0


def test_a_block_is_held_while_it_is_copied() -> None:
    b = Builder()
    w = b.entry(2)
    b.call("f0", [w], [4], seconds=1.0)
    b.call("f1", [], seconds=1.0)
    b.call("f2", [], [4], seconds=1.0)
    b.free(2)
    b.call("f3", [w], seconds=1.0)
    b.call("f4", [1], seconds=5.0)
    b.free(1)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 2.0)), 6)
    plan = Plan((Out(w, 0, 2, 0), Out(1, 0, 4, 0)), (In(w, 0, 2, 0, 1, 3), In(1, 0, 4, 3, 2, 4)))
    level, blocks = second_level(problem, plan, LowerTiers(ENDLESS, INSTANT))
    # The weight, which is clean, leaves and comes back 1-2 while variable 1 is copied out 1-5.
    copies = [(copy.is_out, copy.variable, copy.start, copy.end) for copy in level.copies]
    assert copies == [(True, 1, 1.0, 5.0), (False, w, 1.0, 2.0), (False, 1, 7.0, 9.0)]
    assert level.outlasts == [1, 0, 0] and blocks.pinned.tolist() == [4, 4 + 2, 4]


def test_a_copy_that_goes_on_when_its_variable_is_gone() -> None:
    b = Builder()
    w = b.entry(2)
    b.call("f0", [], seconds=1.0)
    b.call("f1", [w], seconds=2.0)
    b.call("f2", [], [4], seconds=1.0)  # it is there until the iteration ends
    b.call("f3", [], seconds=2.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=1, machine=Machine(1.0, 4.0)), 10)
    plan = Plan((Out(w, 0, 2, 1), Out(1, 0, 4, 2)), (In(w, 0, 2, -1, 0, 1),))
    level, blocks = second_level(problem, plan, LowerTiers(ENDLESS, INSTANT))
    # The out of 4-8 is still under way as the next iteration copies the weight in.
    assert [(copy.variable, copy.start, copy.end) for copy in level.carried] == [(-1, -2.0, 2.0)]
    assert [copy.start for copy in level.copies] == [0.0, 4.0] and level.outlasts == [0, 1]
    assert (blocks.born.tolist(), blocks.died.tolist()) == ([-1, 1], [2, 1])


def test_a_first_level_that_differs_from_one_iteration_to_the_next() -> None:
    level = first_level(in_turn(True), Plan())
    with pytest.raises(UnsteadyError, match="copy 4 reads what the host does not have"):
        host_blocks(replace(level, copies=level.copies[1:]), ENDLESS, INSTANT)


def test_the_host_gives_up_what_is_on_the_device() -> None:
    """Three variables that are only read: with copies kept, the host has all of them; without, those that are away."""
    problem = in_turn(False)
    kept = run_tiers(problem, Plan(), LowerTiers(ENDLESS, INSTANT), None)
    apart = run_tiers(exclusive(problem), Plan(), LowerTiers(ENDLESS, INSTANT), None)
    assert exclusive(problem).uses.write.all() and not problem.uses.write.any()
    assert (kept.level.timeline.out_bytes, apart.level.timeline.out_bytes) == (0, 6)
    assert [kept.blocks.live_peak_chunks, apart.blocks.live_peak_chunks] == [6, 6]  # while one leaves, all are there
    assert (kept.blocks.live.tolist(), min(kept.blocks.died)) == ([6, 6, 6], 3)
    assert sorted(apart.blocks.died.tolist())[:2] == [1, 3]  # with the copy in


def transformer(device: float, host: float, slower: float, fills: bool) -> tuple[Problem, LowerTiers]:
    """A GPT with these shares of its live peak in device and host memory, over a disk so much slower than the link.

    Its variables fill their chunks, or 9% of the bytes of these are unused.
    """
    trace = gpt(layers=12, width=768, batch=4, length=512, vocabulary=8000)
    peak = int(trace.live_bytes.max())
    machine = at_balance(trace, peak * (1 - device))
    disk = Machine(machine.out_bytes_per_second / slower, machine.in_bytes_per_second / slower)
    problem = Problem.from_trace(trace, int(device * peak), machine=machine)
    return in_whole_chunks(problem) if fills else problem, LowerTiers(int(host * peak), disk)


@pytest.mark.parametrize(
    ("device", "host", "slower", "fills", "most"),
    [
        (0.3, 0.3, 5.0, True, 1.03),
        # The bound lets a part of a block lie on the disk.
        pytest.param(0.3, 0.3, 5.0, False, 1.08, marks=pytest.mark.slow),
        pytest.param(0.5, 0.15, 2.0, True, 1.03, marks=pytest.mark.slow),
        pytest.param(0.5, 0.15, 2.0, False, 1.05, marks=pytest.mark.slow),
    ],
)
@pytest.mark.medium
def test_plans_of_a_network_are_sound_close_and_the_best(
    device: float, host: float, slower: float, fills: bool, most: float
) -> None:
    problem, lower = transformer(device, host, slower, fills)
    tiers, bound = plan_tiers(problem, lower), lower.bound(problem)
    assert bound > lower_bound(problem)
    assert validate(tiers.level.problem, tiers.level.plan) == [] and validate(tiers.blocks, tiers.plan) == []
    assert bound <= tiers.seconds <= most * bound
    for policy in ("idle", "window", "zero_infinity", "zero_infinity_tuned"):
        assert tiers.seconds <= plan_tiers(problem, lower, policy).seconds
    assert tiers.seconds < run_tiers(tiers.level.problem, tiers.level.plan, lower, None).seconds
    assert tiers.host_peak_bytes <= lower.host_budget_bytes
    again = plan_tiers(problem, replace(lower, host_budget_bytes=ENDLESS))
    assert again.seconds == make_plan(problem).predicted_seconds


RATES = st.sampled_from([(1e4, 1e4), (1e5, 1e5), (2e4, 1e5), (3e3, 1e4)])
POLICIES = st.sampled_from(["auto", "idle", "window", "demand", "zero_infinity", "nnabla"])


@examples(100)
@given(problems(), st.integers(0, 12), RATES, st.sampled_from([0.0, 1e-3]), POLICIES)
def test_what_holds_for_every_program(
    problem: Problem, more: int, rates: tuple[float, float], latency: float, policy: str
) -> None:
    try:
        plan = Plan() if policy == "demand" else make_plan(problem, policy)
    except PolicyInfeasibleError:
        return
    level, blocks = second_level(problem, plan, LowerTiers(ENDLESS, INSTANT))
    event("copies" if level.copies else "no copies")
    if not level.copies:
        return
    least = int(blocks.pinned.max()) * problem.chunk_bytes
    swift = simulate_jointly(level, replace(blocks, capacity_chunks=least // problem.chunk_bytes), Plan())
    assert swift.seconds == pytest.approx(level.seconds)  # as without a disk
    lower = LowerTiers(least + more * problem.chunk_bytes, Machine(*rates, latency))
    bound = lower.bound(problem)
    for second in ("auto", "window", None):
        tiers = run_tiers(problem, plan, lower, second)
        timeline = tiers.result.second
        assert second is None or validate(tiers.blocks, tiers.plan) == []
        assert second is None or (timeline.demand_in_count, timeline.demand_out_count) == (0, 0)
        assert timeline.peak_chunks <= tiers.blocks.capacity_chunks
        slowest = max(simulate_jointly(tiers.level, tiers.blocks, tiers.plan, count).seconds for count in (4, 5, 6, 7))
        assert bound <= slowest * (1 + 1e-9)
        assert level.seconds <= slowest * (1 + 1e-9)
