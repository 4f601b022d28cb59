"""The best schedule of a tiny problem, by looking at all of them.

Time is counted in steps of one unit: functions take whole units, a chunk takes `out_units` and `in_units` to copy. The
rules are those of docs/lower-bound.md, which are the executor's without its plan: at any moment a chunk that nothing
pins may start to leave, be dropped if the host has its bytes, or start to come back if there is room; each link carries
one chunk at a time. Every state at the start of an iteration is a node, the shortest way from one to another through a
whole iteration an edge; the best steady state is the cycle with the least mean (Karp 1978, "A characterization of the
minimum cycle mean in a digraph").
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from swapd.planning.problem import Problem

DEVICE, BOTH, HOST, NONE = range(4)  # where a chunk's valid bytes are
_IDLE = (-1, 0)

State = tuple[int, int, tuple[int, ...], tuple[int, int], tuple[int, int]]
# next function or the running one, units left of it (-1: none runs), chunk states, chunk and units left out, in


@dataclass
class _Rules:
    chunk_of: list[int]  # the variable of each chunk
    uses: list[set[int]]  # by function, variables
    writes: list[set[int]]
    births: list[set[int]]
    deaths: list[set[int]]  # by the function after which they are gone
    seconds: list[int]
    capacity: int
    out_units: int
    in_units: int


def best_steady_seconds(problem: Problem, unit: float = 1.0) -> float:
    """Time of one iteration of the best steady state, in seconds; every time must be a whole number of `unit`.

    Only for problems in which variables keep their numbers: `previous` is -1 or the variable itself.
    """
    rules = _rules(problem, unit)
    nodes: dict[State, int] = {}
    edges: list[tuple[int, int, int]] = []
    todo = _starts(rules, problem)
    for state in todo:
        nodes[state] = len(nodes)
    at = 0
    while at < len(todo):
        for target, units in _iteration(rules, todo[at]).items():
            if target not in nodes:
                nodes[target] = len(nodes)
                todo.append(target)
            edges.append((at, nodes[target], units))
        at += 1
    return _least_mean(len(nodes), edges) * unit


def _rules(problem: Problem, unit: float) -> _Rules:
    n, uses = problem.functions, problem.uses
    assert all(p in (-1, v) for v, p in enumerate(problem.previous.tolist()))

    def units(seconds: float) -> int:
        whole = round(seconds / unit)
        assert math.isclose(whole * unit, seconds, abs_tol=1e-9), seconds
        return whole

    by_function: list[set[int]] = [set() for _ in range(n)]
    writes: list[set[int]] = [set() for _ in range(n)]
    for v, f, w in zip(uses.variable.tolist(), uses.function.tolist(), uses.write.tolist()):
        by_function[f].add(v)
        if w:
            writes[f].add(v)
    born, died = problem.born.tolist(), problem.died.tolist()
    chunk = problem.chunk_bytes
    return _Rules(
        chunk_of=[v for v, count in enumerate(problem.chunks.tolist()) for _ in range(count)],
        uses=by_function,
        writes=writes,
        births=[{v for v, b in enumerate(born) if b == f} for f in range(n)],
        deaths=[{v for v, d in enumerate(died) if d == f} for f in range(n)],
        seconds=[units(value) for value in problem.seconds.tolist()],
        capacity=problem.capacity_chunks,
        out_units=units(chunk / problem.machine.out_bytes_per_second),
        in_units=units(chunk / problem.machine.in_bytes_per_second),
    )


def _starts(rules: _Rules, problem: Problem) -> list[State]:
    """Every way in which what survives may lie, links idle. All cycles pass through states that these lead to."""
    options = [(DEVICE, HOST) if problem.previous[v] >= 0 else (NONE,) for v in rules.chunk_of]
    found: list[tuple[int, ...]] = [()]
    for option in options:
        found = [(*row, where) for row in found for where in option]
    return [(0, -1, row, _IDLE, _IDLE) for row in found if row.count(DEVICE) <= rules.capacity]


def _held(chunks: tuple[int, ...], coming: tuple[int, int]) -> int:
    return sum(where in (DEVICE, BOTH) for where in chunks) + (coming[0] >= 0)


def _iteration(rules: _Rules, start: State) -> dict[State, int]:
    """The least units to each state in which the next iteration can start."""
    n = len(rules.seconds)
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
        for following, more in _moves(rules, state):
            if units + more < best.get(following, 1 << 60):
                best[following] = units + more
                heapq.heappush(heap, (units + more, following))
    return ends


def _moves(rules: _Rules, state: State) -> list[tuple[State, int]]:
    function, left, chunks, out, into = state
    found: list[tuple[State, int]] = []
    pinned = rules.uses[function] if left >= 0 else set()
    free = rules.capacity - _held(chunks, into)
    if left < 0:
        waiting = [
            c for c, v in enumerate(rules.chunk_of)
            if v in rules.uses[function] and v not in rules.births[function] and chunks[c] not in (DEVICE, BOTH)
        ]  # fmt: skip
        leaving = out[0] >= 0 and rules.chunk_of[out[0]] in rules.uses[function]
        births = [c for c, v in enumerate(rules.chunk_of) if v in rules.births[function]]
        if not waiting and not leaving and len(births) <= free:
            row = list(chunks)
            for c, v in enumerate(rules.chunk_of):
                if v in rules.writes[function]:
                    row[c] = DEVICE
            found.append(((function, rules.seconds[function], tuple(row), out, into), 0))
    for c, v in enumerate(rules.chunk_of):
        if v in pinned or c in (out[0], into[0]):
            continue
        if chunks[c] == BOTH:
            found.append(((function, left, (*chunks[:c], HOST, *chunks[c + 1 :]), out, into), 0))
        if chunks[c] == DEVICE and out[0] < 0:
            found.append(((function, left, chunks, (c, rules.out_units), into), 0))
        if chunks[c] == HOST and into[0] < 0 and free > 0:
            found.append(((function, left, chunks, out, (c, rules.in_units)), 0))
    step = min([units for units in (left if left >= 0 else 0, out[1], into[1]) if units > 0], default=0)
    if left == 0:
        found.append((_end(rules, state), 0))
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


def _end(rules: _Rules, state: State) -> State:
    function, _, chunks, out, into = state
    row = [NONE if v in rules.deaths[function] else where for v, where in zip(rules.chunk_of, chunks)]
    return function + 1, -1, tuple(row), out, into


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
