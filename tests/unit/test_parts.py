"""Variables used in ranges as parts: what `cut` makes of a recorded iteration, and plans mapped back to it."""

from __future__ import annotations

import numpy as np
import pytest
from part_cases import CHUNK, Ranged, cut, layers_in_parts, random_ranges, with_uses
from planning_traces import Builder, random_trace

from benchmarks.planning.validator import validate
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.trace.ranged import plan_in_parts, recorded_plan
from swapd.trace.trace import Trace
from swapd.trace.trace_file import TraceError

SEEDS = range(120)


def cut_of(case: Ranged) -> Trace:
    return cut(case.trace, case.first, case.count)


def ranges(trace: Trace, v: int) -> list[int]:
    """The chunks of the recorded variable that a variable of a cut trace is."""
    first, count = trace.chunk_range(v)
    return list(range(first, first + count))


def storages(trace: Trace) -> dict[int, set[int]]:
    """{variable: all that are the same storage in iterations that follow each other}, the slow way."""
    found = {v: {v} for v in range(trace.variables)}
    for v, before in enumerate(trace.previous.tolist()):
        if before >= 0:
            both = found[v] | found[before]
            found.update(dict.fromkeys(both, both))
    return found


Uses = dict[tuple[int, int], dict[int, int]]


def is_cut(case: Ranged, together: set[int]) -> bool:
    rows = zip(case.trace.use_variables.tolist(), case.first.tolist(), case.count.tolist())
    return any(v in together and (first, count) != (0, case.chunks(v)) for v, first, count in rows)


def has_bytes_before(case: Ranged, used: Uses, v: int, chunk: int, seen: frozenset[int] = frozenset()) -> bool:
    """Whether a chunk of v has bytes as the iteration starts."""
    before = int(case.trace.previous[v])
    if before < 0 or before in seen:  # what goes round for ever was used once
        return bool(case.trace.born[v] < 0)
    return (before, chunk) in used or has_bytes_before(case, used, before, chunk, seen | {before})


def has_bytes(case: Ranged, used: Uses, v: int, chunk: int) -> bool:
    return (v, chunk) in used or has_bytes_before(case, used, v, chunk)


@pytest.mark.parametrize("seed", range(30))
def test_without_ranges_a_trace_stays_as_it_is(seed: int) -> None:
    trace = random_trace(seed)
    chunks = -(-trace.variable_bytes // CHUNK)
    whole = chunks[trace.use_variables].astype(np.uint32)
    found = cut(trace, np.zeros(len(whole), np.uint32), whole)
    assert found is trace
    assert cut(trace, np.zeros(len(whole), np.uint32), whole + 3) is trace  # workspaces are recorded smaller


@pytest.mark.parametrize("seed", SEEDS)
def test_every_chunk_is_used_as_recorded(seed: int) -> None:
    case = random_ranges(seed)
    found, expected = cut_of(case), case.used()
    actual: dict[tuple[int, int], dict[int, int]] = {}
    for f in range(found.functions):
        for row in range(int(found.use_offsets[f]), int(found.use_offsets[f + 1])):
            v = int(found.use_variables[row])
            for chunk in ranges(found, v):
                uses = actual.setdefault((found.recorded(v), chunk), {})
                uses[f] = uses.get(f, 0) | int(found.use_flags[row])
    assert actual == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_are_disjoint_and_cover_what_is_used(seed: int) -> None:
    case = random_ranges(seed)
    found, used, together = cut_of(case), case.used(), storages(case.trace)
    for recorded in range(case.trace.variables):
        parts = found.parts_of(recorded)
        assert all(found.recorded(v) == recorded for v in parts)
        covered = [chunk for v in parts for chunk in ranges(found, v)]
        assert len(covered) == len(set(covered))
        if is_cut(case, together[recorded]):
            anywhere = {c for (owner, c) in used if owner in together[recorded]}
            assert set(covered) == {c for c in anywhere if has_bytes(case, used, recorded, c)}
        else:
            assert covered == list(range(case.chunks(recorded)))
        for v in parts:
            chunks = ranges(found, v)
            full = len(chunks) * CHUNK
            ends = bool(chunks) and chunks[-1] == case.chunks(recorded) - 1
            last = full - case.chunks(recorded) * CHUNK + int(case.trace.variable_bytes[recorded]) if ends else full
            assert found.variable_bytes[v] == last


@pytest.mark.parametrize("seed", SEEDS)
def test_cuts_are_at_boundaries_of_ranges_only(seed: int) -> None:
    case = random_ranges(seed)
    found, together = cut_of(case), storages(case.trace)
    edges: dict[int, set[int]] = {}
    for v, first, count in zip(case.trace.use_variables.tolist(), case.first.tolist(), case.count.tolist()):
        edges.setdefault(v, set()).update((first, first + count))
    for v in range(found.variables):
        recorded, (first, count) = found.recorded(v), found.chunk_range(v)
        allowed = set().union(*(edges.get(other, set()) for other in together[recorded]))
        assert {first, first + count} <= allowed | {0, case.chunks(recorded)}
        # Nor is one left out: no range begins within a part.
        assert not allowed & set(range(first + 1, first + count))


@pytest.mark.parametrize("seed", SEEDS)
def test_lives_of_parts(seed: int) -> None:
    case = random_ranges(seed)
    trace, found, used, together = case.trace, cut_of(case), case.used(), storages(case.trace)
    for v in range(found.variables):
        recorded, (first, _) = found.recorded(v), found.chunk_range(v)
        assert found.died[v] == trace.died[recorded]
        if not is_cut(case, together[recorded]) or has_bytes_before(case, used, recorded, first):
            assert found.born[v] == trace.born[recorded]
        else:
            assert found.born[v] == min(used[recorded, first])
        before = int(trace.previous[recorded])
        if before < 0 or found.born[v] >= 0:
            assert found.previous[v] == -1
        else:
            old = int(found.previous[v])
            assert found.recorded(old) == before and ranges(found, old) == ranges(found, v)
            assert found.variable_bytes[old] == found.variable_bytes[v]


def test_what_no_function_uses_is_dormant() -> None:
    b = Builder()
    table = b.entry(10 * CHUNK - 30)
    b.call("first", [table])
    b.call("second", [table])
    trace = Trace(**{**vars(b.trace(chunk_bytes=CHUNK)), "dormant_bytes": 5})
    found = cut_of(with_uses(trace, [[(table, 1, 2, 3)], [(table, 1, 4, 2)]]))
    assert [ranges(found, v) for v in range(found.variables)] == [[2, 3], [4], [5]]
    assert found.previous.tolist() == [0, 1, 2] and found.part_of is not None
    assert found.dormant_bytes == 5 + 6 * CHUNK - 30
    assert found.live_bytes.tolist() == [400, 400]


def test_chunks_that_are_never_written_are_no_bytes() -> None:
    b = Builder()
    (x,) = b.call("make", [], [10 * CHUNK])
    b.call("use", [x])
    b.free(x)
    found = cut_of(with_uses(b.trace(chunk_bytes=CHUNK), [[], [(x, 2, 7, 3)]]))
    assert (found.born.tolist(), found.died.tolist(), found.dormant_bytes) == ([1], [1], 0)
    assert found.live_bytes.tolist() == [0, 300]


def test_a_result_of_one_iteration_is_cut_like_the_entry_it_becomes() -> None:
    b = Builder()
    old = b.entry(6 * CHUNK, survives=False)
    b.call("read", [old])
    b.free(old)
    (new,) = b.call("write", [], [6 * CHUNK])
    b.previous[old] = new
    found = cut_of(with_uses(b.trace(chunk_bytes=CHUNK), [[(old, 1, 0, 2)], [(new, 2, 0, 5)]]))
    assert [found.label(v) for v in range(found.variables)] == [
        "variable 0, chunks 0..1",
        "variable 0, chunks 2..4",
        "variable 1, chunks 0..1",
        "variable 1, chunks 2..4",
    ]
    assert found.previous.tolist() == [2, 3, -1, -1] and found.born.tolist() == [-1, -1, 1, 1]


def test_ranges_that_share_a_chunk() -> None:
    """Parts of elements that end within a chunk: the chunk is a part of its own, which both functions use."""
    b = Builder()
    w = b.entry(8 * CHUNK)
    b.call("first", [w])
    b.call("second", [w])
    found = cut_of(with_uses(b.trace(chunk_bytes=CHUNK), [[(w, 1, 0, 4)], [(w, 1, 3, 5)]]))
    assert [ranges(found, v) for v in range(found.variables)] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert found.use_variables.tolist() == [0, 1, 1, 2]


def test_two_ranges_of_a_function_over_one_chunk_are_one_use() -> None:
    b = Builder()
    w = b.entry(4 * CHUNK)
    b.call("f", [w])
    found = cut_of(with_uses(b.trace(chunk_bytes=CHUNK), [[(w, 1, 0, 2), (w, 2, 1, 2)]]))
    assert found.use_variables.tolist() == [0, 1, 2] and found.use_flags.tolist() == [1, 3, 2]


def test_what_is_larger_than_the_device_and_used_by_no_function_is_no_variable() -> None:
    """It was used in host memory. Were it a variable, the function that allocates it would need more than there is."""
    b = Builder()
    weight = b.entry(20 * CHUNK)
    (small, large) = b.call("make", [], [3 * CHUNK, 12 * CHUNK])
    b.call("use", [small])
    b.free(small, large)
    trace = b.trace(chunk_bytes=CHUNK)
    case = with_uses(trace, [[(small, 2, 0, 3)], [(small, 1, 0, 3)]])
    assert Problem.from_trace(cut_of(case), 0).min_budget_bytes == 15 * CHUNK
    found = cut(case.trace, case.first, case.count, most_chunks=11)
    assert [found.label(v) for v in range(found.variables)] == ["variable 1"]
    assert found.dormant_bytes == 20 * CHUNK and weight == 0
    assert Problem.from_trace(found, 0).min_budget_bytes == 3 * CHUNK
    assert cut(case.trace, case.first, case.count, most_chunks=20) is case.trace
    used = with_uses(trace, [[(weight, 1, 0, 20), (large, 2, 0, 12)], [(small, 1, 0, 3)]])
    assert cut(used.trace, used.first, used.count, most_chunks=5) is used.trace  # that cannot run, and is to be said


def test_places_go_with_the_parts() -> None:
    case = layers_in_parts(layers=1, parts=2)
    trace = Trace(**{**vars(case.trace), "places": ("a.py:1",), "variable_place": [-1, 0, -1]})
    found = cut(trace, case.first, case.count)
    assert [found.place(v) for v in range(found.variables)] == ["", "a.py:1", "a.py:1", "", ""]


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_parts_lead_back_to_the_recorded_variables(seed: int) -> None:
    case = random_ranges(seed)
    found = cut_of(case)
    least = Problem.from_trace(found, 0).min_budget_bytes
    problem = Problem.from_trace(found, least + seed % 4 * CHUNK)
    plan = make_plan(problem, ["auto", "idle", "window"][seed % 3])
    assert validate(problem, plan) == []
    back = recorded_plan(plan, found)
    for name in ("outs", "ins", "write_backs"):
        for move, recorded in zip(getattr(plan, name), getattr(back, name)):
            stop = recorded.first_chunk + recorded.chunk_count
            assert 0 <= recorded.first_chunk < stop <= case.chunks(recorded.variable)
            assert recorded.variable == found.recorded(move.variable)
            moved = range(recorded.first_chunk, stop)
            assert set(moved) <= set(ranges(found, move.variable))
            assert move[3:] == recorded[3:] and move.chunk_count == recorded.chunk_count
    assert plan_in_parts(back, found) == plan


def test_a_move_over_several_parts_becomes_several() -> None:
    case = layers_in_parts(layers=1, parts=2, weight_chunks=8)
    found = cut_of(case)
    assert [found.label(v) for v in range(found.variables)][:3] == [
        "variable 0",
        "variable 1, chunks 0..3",
        "variable 1, chunks 4..7",
    ]
    plan = Plan(outs=(Out(1, 2, 5, 0), Out(0, 0, 4, 1)), ins=(In(1, 3, 5, 0, 1, 1), In(0, 0, 1, 0, 2, 1)))
    parts = plan_in_parts(plan, found)
    assert parts.outs == (Out(1, 2, 2, 0), Out(2, 0, 3, 0), Out(0, 0, 4, 1))
    assert parts.ins == (In(1, 3, 1, 0, 2, 1), In(2, 0, 4, 0, 2, 1), In(0, 0, 1, 0, 3, 1))


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_of_parts_survives_its_file(seed: int) -> None:
    trace = cut_of(random_ranges(seed))
    again = Trace.from_bytes(trace.to_bytes())
    assert again == trace and again.describe() == trace.describe()
    if trace.part_of is not None:
        assert trace != Trace(**{**vars(trace), "part_of": None, "part_first_chunk": None})
        assert f"({trace.label(0)})" in trace.describe()


def test_a_file_without_parts_is_of_the_version_that_has_none() -> None:
    content = random_trace(3).to_bytes()
    assert Trace.from_bytes(content).part_of is None
    assert b'"version": 1' in _header(content)
    assert b'"version": 2' in _header(cut_of(layers_in_parts()).to_bytes())


def _header(content: bytes) -> bytes:
    import io
    import zipfile

    return zipfile.ZipFile(io.BytesIO(content)).read("header.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"part_of": None}, "belong together"),
        ({"part_of": [0, 1, 1, 2]}, "5 are needed"),
        ({"part_of": [0, 1, 1, 3, 2]}, "ascend"),
        ({"part_first_chunk": [0, 0, 4, 0, -1]}, "negative"),
        ({"part_first_chunk": [0, 0, 3, 0, 2]}, "overlap"),
        ({"chunk_bytes": 0}, "size of a chunk"),
        ({"chunk_bytes": 1 << 60}, "larger than any machine"),
        ({"died": [2, 2, 2, 1, 2]}, "die together"),
        ({"previous": [0, 2, 1, -1, -1]}, "same chunk"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(values: dict[str, object], message: str) -> None:
    trace = cut_of(layers_in_parts(layers=1, parts=2))
    with pytest.raises(TraceError, match=message):
        Trace(**{**vars(trace), **values})


def test_parts_of_a_variable_cannot_come_from_two() -> None:
    trace = cut_of(layers_in_parts(layers=2, parts=2))
    assert trace.previous.tolist()[:5] == [0, 1, 2, 3, 4]
    crossed = [0, 1, 4, 3, 2, *trace.previous.tolist()[5:]]
    with pytest.raises(TraceError, match="parts of one variable"):
        Trace(**{**vars(trace), "previous": crossed})


def test_only_a_whole_trace_with_as_many_ranges_can_be_cut() -> None:
    case = layers_in_parts()
    with pytest.raises(ValueError, match="ranges for"):
        cut(case.trace, case.first[1:], case.count[1:])
    found = cut_of(case)
    uses = len(found.use_variables)
    with pytest.raises(ValueError, match="only a trace of whole variables"):
        cut(found, np.zeros(uses, np.uint32), np.ones(uses, np.uint32))
