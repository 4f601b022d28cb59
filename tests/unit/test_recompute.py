"""Recomputation: which drops a trace allows, and that a program which drops computes what it did."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_traces import Builder, random_trace

from benchmarks.planning.validator import validate
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.recompute import operators
from swapd.recompute.candidates import Candidate, Drop, find_candidates
from swapd.recompute.history import History
from swapd.recompute.operators import Role, role
from swapd.recompute.rewriting import Linger, Rewritten, rewrite
from swapd.trace.trace import READ, WRITE, Trace

NORM, GELU, BATCH_NORM = "aten::native_layer_norm", "aten::gelu", "aten::native_batch_norm"


def candidates(trace: Trace, **options: bool) -> dict[tuple[int, int], Candidate]:
    """By variable and the function that needs it again."""
    return {(c.drop.variable, c.before): c for c in find_candidates(History(trace, **options))}


# ---- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NORM, Role.MAKER),
        ("aten::add.Tensor", Role.MAKER),
        ("aten::add_.Tensor", Role.LINK),
        ("aten::relu_", Role.LINK),
        (BATCH_NORM, Role.STATISTICS),
        ("aten::native_dropout", Role.NEVER),
        ("aten::empty.memory_format", Role.NEVER),
        ("aten::add.out", Role.NEVER),  # writes its result where an argument says
        ("aten::mean.dtype_out", Role.NEVER),
        ("aten::nobody_knows_it", Role.NEVER),
        ("custom::gelu", Role.NEVER),
        ("gelu", Role.NEVER),
    ],
)
def test_roles(name: str, expected: Role) -> None:
    assert role(name) is expected


def test_each_operator_has_one_role_and_each_group_a_reason() -> None:
    count = Counter(name for group in operators.GROUPS for name in group.names)
    assert max(count.values()) == 1
    assert all(len(group.reason) > 20 for group in operators.GROUPS)
    assert operators.reason("aten::native_dropout").startswith("it takes numbers from a random generator")
    assert "nobody" in operators.reason("aten::nobody_knows_it")


# ---- candidates ------------------------------------------------------------------------------------------------------


def forward_and_back(name: str = NORM, **between: bool) -> tuple[Trace, int]:
    """x -> name -> y, some time, then y and x are used. Returns the trace and y."""
    b = Builder()
    x = b.entry(100)
    (y,) = b.call(name, [x], [100], seconds=2.0)
    b.call("first", [y], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    if between.get("written"):
        b.call("aten::mul_.Tensor", [x], writes=[x], seconds=1.0)
    if between.get("read"):
        b.call("look", [y], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    b.call("last", [y], seconds=1.0)
    b.free(y)
    return b.trace(chunk_bytes=100), y


def test_a_layer_norm_beside_its_input_is_a_candidate() -> None:
    trace, y = forward_and_back()
    assert find_candidates(History(trace)) == [Candidate(Drop(y, 1), 4, (0,), 2.0, 100)]


def test_an_input_that_was_written_in_between_does_not_do() -> None:
    trace, _ = forward_and_back(written=True)
    assert find_candidates(History(trace)) == []


def test_a_use_in_between_makes_two_gaps_of_one() -> None:
    trace, y = forward_and_back(read=True)
    assert set(candidates(trace)) == {(y, 3), (y, 5)}


@pytest.mark.parametrize("name", ["aten::native_dropout", "aten::rand", "aten::scatter_add", "unknown", "gelu"])
def test_what_may_not_run_again_is_no_candidate(name: str) -> None:
    assert find_candidates(History(forward_and_back(name)[0])) == []


def test_statistics_are_not_updated_twice() -> None:
    trace, y = forward_and_back(BATCH_NORM)
    assert candidates(trace) == {}
    assert set(candidates(trace, without_statistics=True)) == {(y, 4)}


def test_a_normalisation_by_batch_does_not_write_its_input_whatever_the_trace_says() -> None:
    b = Builder()
    image = b.entry(300)
    (x,) = b.call("aten::convolution", [image], [100])
    statistics = b.entry(8)
    (y,) = b.call(BATCH_NORM, [x, statistics], [100], writes=[x, statistics])
    b.call("first", [y])
    b.call("between", [])
    b.call("backward", [y])
    b.call("backward", [x])
    b.free(x, y)
    trace = b.trace(chunk_bytes=100)
    assert candidates(trace)[x, 5].functions == (0,)
    assert (y, 4) not in candidates(trace, without_statistics=True), "the statistics it would read have changed"


def test_small_limits() -> None:
    trace, _ = forward_and_back()
    history = History(trace)
    assert find_candidates(history, least_bytes=101) == []
    over = np.array([True, True, False, False, True])
    assert find_candidates(history, during=over) == []
    assert len(find_candidates(history, during=np.array([False, False, False, True, False]))) == 1


def in_place_chain() -> tuple[Trace, int]:
    b = Builder()
    x = b.entry(100)
    bias = b.entry(100)
    (y,) = b.call(NORM, [x], [100], seconds=2.0)
    b.call("aten::relu_", [y], writes=[y], seconds=1.0)
    b.call("look", [y], seconds=1.0)
    b.call("aten::add_.Tensor", [y, bias], writes=[y], seconds=0.5)
    b.call("middle", [], seconds=1.0)
    b.call("last", [y], seconds=1.0)
    b.free(y)
    return b.trace(chunk_bytes=100), y


def test_a_chain_in_place_runs_again_as_a_whole() -> None:
    trace, y = in_place_chain()
    assert candidates(trace)[y, 5] == Candidate(Drop(y, 3), 5, (0, 1, 3), 3.5, 100)
    result = rewrite(History(trace), [Drop(y, 3)])
    assert result.function.tolist() == [0, 1, 2, 3, 4, 0, 1, 3, 5]
    assert replays_the_same(trace, result)


def test_links_do_not_run_first_and_unknown_ones_not_at_all() -> None:
    trace, y = in_place_chain()
    names = list(trace.function_names)
    names[1] = "aten::bernoulli_.float"
    assert (y, 5) not in candidates(replace(trace, function_names=tuple(names)))


def chain_of_two() -> tuple[Trace, int, int]:
    """conv -> norm -> gelu, where the norm's result is gone early and the gelu's is needed late."""
    b = Builder()
    x = b.entry(100)
    (y,) = b.call(NORM, [x], [200], seconds=2.0)
    (z,) = b.call(GELU, [y], [100], seconds=1.0)
    b.free(y)
    b.call("first", [z], seconds=1.0)
    b.call("middle", [], [500], seconds=1.0)
    b.free(4 - 1)
    b.call("last", [z], seconds=1.0)
    b.free(z)
    return b.trace(chunk_bytes=100), y, z


def test_what_is_gone_is_made_again_as_a_workspace() -> None:
    trace, y, z = chain_of_two()
    assert candidates(trace) == {(z, 4): Candidate(Drop(z, 2), 4, (0, 1), 3.0, 100)}
    result = rewrite(History(trace), [Drop(z, 2)])
    new = result.trace
    assert new.function_names == (NORM, GELU, "first", "middle", NORM, GELU, "last")
    assert result.repeated.tolist() == [False] * 4 + [True] * 2 + [False]
    assert result.repeated_seconds == 3.0
    assert result.variable.tolist() == [0, y, z, 3, y, z]
    assert list(zip(new.born.tolist(), new.died.tolist())) == [(-1, 7), (0, 1), (1, 2), (3, 3), (4, 5), (5, 6)]
    assert trace.live_bytes.tolist() == [300, 400, 200, 700, 200]
    assert new.live_bytes.tolist() == [300, 400, 200, 600, 300, 400, 200]
    assert new.function_start.tolist() == [0, 2, 3, 4, 5, 7, 8]
    assert replays_the_same(trace, result)


def test_the_functions_for_one_drop_may_not_be_many() -> None:
    trace, _, _ = chain_of_two()
    assert find_candidates(History(trace), most_functions=1) == []
    assert len(find_candidates(History(trace), most_functions=2)) == 1


def test_other_results_of_a_repeated_function_are_workspaces_or_come_back_too() -> None:
    b = Builder()
    x = b.entry(100)
    y, index = b.call("aten::max_pool2d_with_indices", [x], [100, 300], seconds=1.0)
    b.call("first", [y, index], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    b.call("late", [y], seconds=1.0)
    b.call("later", [index], seconds=1.0)
    b.free(y, index)
    trace = b.trace(chunk_bytes=100)
    one = rewrite(History(trace), [Drop(y, 1)])
    assert one.variable.tolist() == [x, y, index, y, index]
    assert (one.trace.born[4], one.trace.died[4]) == (3, 3)
    assert one.trace.live_bytes.tolist() == [500, 500, 400, 800, 500, 500]
    both = rewrite(History(trace), [Drop(y, 1), Drop(index, 1)])
    assert both.function.tolist() == [0, 1, 2, 0, 3, 4]
    assert both.trace.died.tolist() == [6, 1, 1, 5, 5]
    assert replays_the_same(trace, one) and replays_the_same(trace, both)


def one_of_the_other(in_place: bool) -> tuple[Trace, int, int]:
    """x -> y -> z; later z is needed, and then y. Returns the trace, y and z."""
    b = Builder()
    x = b.entry(100)
    (y,) = b.call(NORM, [x], [100], seconds=1.0)
    if in_place:
        b.call("aten::relu_", [y], writes=[y], seconds=1.0)
    (z,) = b.call(GELU, [y], [100], seconds=1.0)
    b.call("first", [z], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    b.call("needs z", [z], seconds=1.0)
    b.call("needs y", [y], seconds=1.0)
    b.free(y, z)
    return b.trace(chunk_bytes=100), y, z


def test_an_input_that_was_dropped_too_comes_back_first_and_stays() -> None:
    trace, y, z = one_of_the_other(in_place=False)
    result = rewrite(History(trace), [Drop(z, 2), Drop(y, 1)])
    assert result.function.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert result.trace.live_bytes.tolist() == [200, 300, 200, 100, 200, 300, 300, 300]
    assert replays_the_same(trace, result)


def test_an_input_whose_drop_is_fleeting_is_a_workspace_and_comes_back_once_more() -> None:
    trace, y, z = one_of_the_other(in_place=True)
    result = rewrite(History(trace), [Drop(z, 3), Drop(y, 2, fleeting=True)])
    assert result.function.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6]
    assert result.trace.live_bytes.tolist() == [200, 200, 300, 200, 100, 200, 200, 300, 200, 300, 300, 300]
    assert replays_the_same(trace, result)
    # What the function itself needs stays.
    alone = rewrite(History(trace), [Drop(y, 2, fleeting=True)])
    assert alone.function.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6] and replays_the_same(trace, alone)
    with pytest.raises(ValueError, match="dropped twice"):
        rewrite(History(trace), [Drop(y, 2), Drop(y, 2, fleeting=True)])


def concatenated() -> tuple[Trace, list[int], list[int]]:
    """Two layers of 100 bytes that take 2 s each, one behind the other as long as both are there, needed late again."""
    b = Builder()
    x = b.entry(100)
    (one,) = b.call("aten::mm", [x], [100], seconds=2.0)
    (first,) = b.call("aten::cat", [x, one], [200], seconds=1.0)
    (two,) = b.call("aten::mm", [first], [100], seconds=2.0)
    (both,) = b.call("aten::cat", [x, one, two], [300], seconds=1.0)
    b.free(one, two)
    b.call("look", [both], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    b.call("needs both", [both], seconds=1.0)
    b.call("needs first", [first], seconds=1.0)
    b.call("end", [x], seconds=1.0)
    b.free(first, both)
    return b.trace(chunk_bytes=100), [one, two], [first, both]


def test_what_lingers_ends_after_what_is_made_again_from_it() -> None:
    trace, (one, two), (first, both) = concatenated()
    drops = [Drop(first, 2), Drop(both, 4)]
    lost = rewrite(History(trace), drops)
    assert lost.function.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 8] and lost.lingers == ()
    history = History(trace, linger_rate=100.0)
    assert [c.functions for c in find_candidates(history) if c.drop in drops] == [(1,), (3,)]
    found = rewrite(history, drops)
    assert found.function.tolist() == [0, 1, 2, 3, 4, 5, 3, 6, 1, 7, 8]
    assert found.lingers == (Linger(one, 7), Linger(two, 6))
    assert found.trace.died[[one, two, first, both]].tolist() == [8, 6, 2, 4]
    assert found.trace.live_bytes.tolist() == [200, 400, 500, 600, 600, 300, 600, 500, 700, 600, 600]
    assert replays_the_same(trace, lost) and replays_the_same(trace, found)


@pytest.mark.parametrize(("rate", "lingers"), [(24.0, []), (26.0, [1]), (51.0, [1, 3]), (1e15, [1, 2, 3])])
def test_what_lingers_is_faster_to_copy_than_to_make_for_each_reader(rate: float, lingers: list[int]) -> None:
    """The first layer is read twice: 4 s for 100 bytes. Nothing that may run again reads the last one."""
    trace, (one, two), _ = concatenated()
    assert sorted(History(trace, linger_rate=rate).may_linger) == lingers and [one, two] == [1, 3]


def test_what_cannot_be_made_again_may_linger() -> None:
    b = Builder()
    x = b.entry(100)
    (noise,) = b.call("aten::native_dropout", [x], [100])
    (y,) = b.call(GELU, [noise], [100], seconds=1.0)
    b.free(noise)
    b.call("look", [y], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    b.call("last", [y], seconds=1.0)
    b.free(y)
    trace = b.trace(chunk_bytes=100)
    assert find_candidates(History(trace)) == []
    history = History(trace, linger_rate=1.0)
    assert [c.drop for c in find_candidates(history)] == [Drop(y, 2)] and history.may_linger == {noise}
    result = rewrite(history, [Drop(y, 2)])
    assert result.function.tolist() == [0, 1, 2, 3, 1, 4] and result.lingers == (Linger(noise, 4),)
    assert replays_the_same(trace, result)


def test_only_the_last_bytes_of_a_variable_linger() -> None:
    """What it held before it was written in place is made again."""
    b = Builder()
    x = b.entry(100)
    (y,) = b.call(NORM, [x], [100], seconds=2.0)
    (before,) = b.call(GELU, [y], [100], seconds=1.0)
    b.call("aten::relu_", [y], writes=[y], seconds=1.0)
    (after,) = b.call(GELU, [y], [100], seconds=1.0)
    b.free(y)
    b.call("look", [before, after], seconds=1.0)
    b.call("middle", [], seconds=1.0)
    b.call("last", [before], seconds=1.0)
    b.call("last", [after], seconds=1.0)
    b.free(before, after)
    trace = b.trace(chunk_bytes=100)
    result = rewrite(History(trace, linger_rate=1e9), [Drop(before, 4), Drop(after, 4)])
    assert result.function.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 3, 7]
    assert result.lingers == (Linger(y, 7),)
    assert replays_the_same(trace, result)


def test_bytes_of_earlier_iterations_and_parts_are_left_alone() -> None:
    trace, _ = forward_and_back()
    assert all(c.drop.variable != 0 for c in find_candidates(History(trace)))
    parts = replace(
        trace,
        variable_bytes=np.array([100, 100]),
        part_of=np.array([0, 1], np.int32),
        part_first_chunk=np.array([0, 1], np.int32),
    )
    assert find_candidates(History(parts)) == []
    whole = replace(parts, part_first_chunk=np.array([0, 0], np.int32))
    result = rewrite(History(whole), [c.drop for c in find_candidates(History(whole))])
    assert result.trace.part_of is not None and result.trace.part_of.tolist() == [0, 1, 2]


def test_what_survives_survives_under_its_last_number() -> None:
    b = Builder()
    old = b.entry(100, survives=False)
    x = b.entry(100)
    b.call("reads", [old])
    b.free(old)
    (y,) = b.call(NORM, [x], [100])
    b.call("first", [y])
    b.call("middle", [])
    b.call("last", [y])
    b.previous[old] = y
    trace = b.trace(chunk_bytes=100)
    result = rewrite(History(trace), [Drop(y, 2)])
    assert result.trace.previous[old] == 3 and result.trace.died[3] == result.trace.functions
    assert result.trace.died[y] == 2


@pytest.mark.parametrize("drop", [Drop(1, 0), Drop(1, 4), Drop(0, 1), Drop(9, 1), Drop(-1, 0)])
def test_drops_that_are_not_possible_are_refused(drop: Drop) -> None:
    trace, _ = forward_and_back("aten::native_dropout")
    with pytest.raises(ValueError, match=r"not between two uses|cannot be made again"):
        rewrite(History(trace), [drop])


# ---- what a program computes -----------------------------------------------------------------------------------------


def replay(trace: Trace, origin: list[int], stored: list[int]) -> tuple[list[list[object]], dict[int, object]]:
    """What every function reads, and what survives, if each computes a name for what it read.

    A function that is run again gives the same name for the same inputs. One that may not run again gives another.
    """
    n = trace.functions
    values: dict[int, object] = {v: ("entry", v) for v in range(trace.variables) if trace.born[v] == -1}
    runs: Counter[int] = Counter()
    read: list[list[object]] = []
    for f in range(n):
        uses = [
            (int(trace.use_variables[row]), int(trace.use_flags[row])) for row in range(*trace.use_offsets[f : f + 2])
        ]
        made = [v for v in range(trace.variables) if trace.born[v] == f]
        inputs = [values[v] for v, flag in uses if flag & READ and v not in made]
        read.append([values[v] for v, _ in uses if v not in made])
        runs[origin[f]] += 1
        often = runs[origin[f]] if role(trace.function_names[f]) is Role.NEVER else 0
        result = (origin[f], often, tuple(inputs))
        changed = {v: hash((result, stored[v], values[v])) for v, flag in uses if flag & WRITE and v not in made}
        values.update(changed)
        values.update({v: hash((result, stored[v])) for v in made})
        for v in np.flatnonzero(trace.died == f).tolist():
            values.pop(v, None)
    return read, {v: value for v, value in values.items() if trace.died[v] == n}


def replays_the_same(trace: Trace, result: Rewritten) -> bool:
    expected, survives = replay(trace, list(range(trace.functions)), list(range(trace.variables)))
    found, left = replay(result.trace, result.function.tolist(), result.variable.tolist())
    originals = [row for row, again in zip(found, result.repeated) if not again]
    kept = {int(result.variable[v]): value for v, value in left.items()}
    return originals == expected and kept == survives and len(kept) == len(left)


MAKERS = ["aten::gelu", "aten::add.Tensor", "aten::mm", "aten::max_pool2d_with_indices"]
LINKS = ["aten::relu_", "aten::add_.Tensor", "aten::mul_.Tensor"]


def program(r: random.Random) -> Trace:
    """Makers, links, and some functions that may not run again; variables die early or late, some survive."""
    b = Builder()
    alive = [b.entry(r.randint(1, 300), survives=r.random() < 0.6) for _ in range(r.randint(1, 3))]
    entries = list(alive)
    for _ in range(r.randint(3, 30)):
        used = r.sample(alive, min(len(alive), r.randint(0, 3)))
        kind = r.random()
        if kind < 0.55:
            alive += b.call(
                r.choice(MAKERS), used, [r.randint(1, 300) for _ in range(r.choice([1, 1, 1, 2]))], seconds=1.0
            )
        elif kind < 0.75 and used:
            b.call(r.choice(LINKS), used if r.random() < 0.8 else used[1:], writes=used[:1], seconds=1.0)
        elif kind < 0.85 and used:  # writes two, or writes and makes
            alive += b.call("aten::add_.Tensor", used, [50] * r.randint(0, 1), writes=used[:2], seconds=1.0)
        else:
            alive += b.call(r.choice(["aten::native_dropout", "other"]), used, [100] * r.randint(0, 1), seconds=1.0)
        for v in [v for v in alive if b.previous[v] < 0 and r.random() < 0.15]:
            if v not in entries or any(v in row for row in b.uses):
                alive.remove(v)
                b.free(v)
    strangers = [v for v in entries if b.previous[v] < 0]
    for v in strangers:
        survivors = [u for u in alive if u not in entries and u not in b.previous]
        if survivors and b.died[v] != -2:
            b.previous[v] = survivors[0]
            b.sizes[v] = b.sizes[survivors[0]]
    return b.trace(chunk_bytes=100)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.2, 0.5, 1.0]))
def test_a_program_that_drops_computes_the_same(seed: int, share: float) -> None:
    r = random.Random(seed)
    trace = program(r)
    history = History(trace, linger_rate=r.choice([None, 50.0, 1e9]))
    found = find_candidates(history, most_functions=r.choice([2, 8, 100]), final=True)
    chosen = [c.drop for c in found if not c.final and r.random() < share]
    drops = [drop._replace(fleeting=r.random() < 0.3) for drop in chosen]
    final = [c for c in found if c.final and r.random() < 0.7]
    result = rewrite(history, drops, final)
    assert set(result.final) <= set(final)
    assert result.trace.variable_bytes.tolist() == trace.variable_bytes[result.variable].tolist()
    assert replays_the_same(trace, result)
    originals = result.function[~result.repeated]
    assert originals.tolist() == list(range(trace.functions))
    assert result.trace.function_seconds.sum() == pytest.approx(trace.function_seconds.sum() + result.repeated_seconds)
    again = rewrite(history, reversed(drops), reversed(final))
    assert again.trace == result.trace
    for c in result.final:
        after = np.flatnonzero(~result.repeated)[c.drop.after]
        assert after in result.trace.died[result.variable == c.drop.variable]


def test_random_programs_have_candidates_of_all_kinds() -> None:
    """Otherwise the test above shows nothing."""
    lengths: Counter[int] = Counter()
    together = lingering = over = needed = 0
    for seed in range(100):
        history = History(program(random.Random(seed)))
        found = find_candidates(history)
        lengths.update(len(c.functions) for c in found)
        result = rewrite(history, [c.drop for c in found])
        together += int(result.repeated.sum()) != sum(len(c.functions) for c in found)
        final = [c for c in find_candidates(history, final=True) if c.final]
        carried_out = rewrite(history, [c.drop for c in found], final).final
        over, needed = over + len(carried_out), needed + len(final) - len(carried_out)
        history = History(history.trace, linger_rate=1e9)
        lingering += len(rewrite(history, [c.drop for c in find_candidates(history)]).lingers)
    assert lengths[1] > 100 and lengths[2] > 30 and sum(lengths[k] for k in range(3, 9)) > 20
    assert together > 20 and lingering > 20 and over > 20 and needed > 5


def test_nothing_dropped_changes_nothing() -> None:
    for seed in range(20):
        trace = random_trace(seed)
        assert replace(rewrite(History(trace), []).trace, fingerprint=trace.fingerprint) == trace


def test_swapping_of_rewritten_traces_is_planned_as_of_any() -> None:
    planned = 0
    for seed in range(40):
        history = History(program(random.Random(seed)))
        result = rewrite(history, [c.drop for c in find_candidates(history)])
        problem = Problem.from_trace(result.trace, 0)
        problem = Problem.from_trace(result.trace, problem.min_budget_bytes)
        planned += not problem.fits
        assert validate(problem, make_plan(problem, "idle")) == []
    assert planned > 10
