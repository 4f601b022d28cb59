"""The best schedule of a tiny problem, by looking at all of them.

Time is counted in steps of one unit: functions take whole units, a chunk takes its `out_units` and `in_units` to copy:
of the last chunk of a variable only the bytes that the variable has in it are copied. The
rules are those of docs/lower-bound.md, which are the executor's without its plan: at any moment a chunk that nothing
pins may start to leave, be dropped if the host has its bytes, or start to come back if there is room; each link carries
one chunk at a time. Every state at the start of an iteration is a node, the shortest way from one to another through a
whole iteration an edge; the best steady state is the cycle with the least mean (Karp 1978, "A characterization of the
minimum cycle mean in a digraph").
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swapd.planning.problem import Problem

DEVICE, BOTH, HOST, NONE = range(4)  # where a chunk's valid bytes are; up to BOTH it is on the device
_IDLE = (-1, 0)

State = tuple[int, int, tuple[int, ...], tuple[int, int], tuple[int, int]]
# next function or the running one, units left of it (-1: none runs), chunk states, chunk and units left out, in


@dataclass(frozen=True)
class _Rules:
    used: tuple[frozenset[int], ...]  # by function, chunks
    needed: tuple[tuple[int, ...], ...]  # which are there when it begins
    born: tuple[int, ...]  # by function, how many
    written: tuple[tuple[int, ...], ...]
    dead: tuple[tuple[int, ...], ...]  # by the function after which they are gone
    seconds: tuple[int, ...]
    survive: tuple[bool, ...]  # by chunk
    capacity: int
    out_units: tuple[int, ...]  # by chunk
    in_units: tuple[int, ...]


def best_steady_seconds(problem: Problem, unit: float = 1.0) -> float:
    """Time of one iteration of the best steady state, in seconds; every time must be a whole number of `unit`.

    Only for problems in which variables keep their numbers: `previous` is -1 or the variable itself.
    """
    return _best_steady_units(_rules(problem, unit)) * unit


@functools.cache
def _best_steady_units(rules: _Rules) -> float:
    moves = functools.cache(functools.partial(_moves, rules))
    nodes: dict[State, int] = {}
    edges: list[tuple[int, int, int]] = []
    todo = _starts(rules)
    for state in todo:
        nodes[state] = len(nodes)
    at = 0
    while at < len(todo):
        for target, units in _iteration(len(rules.seconds), moves, todo[at]).items():
            if target not in nodes:
                nodes[target] = len(nodes)
                todo.append(target)
            edges.append((at, nodes[target], units))
        at += 1
    return _least_mean(len(nodes), edges)


def _rules(problem: Problem, unit: float) -> _Rules:
    n, uses = problem.functions, problem.uses
    assert all(p in (-1, v) for v, p in enumerate(problem.previous.tolist()))

    def units(seconds: float) -> int:
        whole = round(seconds / unit)
        assert math.isclose(whole * unit, seconds, abs_tol=1e-9), seconds
        return whole

    chunk_of = [v for v, count in enumerate(problem.chunks.tolist()) for _ in range(count)]
    used: list[set[int]] = [set() for _ in range(n)]
    written: list[set[int]] = [set() for _ in range(n)]
    for v, f, w in zip(uses.variable.tolist(), uses.function.tolist(), uses.write.tolist()):
        used[f].add(v)
        if w:
            written[f].add(v)
    born, died = problem.born.tolist(), problem.died.tolist()
    chunk = problem.chunk_bytes
    sizes = [min(chunk, size - at) for size in problem.variable_bytes.tolist() for at in range(0, size, chunk)]
    assert len(sizes) == len(chunk_of)

    def chunks(keep: Callable[[int, int], bool]) -> tuple[tuple[int, ...], ...]:
        """By function, the chunks of the variables that are kept for it."""
        return tuple(tuple(c for c, v in enumerate(chunk_of) if keep(v, f)) for f in range(n))

    return _Rules(
        used=tuple(map(frozenset, chunks(lambda v, f: v in used[f]))),
        needed=chunks(lambda v, f: v in used[f] and born[v] != f),
        born=tuple(map(len, chunks(lambda v, f: born[v] == f))),
        written=chunks(lambda v, f: v in written[f]),
        dead=chunks(lambda v, f: died[v] == f),
        seconds=tuple(units(value) for value in problem.seconds.tolist()),
        survive=tuple(bool(problem.previous[v] >= 0) for v in chunk_of),
        capacity=problem.capacity_chunks,
        out_units=tuple(units(size / problem.machine.out_bytes_per_second) for size in sizes),
        in_units=tuple(units(size / problem.machine.in_bytes_per_second) for size in sizes),
    )


def _starts(rules: _Rules) -> list[State]:
    """Every way in which what survives may lie, links idle. All cycles pass through states that these lead to."""
    found: list[tuple[int, ...]] = [()]
    for survives in rules.survive:
        found = [(*row, where) for row in found for where in ((DEVICE, HOST) if survives else (NONE,))]
    return [(0, -1, row, _IDLE, _IDLE) for row in found if row.count(DEVICE) <= rules.capacity]


def _iteration(n: int, moves: Callable[[State], list[tuple[State, int]]], start: State) -> dict[State, int]:
    """The least units to each state in which the next iteration of `n` functions can start."""
    best: dict[State, int] = {start: 0}
    heap = [(0, start)]
    ends: dict[State, int] = {}
    while heap:
        units, state = heapq.heappop(heap)
        if best[state] < units:
            continue
        if state[0] == n:
            ends[(0, -1, *state[2:])] = units
            continue
        for following, more in moves(state):
            if units + more < best.get(following, 1 << 60):
                best[following] = units + more
                heapq.heappush(heap, (units + more, following))
    return ends


def _moves(rules: _Rules, state: State) -> list[tuple[State, int]]:
    function, left, chunks, out, into = state
    found: list[tuple[State, int]] = []
    pinned: frozenset[int] = rules.used[function] if left >= 0 else frozenset()
    free = rules.capacity - chunks.count(DEVICE) - chunks.count(BOTH) - (into[0] >= 0)
    has_room = left < 0 and rules.born[function] <= free and out[0] not in rules.used[function]
    if has_room and all(chunks[c] <= BOTH for c in rules.needed[function]):
        row = list(chunks)
        for c in rules.written[function]:
            row[c] = DEVICE
        found.append(((function, rules.seconds[function], tuple(row), out, into), 0))
    for c, where in enumerate(chunks):
        if where == NONE or c in pinned or c == out[0] or c == into[0]:
            continue
        if where == BOTH:
            found.append(((function, left, (*chunks[:c], HOST, *chunks[c + 1 :]), out, into), 0))
        elif where == DEVICE and out[0] < 0:
            found.append(((function, left, chunks, (c, rules.out_units[c]), into), 0))
        elif where == HOST and into[0] < 0 and free > 0:
            found.append(((function, left, chunks, out, (c, rules.in_units[c])), 0))
    step = min([units for units in (left if left >= 0 else 0, out[1], into[1]) if units > 0], default=0)
    if left == 0:
        row = list(chunks)
        for c in rules.dead[function]:
            row[c] = NONE
        found.append(((function + 1, -1, tuple(row), out, into), 0))
    elif step:
        found.append((_later(state, step), step))
    return found


def _later(state: State, step: int) -> State:
    function, left, chunks, out, into = state
    row = list(chunks)
    if left > 0:
        left -= step
    if out[0] >= 0:
        out = (out[0], out[1] - step)
        if out[1] == 0:
            if row[out[0]] == DEVICE:
                row[out[0]] = BOTH
            out = _IDLE
    if into[0] >= 0:
        into = (into[0], into[1] - step)
        if into[1] == 0:
            row[into[0]] = BOTH if row[into[0]] == HOST else row[into[0]]
            into = _IDLE
    return function, left, tuple(row), out, into


def _least_mean(count: int, edges: list[tuple[int, int, int]]) -> float:
    """Karp's theorem, from a source that leads to every node."""
    source, target, cost = (np.array(column) for column in zip(*edges))
    ways = np.full((count + 1, count), np.inf)
    ways[0] = 0.0  # the source's edges cost nothing
    for length in range(1, count + 1):
        np.minimum.at(ways[length], target, ways[length - 1][source] + cost)
    lengths = count - np.arange(count)
    with np.errstate(invalid="ignore"):
        means = (ways[count] - ways[:count]) / lengths[:, None]
    means[np.isnan(means)] = -np.inf
    return float(np.min(np.max(means, axis=0)))
