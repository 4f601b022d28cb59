"""Chooses one of several options for each kernel with the least time in all within a limit, exactly, without a solver.

The programme of WD is a multiple-choice knapsack. Partial choices for the first kernels are kept as a list in which
none beats another (Nemhauser and Ullmann 1969, "Discrete dynamic programming and capital allocation"); one is dropped
as soon as even the fractional optimum of the remaining kernels (Sinha and Zoltners 1979, "The multiple-choice knapsack
problem") cannot bring it below a solution that is known. In the worst case the lists grow exponentially; then `choose`
gives up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SLACK = 1e-9  # of the slowest time in all: sums in different orders differ, and no optimum may be lost to that
MOST_PARTIAL = 200_000  # partial choices at once: those of networks stay below a tenth of it


class Option(NamedTuple):
    """One of the options of a kernel."""

    seconds: float
    workspace_bytes: int


class _Step(NamedTuple):
    """From one corner of a kernel's convex hull to the next: so many bytes more save so many seconds."""

    kernel: int
    option: int  # the corner that it leads to
    more_bytes: int
    saved_seconds: float


@dataclass(frozen=True)
class _List:
    """Partial choices up to one kernel, and where they came from."""

    workspace_bytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    parent: NDArray[np.int64]
    option: NDArray[np.int64]


def choose(fronts: Sequence[Sequence[Option]], limit_bytes: int) -> list[int] | None:
    """For each front the index of its option; None if the lists become longer than `MOST_PARTIAL`.

    The fronts must be desirable ones, smallest first, and their smallest options must fit together.
    """
    steps = [_hull(kernel, front) for kernel, front in enumerate(fronts)]
    known = sum(front[i].seconds for front, i in zip(fronts, greedy_choice(fronts, limit_bytes)))
    known += SLACK * sum(front[0].seconds for front in fronts)
    zero = np.zeros(1, dtype=np.int64)
    lists = [_List(zero, np.zeros(1), zero, zero)]
    for kernel, front in enumerate(fronts):
        if len(lists[-1].seconds) * len(front) > MOST_PARTIAL:
            return None
        rest = _Fractional(fronts[kernel + 1 :], steps[kernel + 1 :])
        lists.append(_extended(lists[-1], front, rest, limit_bytes, known))
    at = int(lists[-1].seconds.argmin())
    chosen = []
    for stage in reversed(lists[1:]):
        chosen.append(int(stage.option[at]))
        at = int(stage.parent[at])
    return chosen[::-1]


def greedy_choice(fronts: Sequence[Sequence[Option]], limit_bytes: int) -> list[int]:
    """A choice that fits, perhaps not the best: of the hulls' steps, those that save most per byte are taken first."""
    at = [0] * len(fronts)
    room = limit_bytes - sum(front[0].workspace_bytes for front in fronts)
    stopped: set[int] = set()
    for step in _by_rate([_hull(kernel, front) for kernel, front in enumerate(fronts)]):
        if step.kernel in stopped or step.more_bytes > room:
            stopped.add(step.kernel)
            continue
        at[step.kernel] = step.option
        room -= step.more_bytes
    return at


def fractional_bound(fronts: Sequence[Sequence[Option]], limit_bytes: int) -> float:
    """Seconds that no choice within the limit beats: the optimum when options may be mixed."""
    rest = _Fractional(fronts, [_hull(kernel, front) for kernel, front in enumerate(fronts)])
    return float(rest.seconds(np.array([limit_bytes], dtype=np.int64))[0])


def _extended(before: _List, front: Sequence[Option], rest: _Fractional, limit_bytes: int, known: float) -> _List:
    """Every partial choice with every option, without those that are too large, hopeless, or beaten."""
    own = np.array([option.workspace_bytes for option in front], dtype=np.int64)
    workspace = (before.workspace_bytes[:, None] + own).ravel()
    seconds = (before.seconds[:, None] + np.array([option.seconds for option in front])).ravel()
    at_best = seconds + rest.seconds(limit_bytes - workspace)  # inf where even the smallest of the rest do not fit
    hopeful = np.flatnonzero(at_best <= known)
    order = hopeful[np.lexsort((seconds[hopeful], workspace[hopeful]))]
    fastest_so_far = np.minimum.accumulate(seconds[order])
    kept = order[np.concatenate(([True], seconds[order][1:] < fastest_so_far[:-1]))]
    return _List(workspace[kept], seconds[kept], kept // len(front), kept % len(front))


def _hull(kernel: int, front: Sequence[Option]) -> list[_Step]:
    """The lower convex hull of a front, as steps: each saves less for a byte than the one before."""
    corners = [0]
    for i in range(1, len(front)):
        while len(corners) > 1 and _rate(front, corners[-2], corners[-1]) <= _rate(front, corners[-1], i):
            corners.pop()
        corners.append(i)
    return [
        _Step(kernel, b, front[b].workspace_bytes - front[a].workspace_bytes, front[a].seconds - front[b].seconds)
        for a, b in pairwise(corners)
    ]


def _rate(front: Sequence[Option], a: int, b: int) -> float:
    return (front[a].seconds - front[b].seconds) / (front[b].workspace_bytes - front[a].workspace_bytes)


def _by_rate(steps: Sequence[Sequence[_Step]]) -> list[_Step]:
    """All steps, the most saving one first. The sort is stable, so a kernel's own steps stay in order."""
    return sorted((step for own in steps for step in own), key=lambda step: -step.saved_seconds / step.more_bytes)


class _Fractional:
    """The optimum of some kernels when options may be mixed, as a function of the room: convex, piecewise linear."""

    def __init__(self, fronts: Sequence[Sequence[Option]], steps: Sequence[Sequence[_Step]]) -> None:
        ordered = _by_rate(steps)
        smallest = sum(front[0].workspace_bytes for front in fronts)
        slowest = sum(front[0].seconds for front in fronts)
        self.room = np.cumsum([smallest] + [step.more_bytes for step in ordered], dtype=np.float64)
        self.least = slowest - np.cumsum([0.0] + [step.saved_seconds for step in ordered])

    def seconds(self, room: NDArray[np.int64]) -> NDArray[np.float64]:
        bound: NDArray[np.float64] = np.interp(room, self.room, self.least, left=np.inf)
        return bound
