"""Hypothesis strategies for traces and problems that shrink to programs a person can read.

HYPOTHESIS_EXAMPLES=10000 looks at so many random programs instead of the same few each time.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from planning_traces import Builder

from swapd.planning.problem import Problem
from swapd.trace.trace import Machine, Trace

CHUNK = 100
INDEX = st.integers(0, 30)
FUNCTION = st.tuples(
    st.lists(st.tuples(INDEX, st.booleans()), max_size=4),  # which of the living it uses, and whether it writes that
    st.lists(st.integers(1, 8 * CHUNK), max_size=2),  # sizes of what it allocates
    st.lists(INDEX, max_size=2),  # which of the living are freed after it
    st.sampled_from([1e-3, 0.0, 2e-3, 5e-3]),
)
ENTRY = st.tuples(st.integers(0, 9 * CHUNK), st.booleans())  # size, and whether it lives in every iteration
RATES = st.sampled_from([1e5, 1e4, 1e6])


def examples(count: int) -> settings:
    """Settings for a test of so many programs."""
    asked = os.environ.get("HYPOTHESIS_EXAMPLES")
    return settings(
        max_examples=int(asked or count),
        derandomize=asked is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def traces(draw: st.DrawFn, functions: int = 14) -> Trace:
    """A program of at most so many functions, with storages that the iteration before handed on."""
    b = Builder()
    entries = [b.entry(size, survives) for size, survives in draw(st.lists(ENTRY, max_size=6))]
    alive = list(entries)
    for uses, sizes, frees, seconds in draw(st.lists(FUNCTION, min_size=1, max_size=functions)):
        rows = {alive[index % len(alive)]: writes for index, writes in uses} if alive else {}
        reads = [v for v, writes in rows.items() if not writes]
        alive += b.call("f", reads, sizes, writes=[v for v, writes in rows.items() if writes], seconds=seconds)
        for index in frees:
            v = alive[index % len(alive)] if alive else -1
            if v >= 0 and b.previous[v] != v:
                alive.remove(v)
                b.free(v)
    survivors = [v for v in alive if v not in entries]
    for v in entries:
        if b.previous[v] < 0 and b.died[v] != -2 and survivors and draw(st.booleans()):
            b.previous[v] = survivors.pop()  # it is what the iteration before left behind
            b.sizes[v] = b.sizes[b.previous[v]]
    return b.trace(chunk_bytes=CHUNK, machine=Machine(draw(RATES), draw(RATES), draw(st.sampled_from([0.0, 1e-3]))))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A trace in a budget in which each of its functions can run."""
    trace = draw(traces())
    least = Problem.from_trace(trace, 0).min_budget_bytes
    return Problem.from_trace(trace, least + CHUNK * draw(st.integers(0, 12)))
