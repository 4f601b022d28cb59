"""Published ways to choose what is computed again, for comparison in simulation.

Both are given what ours is given, and their plans of what is swapped are made by our policies.

`swap_then_recompute` follows Capuchin (Peng et al., ASPLOS 2020, section 4): transfers that hide behind computation are
free, so as much is swapped as the link carries meanwhile; for what is left variables are dropped, those with the most
memory saved per second of recomputation first. It does not count what drops do to each other.

`checkpointed` follows Chen et al. ("Training deep nets with sublinear memory cost", 2016, section 4): the program is
cut into segments of about the same time before the peak of memory. What later segments use is kept; all else that can
be made again is dropped, and made again from what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swapd.planning.problem import Problem
from swapd.recompute.candidates import Candidate, Drop


def swap_then_recompute(problem: Problem, candidates: Sequence[Candidate]) -> list[Drop]:
    """Drops until what still has to leave and come back hides behind the computation before and after the peak."""
    turn = problem.live_peak_function + 1
    machine, chunk = problem.link, problem.chunk_bytes
    hidden = min(
        float(problem.seconds[:turn].sum()) * machine.out_bytes_per_second / chunk,
        float(problem.seconds[turn:].sum()) * machine.in_bytes_per_second / chunk,
    )
    live = problem.live.copy()
    drops = []
    for c in sorted(candidates, key=lambda c: c.seconds / c.bytes):
        if live.max(initial=0) - problem.capacity_chunks <= hidden:
            break
        worst = int(live.argmax())
        if c.drop.after < worst < c.before:
            live[c.drop.after + 1 : c.before] -= problem.chunks[c.drop.variable]
            drops.append(c.drop)
    return drops


def checkpointed(problem: Problem, candidates: Sequence[Candidate], segments: int) -> list[Drop]:
    """Drops over the peak of all that only one of so many segments before it uses."""
    turn = problem.live_peak_function + 1
    times = np.cumsum(problem.seconds[:turn])
    segment = np.minimum((segments * times / times[-1]).astype(int), segments - 1) if turn else np.zeros(0, int)
    drops = []
    for c in candidates:
        made, last = int(problem.born[c.drop.variable]), c.drop.after
        if made < turn <= c.before and last < turn and segment[made] == segment[last]:
            drops.append(c.drop)
    return drops
