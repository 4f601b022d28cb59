"""The size of parts chosen with the plan: groups of functions, iterations rewritten, the limit predicted to be best."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from part_cases import CHUNK, Ranged, convolutions_then_linear, layers_in_parts, with_uses

from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.splitting.groups import Group, SplitLog
from swapd.splitting.part_sizes import DIVISORS, choose_part_bytes, limits
from swapd.splitting.resizing import FUNCTION_SECONDS, Divisible, divisible, resized
from swapd.trace.ranged import RangedTrace
from swapd.trace.trace import Machine, Trace

MIB = 1 << 20
CHUNK_OF_CHILD = 64 << 10


class CountingCore:
    def __init__(self) -> None:
        self.functions, self.asked = 0, 0

    def stats(self) -> dict[str, int | float]:
        self.asked += 1
        return {"functions": self.functions}


def test_the_log_says_which_functions_were_parts() -> None:
    core = CountingCore()
    log = SplitLog(core)
    core.functions = 7
    assert log.end_iteration(7) == () and core.asked == 0  # nothing was split: nothing is counted
    with log.split("aten::mm", "a", 100):
        core.functions += 3
    assert log.end_iteration(3) == ()  # when it began was not counted
    core.functions += 2
    with log.split("aten::mm", "a", 100):
        core.functions += 4
        with log.split("aten::copy_", "b", 50):  # in parts itself, and part of the other
            core.functions += 2
    core.functions += 1
    with log.split("aten::linear", "c", 60):
        core.functions += 5
    with log.split("aten::view", "", 60):
        pass
    with contextlib.suppress(ValueError), log.split("aten::add", "", 60):
        core.functions += 1
        raise ValueError
    assert log.end_iteration(15) == (Group("aten::mm", "a", 100, 2, 8), Group("aten::linear", "c", 60, 9, 14))
    assert log.end_iteration(0) == ()


def test_functions_of_other_threads_spoil_the_count() -> None:
    core = CountingCore()
    log = SplitLog(core)
    with log.split("aten::mm", "a", 100):
        pass
    log.end_iteration(0)
    with log.split("aten::mm", "a", 100):
        core.functions += 4
    assert log.end_iteration(3) == ()


def ranged(case: Ranged) -> RangedTrace:
    return RangedTrace(case.trace, case.first, case.count)


def layers(
    count: int, parts: int, weight: int = 24, result: int = 12, **more: object
) -> tuple[RangedTrace, list[Divisible]]:
    source = ranged(layers_in_parts(count, parts, weight, result, **more))  # type: ignore[arg-type]
    groups = [Group("aten::linear", str(i), 100, i * parts, (i + 1) * parts) for i in range(count)]
    found = [divisible(source, group) for group in groups]
    assert all(found)
    return source, [group for group in found if group is not None]


def uses_of(source: RangedTrace, function: int) -> list[tuple[int, int, int, int]]:
    trace = source.whole
    rows = range(int(trace.use_offsets[function]), int(trace.use_offsets[function + 1]))
    return [
        (int(trace.use_variables[r]), int(trace.use_flags[r]), int(source.first_chunk[r]), int(source.chunk_count[r]))
        for r in rows
    ]


def test_a_group_is_parts_with_what_is_fixed_and_what_moves() -> None:
    _, (first, second) = layers(2, 4)
    assert (second.first, second.parts, len(second.slots)) == (4, 4, 1)
    of_the_second = [(o.is_fixed, o.uses[1].variable, o.uses[1].first, o.uses[1].end) for o in second.slots[0].operands]
    assert of_the_second == [(True, 3, 0, 12), (False, 2, 6, 12), (False, 4, 3, 6)]
    # 12 fixed; of 24 and 12 a share
    assert [first.need_bytes(parts, CHUNK) // CHUNK for parts in (1, 2, 4, 5, 24)] == [48, 30, 21, 20, 14]
    assert first.parts_within(21 * CHUNK, CHUNK) == 4 and first.parts_within(21 * CHUNK - 1, CHUNK) == 5
    assert first.parts_within(12 * CHUNK, CHUNK) is None


def test_parts_are_merged_and_cut() -> None:
    source, (first, second) = layers(2, 4)
    found = resized(source, [(first, 2), (second, 6)])
    assert found.whole.functions == 8
    assert uses_of(found, 0) == [(0, 1, 0, 12), (1, 1, 0, 12), (3, 2, 0, 6)]
    assert uses_of(found, 1) == [(0, 1, 0, 12), (1, 1, 12, 12), (3, 2, 6, 6)]
    assert [uses_of(found, f)[1][2:] for f in range(2, 8)] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 4)]
    assert found.whole.born.tolist() == [-1, -1, -1, 0, 2]
    assert found.whole.died.tolist() == [8, 8, 8, 7, 7]


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_the_same_number_of_parts_changes_nothing(parts: int) -> None:
    source, groups = layers(3, parts, training=True)
    found = resized(source, [(group, parts) for group in groups])
    assert found.whole.function_start == pytest.approx(source.whole.function_start)
    assert Trace(**{**vars(found.whole), "function_start": source.whole.function_start}) == source.whole
    assert np.array_equal(found.first_chunk, source.first_chunk)
    assert np.array_equal(found.chunk_count, source.chunk_count)


def steps(
    parts: int, sizes: list[int], seconds: list[float], descending: bool = False, late: bool = False
) -> Ranged:
    """A group of two functions a part: one makes a temporary from a range of x, the other a range of y from it.

    `late`: a temporary is freed when the next one has been made, as a loop in Python does it.
    """
    n = 2 * parts + 1
    x, y, before = 0, 1, 2
    rows: list[list[tuple[int, int, int, int]]] = [[(before, 2, 0, 1)]]
    total = 6 * parts
    for part in range(parts):
        at = 6 * (parts - 1 - part if descending else part)
        temporary = 3 + part
        rows.append([(x, 1, at, 6), (temporary, 2, 0, -(-sizes[part] // CHUNK))])
        rows.append([(temporary, 1, 0, -(-sizes[part] // CHUNK)), (before, 1, 0, 1), (y, 2, at, 6)])
    whole = Trace(
        function_names=("begin", *("gather", "compute") * parts),
        function_start=np.cumsum(seconds) - np.array(seconds),
        function_seconds=seconds,
        variable_bytes=[total * CHUNK, total * CHUNK, CHUNK, *sizes],
        born=[-1, 2, 0, *(1 + 2 * part for part in range(parts))],
        died=[n, n - 1, n - 1, *(min(2 + 2 * part + late, n - 1) for part in range(parts))],
        previous=[0, -1, -1, *[-1] * parts],
        use_offsets=[0] * (n + 1),
        use_variables=[],
        use_flags=[],
        chunk_bytes=CHUNK,
        machine=Machine(1e6, 1e6),
    )
    return with_uses(whole, rows)


@pytest.mark.parametrize("seed", range(60))
def test_rewriting_keeps_bytes_time_and_lives(seed: int) -> None:
    r = random.Random(seed)
    parts, wanted = r.randint(2, 9), r.randint(1, 30)
    sizes = [r.randint(1, 900) for _ in range(parts)]
    seconds = [1e-3 * r.randint(1, 9) for _ in range(2 * parts + 1)]
    late = seed % 3 == 0
    source = ranged(steps(parts, sizes, seconds, descending=seed % 2 == 1, late=late))
    group = divisible(source, Group("aten::conv", "", 100, 1, 2 * parts + 1))
    assert group is not None and group.parts == parts and len(group.slots) == 2
    found = resized(source, [(group, wanted)])
    trace = found.whole
    assert trace.function_names == ("begin", *("gather", "compute") * wanted)
    for variable, offset in ((0, 1), (1, 2)):  # the same chunks in all, each function some, in the same direction
        pieces = [uses_of(found, f)[0 if variable == 0 else 2] for f in range(offset, trace.functions, 2)]
        assert {piece[0] for piece in pieces} == {variable}
        covered = {chunk for _, _, first, count in pieces for chunk in range(first, first + count)}
        assert covered == set(range(6 * parts))
        assert max(count for *_, count in pieces) <= -(-6 * parts // wanted) + 6
        order = [first for _, _, first, _ in pieces]
        if wanted <= parts:
            assert order == sorted(order, reverse=seed % 2 == 1)
    temporaries = [v for v in range(trace.variables) if v >= 3]
    assert len(temporaries) == wanted
    assert sum(sizes) <= int(trace.variable_bytes[3:].sum()) <= sum(sizes) + wanted
    for v in temporaries:
        assert trace.died[v] == min(trace.born[v] + 1 + late, trace.functions - 1)
        assert trace.function_names[trace.born[v]] == "gather"
    assert trace.born.tolist()[:3] == [-1, 2, 0] and trace.died.tolist()[:3] == [2 * wanted + 1, 2 * wanted, 2 * wanted]
    extra = 2 * (wanted - parts) * FUNCTION_SECONDS
    assert trace.function_seconds.sum() == pytest.approx(sum(seconds) + extra)
    assert trace.function_start == pytest.approx(np.cumsum(trace.function_seconds) - trace.function_seconds)
    found.cut()  # is a trace


def test_a_temporary_that_is_freed_late_counts_beside_the_next() -> None:
    found = [
        divisible(ranged(steps(4, [400] * 4, [1e-3] * 9, late=late)), Group("aten::conv", "", 100, 1, 9))
        for late in (False, True)
    ]
    # x and a temporary; or y, a temporary and one chunk more: 6 + 4, 6 + 4 + 1; and with two temporaries 6 + 8
    assert [group.need_bytes(4, CHUNK) // CHUNK for group in found if group] == [11, 14]
    case = steps(6, [400] * 6, [1e-3] * 13)
    much_later = [13, 12, 12, *(min(2 * part + 5, 13) for part in range(6))]
    trace = Trace(**{**vars(case.trace), "died": much_later})
    assert divisible(RangedTrace(trace, case.first, case.count), Group("aten::conv", "", 100, 1, 13)) is None


def changed(case: Ranged, function: int, rows: list[tuple[int, int, int, int]]) -> RangedTrace:
    """The iteration with other uses of one function."""
    source = ranged(case)
    return ranged(
        with_uses(case.trace, [rows if f == function else uses_of(source, f) for f in range(case.trace.functions)])
    )


def test_what_does_not_repeat_stays_as_it_is() -> None:
    case = steps(3, [200, 200, 200], [1e-3] * 7)
    group = Group("aten::conv", "", 100, 1, 7)
    assert divisible(ranged(case), group) is not None
    assert divisible(ranged(case), group._replace(stop=6)) is None  # the last part lacks a function
    assert divisible(ranged(case), group._replace(stop=3)) is None  # one part says nothing of others
    assert divisible(ranged(case), group._replace(first=6, stop=9)) is None
    assert divisible(changed(case, 3, [(0, 1, 6, 6), (4, 2, 0, 2), (2, 1, 0, 1)]), group) is None  # one operand more
    assert divisible(changed(case, 3, [(0, 3, 6, 6), (4, 2, 0, 2)]), group) is None  # written, and not in other parts
    assert divisible(changed(case, 3, [(1, 1, 6, 6), (4, 2, 0, 2)]), group) is None  # another variable
    assert divisible(changed(case, 3, [(0, 1, 6, 2), (0, 1, 10, 2), (4, 2, 0, 2)]), group) is None  # two runs
    assert divisible(changed(case, 3, [(0, 1, 6, 3), (0, 1, 9, 3), (4, 2, 0, 2)]), group) is not None  # one, told twice


def test_limits_are_shares_of_what_is_free() -> None:
    assert limits(64 * MIB, 4 * MIB, MIB) == [60 * MIB // divisor for divisor in DIVISORS]
    assert limits(8 * MIB, 0, MIB) == [4 * MIB, 8 * MIB // 3, 2 * MIB]  # a part has two chunks at least


def after_convolutions(parts: int = 7, weight: int = 192, budget: int = 64) -> tuple[RangedTrace, Group, int]:
    """A weight of three times the budget behind 20 ms of convolutions; reading all of it takes 200 ms."""
    case, (first, stop) = convolutions_then_linear(parts, weight, 0.1, 0.02, MIB, Machine(1e9, 1e9, 2e-5))
    return ranged(case), Group("aten::linear", "", budget * MIB // 2, first, stop), budget * MIB


def test_smaller_parts_are_chosen_where_the_link_would_stand_still() -> None:
    """With halves, the link waits while the first part computes, as both halves are taken; and a rest of the weight
    that could stay on the device does not, as it is no whole part."""
    source, group, budget = after_convolutions()
    choice = choose_part_bytes(source, [group], budget)
    assert choice is not None
    rule = budget // 2
    assert choice.part_bytes < rule
    assert choice.seconds < 0.9 * dict(choice.predicted)[rule]
    # That is what the daemon will predict of the iteration that it chooses.
    made = divisible(source, group)
    assert made is not None
    parts = made.parts_within(choice.part_bytes, MIB)
    assert parts is not None
    problem = Problem.from_trace(resized(source, [(made, parts)]).cut(), budget)
    assert make_plan(problem).predicted_seconds == choice.seconds


def test_large_parts_are_chosen_where_nothing_is_gained() -> None:
    """Much computation, little to move: every part costs a function."""
    case = layers_in_parts(3, 6, 128, 8, 1 << 16, seconds=5e-3, machine=Machine(1e9, 1e9, 2e-5))
    groups = [Group("aten::linear", str(i), 28 << 16, 6 * i, 6 * i + 6) for i in range(3)]
    choice = choose_part_bytes(ranged(case), groups, 56 << 16)
    assert choice is not None and choice.part_bytes == 28 << 16


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_never_predicted_to_be_worse_than_half_of_the_budget(seed: int) -> None:
    r = random.Random(seed)
    budget = r.randint(24, 64)
    rate, parts = r.choice([3e8, 1e9, 3e9]), r.randint(6, 12)
    if seed % 2:
        case, (first, stop) = convolutions_then_linear(
            parts, r.randint(2, 4) * budget, r.uniform(0.02, 0.3), r.uniform(0.0, 0.2), MIB, Machine(rate, rate, 2e-5)
        )
        groups = [Group("aten::linear", "", budget * MIB // 2, first, stop)]
    else:
        count = r.randint(1, 4)
        case = layers_in_parts(
            count, parts, r.randint(2, 3) * budget, r.randint(2, 6), MIB, r.uniform(1e-3, 2e-2),
            Machine(rate, rate, 2e-5), training=r.random() < 0.5,
        )  # fmt: skip
        groups = [Group("aten::linear", str(i), budget * MIB // 2, parts * i, parts * (i + 1)) for i in range(count)]
    choice = choose_part_bytes(ranged(case), groups, budget * MIB)
    assert choice is not None
    predicted = dict(choice.predicted)
    assert choice.seconds == predicted[choice.part_bytes] <= predicted[budget * MIB // 2]
    assert choice == choose_part_bytes(ranged(case), groups, budget * MIB)


def test_all_tried_limits_count() -> None:
    source, group, budget = after_convolutions()
    choice = choose_part_bytes(source, [group], budget, "idle")
    assert choice is not None
    assert [limit for limit, _ in choice.predicted] == limits(budget, 0, MIB)
    assert len({seconds for _, seconds in choice.predicted}) > 3


def test_a_limit_below_what_every_part_needs_is_not_tried() -> None:
    case = layers_in_parts(2, 6, 128, 14, MIB, seconds=5e-3, machine=Machine(1e9, 1e9, 2e-5))
    groups = [Group("aten::linear", str(i), 24 * MIB, 6 * i, 6 * i + 6) for i in range(2)]
    choice = choose_part_bytes(ranged(case), groups, 48 * MIB)
    assert choice is not None
    assert [limit for limit, _ in choice.predicted] == [24 * MIB, 16 * MIB]  # 14 chunks are fixed, and two move


def test_nothing_is_chosen_where_there_is_no_choice() -> None:
    case = layers_in_parts(2, 6, 128, 14, MIB, seconds=5e-3, machine=Machine(1e9, 1e9, 2e-5))
    groups = [Group("aten::linear", str(i), 16 * MIB, 6 * i, 6 * i + 6) for i in range(2)]
    assert choose_part_bytes(ranged(case), groups, 40 * MIB) is None  # 14 chunks are fixed: a third is too little


def test_nothing_is_chosen_where_nothing_can_be_divided() -> None:
    source, group, budget = after_convolutions()
    assert choose_part_bytes(source, [], budget) is None
    assert choose_part_bytes(source, [group._replace(stop=group.first + 1)], budget) is None
    counts = Counter(source.whole.function_names)
    assert counts["linear"] == 7


def test_an_iteration_that_is_too_long_is_left_as_it_is() -> None:
    case = layers_in_parts(700, 4, 40, 2, MIB, seconds=1e-3, machine=Machine(1e9, 1e9))
    groups = [Group("aten::linear", str(i), 16 * MIB, 4 * i, 4 * i + 4) for i in range(700)]
    assert choose_part_bytes(ranged(case), groups, 32 * MIB) is None


def test_a_program_runs_in_the_parts_that_were_chosen() -> None:
    """On the emulated device, with a slow link: what is predicted, not what is measured."""
    child = Path(__file__).with_name("part_sizes_child.py")
    environment = {**os.environ, "OOC_EMULATED_BANDWIDTH": "200MB/s"}
    done = subprocess.run(
        [sys.executable, str(child)], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == 0 and found["peak"] <= 4 * MIB
    predicted = dict(found["predicted"])
    rule, chosen = 2 * MIB, found["chosen"]
    assert chosen < rule and predicted[chosen] < predicted[rule] == max(predicted.values())
    # Halves until it is chosen, and what was chosen from then on; the plans are for that.
    first, last = found["sizes"][0], found["sizes"][-1]
    changed_at = found["sizes"].index(last)
    assert found["sizes"] == [first] * changed_at + [last] * (9 - changed_at) and 1 < changed_at <= 3
    assert rule - 2 * CHUNK_OF_CHILD <= first < rule and chosen - 2 * CHUNK_OF_CHILD < last < chosen
    assert all(found["planned"][changed_at + 1 :]) and found["divergences"] <= 1
