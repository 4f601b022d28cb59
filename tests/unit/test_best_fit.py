"""The simulated caching allocator: its rules by hand, and its books under random use."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_traces import Builder

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.policies.published.best_fit import KIB, MIB, BestFitAllocator, OutOfMemory, Replay
from swapd.trace.trace import Machine


def test_sizes_are_rounded_and_small_ones_share_a_segment():
    a = BestFitAllocator(100 * MIB)
    first, second = a.allocate(1), a.allocate(513)
    assert (first.bytes, second.bytes) == (512, 1024)
    assert (first.segment, first.address) == (second.segment, 0) and second.address == 512
    assert a.reserved_bytes == 2 * MIB
    middle = a.allocate(MIB + 1)
    assert middle.segment != first.segment
    assert a.reserved_bytes == 22 * MIB
    assert a.allocate(30 * MIB + 1).bytes == 30 * MIB + 512
    assert a.reserved_bytes == 54 * MIB


def test_a_rest_of_a_mebibyte_or_less_is_not_split_off():
    a = BestFitAllocator(100 * MIB)
    block = a.allocate(12 * MIB)
    a.free(block)
    assert a.allocate(11 * MIB).bytes == 12 * MIB
    assert a.allocated_bytes == 12 * MIB
    a = BestFitAllocator(100 * MIB)
    a.free(a.allocate(12 * MIB))
    assert a.allocate(11 * MIB - 512).bytes == 11 * MIB - 512


def test_the_smallest_block_that_fits_is_taken():
    a = BestFitAllocator(200 * MIB)
    blocks = [a.allocate(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        a.free(block)
    assert a.allocate(18 * MIB).segment == blocks[1].segment
    assert a.allocate(25 * MIB).segment == blocks[2].segment
    assert a.allocate(25 * MIB).segment == blocks[0].segment


def test_neighbours_merge_on_both_sides():
    a = BestFitAllocator(20 * MIB)
    blocks = [a.allocate(5 * MIB) for _ in range(4)]
    for index in (0, 2, 1):
        a.free(blocks[index])
    whole = a.allocate(15 * MIB)
    assert (whole.address, whole.bytes) == (0, 15 * MIB)
    assert a.reserved_bytes == 20 * MIB
    with pytest.raises(ValueError, match="free already"):
        a.free(blocks[3]) or a.free(blocks[3])


def test_free_bytes_in_pieces_are_fragmentation():
    a = BestFitAllocator(40 * MIB)
    blocks = [a.allocate(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        a.free(block)
    with pytest.raises(OutOfMemory, match=f"no block of {10 * MIB} bytes, although {20 * MIB} bytes are free"):
        a.allocate(10 * MIB)
    a.free(blocks[1])
    assert a.allocate(10 * MIB).address == 0


def test_whole_segments_are_given_back_when_room_is_needed():
    a = BestFitAllocator(60 * MIB)
    first, second = a.allocate(30 * MIB), a.allocate(30 * MIB)
    a.free(first)
    assert a.reserved_bytes == 60 * MIB, "cached"
    with pytest.raises(OutOfMemory):
        a.allocate(31 * MIB)
    a.free(second)
    assert a.allocate(60 * MIB).bytes == 60 * MIB
    assert a.reserved_peak_bytes == 60 * MIB


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * MIB // KIB), st.integers(0, 1 << 30)), max_size=120))
def test_the_books_balance(steps):
    memory = 150 * MIB
    a, held = BestFitAllocator(memory), []
    for is_free, size, choice in steps:
        if is_free and held:
            a.free(held.pop(choice % len(held)))
        else:
            try:
                held.append(a.allocate(size * KIB if choice % 3 else size))
            except OutOfMemory:
                assert a.reserved_bytes > memory - 42 * MIB, "no new segment fits"
        check(a, held, memory)
    for block in held:
        a.free(block)
    check(a, [], memory)
    assert all(b.before is None and b.after is None for b in a._blocks.values()), "all merged"


def check(a, held, memory):
    pieces = sorted((b.segment, b.address, b.bytes) for b in [*held, *a._blocks.values()])
    for (segment, address, size), (next_segment, next_address, _) in pairwise(pieces):
        assert segment != next_segment or address + size == next_address, "the blocks of a segment tile it"
    assert sum(b.bytes for b in held) == a.allocated_bytes
    assert sum(size for _, _, size in pieces) == a.reserved_bytes <= memory
    assert sorted(a._free[False] + a._free[True]) == sorted(b.key for b in a._blocks.values())


# ---- replays ---------------------------------------------------------------------------------------------------------


def program() -> Builder:
    """a and b, 30 and 12 MiB, are made; b goes; c, 40 MiB, is made and goes; a is read again."""
    b = Builder()
    (first,) = b.call("f0", [], [30 * MIB], seconds=1.0)
    (second,) = b.call("f1", [], [12 * MIB], seconds=1.0)
    b.free(second)
    (third,) = b.call("f2", [], [40 * MIB], seconds=1.0)
    b.free(third)
    b.call("f3", [first], seconds=1.0)
    b.free(first)
    return b


def test_replay_moves_blocks_with_the_plan():
    problem = Problem.from_trace(program().trace(chunk_bytes=MIB, machine=Machine(1e9, 1e9)), 45 * MIB)
    plan = Plan((Out(0, 0, 30, 0),), (In(0, 0, 30, 2, 1, 3),))
    done = Replay(problem, plan, 52 * MIB)
    assert (done.failed_function, done.requested_bytes) == (-1, 0)
    assert done.allocator.allocated_peak_bytes == 42 * MIB, "the out is completed when c needs the room, not before"
    failed = Replay(problem, Plan(), 52 * MIB)
    assert (failed.failed_function, failed.requested_bytes) == (2, 40 * MIB)
    assert failed.free_bytes == 22 * MIB


def test_a_later_iteration_finds_the_memory_as_the_one_before_left_it():
    # a comes back into the segment of c, and has left it in two pieces when b is made again.
    problem = Problem.from_trace(program().trace(chunk_bytes=MIB, machine=Machine(1e9, 1e9)), 45 * MIB)
    plan = Plan((Out(0, 0, 30, 0),), (In(0, 0, 30, 2, 1, 3),))
    assert Replay(problem, plan, 45 * MIB, iterations=1).failed_function == -1
    failed = Replay(problem, plan, 45 * MIB)
    assert (failed.failed_function, failed.requested_bytes, failed.free_bytes) == (1, 12 * MIB, 15 * MIB)


def test_replay_keeps_weights_from_one_iteration_to_the_next():
    b = Builder()
    weight = b.entry(20 * MIB)
    b.call("f0", [], [10 * MIB], seconds=1.0)
    b.free(1)
    b.call("f1", [], writes=[weight], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=MIB), 100 * MIB)
    done = Replay(problem, Plan(), 30 * MIB)
    assert (done.failed_function, done.allocator.allocated_peak_bytes) == (-1, 30 * MIB)
    assert Replay(problem, Plan(), 29 * MIB).failed_function == 0
    # Away at the end of each iteration, and so at its start.
    plan = Plan((Out(weight, 0, 20, 1),), (In(weight, 0, 20, 0, 0, 1),))
    assert Replay(problem, plan, 20 * MIB).failed_function == -1


def test_replay_frees_what_an_earlier_iteration_brought_in():
    b = Builder()
    weight = b.entry(20 * MIB)
    b.call("f0", [weight], seconds=1.0)
    b.call("f1", [], [30 * MIB], seconds=1.0)
    b.free(1)
    b.call("f2", [weight], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=MIB), 30 * MIB)
    plan = Plan((Out(weight, 0, 20, 0),), (In(weight, 0, 20, 1, 1, 2),))
    assert Replay(problem, plan, 30 * MIB).failed_function == -1


def test_replay_completes_the_outs_that_an_in_waits_for():
    b = Builder()
    weight = b.entry(20 * MIB)
    for _ in range(3):
        b.call("f", [], seconds=1.0)
    b.call("use", [weight], seconds=1.0)
    problem = Problem.from_trace(b.trace(chunk_bytes=MIB), 100 * MIB)
    plan = Plan((Out(weight, 0, 20, 0),), (In(weight, 0, 20, 1, 1, 3),))
    state = Replay(problem, plan, 100 * MIB, iterations=1)
    assert list(state.blocks) == [weight], "it left and is back, though there was room all the time"
    assert state.allocator.allocated_bytes == 20 * MIB
