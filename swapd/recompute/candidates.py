"""Candidates: every drop that a trace allows.

A variable may be dropped between two uses that follow each other, if its bytes were made in this iteration and can be
made again directly before the second use: by functions that may run again, from inputs that exist then, or linger, and
hold what they held the first time. Inputs that exist no longer are made again as well, as long as there are inputs for
them in turn and the functions are not too many.

Candidates do not exclude each other. If a drop's inputs were themselves dropped, they can be made again, because their
own inputs still exist: those exist until after the next use of what is made of them. So every set of candidates can be
carried out, but what runs again before one function becomes longer.

A drop is *final* if the variable is not used again, and only takes memory until the program frees it: what an operation
saved for its backward pass does until the last function of that has run. Nothing is made again then, unless the program
departs from its trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swapd.recompute.history import History

MOST_FUNCTIONS = 8  # that run again for one drop, if nothing else is dropped


class Drop(NamedTuple):
    """A variable's chunks are given up after a function."""

    variable: int
    after: int
    fleeting: bool = False  # made again for another variable's sake, it is gone once that is made, and made once more


@dataclass(frozen=True)
class Candidate:
    """A drop that is possible, and what it takes if it is the only one."""

    drop: Drop
    before: int  # the function that uses the variable next; of a final drop, the first one after the variable's end
    functions: tuple[int, ...]  # that run again before it, in order; of a final drop, if the variable is used after all
    seconds: float  # of these functions; none for a final drop
    bytes: int  # of the variable
    final: bool = False


def find_candidates(
    history: History,
    *,
    least_bytes: int = 1,
    during: NDArray[np.bool_] | None = None,
    most_functions: int = MOST_FUNCTIONS,
    final: bool = False,
) -> list[Candidate]:
    """All candidates, by variable and then by function.

    Args:
        history: of the trace.
        least_bytes: smaller variables are left alone.
        during: bool[n]: only drops over at least one of these functions are of interest; None for all.
        most_functions: that run again for one drop.
        final: whether final drops are among them.
    """
    trace = history.trace
    seconds = trace.function_seconds.tolist()
    sizes = trace.variable_bytes.tolist()
    ahead = None if during is None else np.concatenate([[0], np.cumsum(during)]).tolist()
    found = []
    for v in range(trace.variables):
        if sizes[v] < max(1, least_bytes) or not history.writers[v] or not history.repeatable[history.writers[v][0]]:
            continue
        if history.born[v] < 0:
            continue
        uses, died = history.uses[v], history.died[v]
        ends = [died + 1] if final and died < trace.functions else []
        for after, before in pairwise(uses + ends):
            if before <= after + 1 or (ahead is not None and ahead[before] == ahead[after + 1]):
                continue
            over = after == uses[-1]
            functions = history.repeats_alone(v, died if over else before, most_functions)
            if functions is None:
                break  # what is lost stays lost, and what was written in a way that cannot be repeated too
            taken = 0.0 if over else sum(seconds[f] for f in functions)
            found.append(Candidate(Drop(v, after), before, tuple(functions), taken, sizes[v], over))
    return found
