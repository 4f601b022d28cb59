"""Part sizes: how much one part of a split operator may use at once, chosen with the swapping plan.

Large parts mean few functions, but leave no room for the next part to come in while one computes. Small parts leave
that room, but mean more functions. So the recorded iteration is rewritten for each of some limits (`resizing`) and
planned with the planner's policy, and the limit with the least predicted time is taken. Half of the budget, which is
the rule without a plan, is one of the limits, so by the prediction the choice is never worse.

mmCNN (Li et al. 2019, Algorithm 1) fixes the parts first, and prefetches one while another runs; here the plan decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import get
from swapd.policies.idle import WORK, idle
from swapd.simulation.simulator import simulate_once
from swapd.splitting.groups import Group
from swapd.splitting.resizing import Divisible, divisible, resized
from swapd.trace.ranged import RangedTrace

DIVISORS = (2, 3, 4, 6, 8)  # of the bytes that are free; the first gives the rule without a plan
_TOLERANCE = 1.02  # of limits with times this close the largest is taken: what is not modelled makes small parts dearer
_QUICK_FUNCTIONS = 100  # longer iterations are planned by `idle` with little work, as there is one for each limit
_QUICK_WORK = WORK // 15
_MOST_FUNCTIONS = 1800  # of all rewritten iterations together: planning them takes about a second


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what was predicted for each limit."""

    part_bytes: int
    predicted: tuple[tuple[int, float], ...]  # (limit, seconds of an iteration), the largest limit first

    @property
    def seconds(self) -> float:
        """The predicted time of an iteration with parts of `part_bytes`."""
        return dict(self.predicted)[self.part_bytes]


def limits(budget_bytes: int, slab_bytes: int, chunk_bytes: int) -> list[int]:
    """The limits that are tried, the largest first: shares of what small variables leave of the budget."""
    free = budget_bytes - slab_bytes
    found = {max(free // divisor, 2 * chunk_bytes) for divisor in DIVISORS}
    return sorted(found, reverse=True)


def choose_part_bytes(
    source: RangedTrace, groups: Sequence[Group], budget_bytes: int, policy: str = "auto"
) -> Choice | None:
    """The best of `limits` for a recorded iteration; None if nothing in it can be divided otherwise, or it is too long.

    Limits are tried from the largest on, as long as planning takes no more than about a second in all.

    Args:
        source: the iteration as recorded.
        groups: its operators in parts.
        budget_bytes: of the device.
        policy: what the planner plans with.
    """
    trace = source.whole
    found = [(group, made) for group in groups if (made := divisible(source, group)) is not None]
    slabs = trace.slab_chunks_peak * trace.chunk_bytes
    predicted, left = [], _MOST_FUNCTIONS
    for limit in limits(budget_bytes, slabs, trace.chunk_bytes) if found else ():
        wanted = _parts_within(found, limit, trace.chunk_bytes)
        if wanted is None:
            continue
        functions = trace.functions + sum((parts - made.parts) * len(made.slots) for made, parts in wanted)
        left -= functions
        if left < 0:
            break
        problem = Problem.from_trace(resized(source, wanted).cut(), budget_bytes)
        with suppress(InfeasibleError):
            plan = idle(problem, _QUICK_WORK) if functions > _QUICK_FUNCTIONS else get(policy)(problem, None)
            predicted.append((limit, simulate_once(problem, plan).seconds))
    if len(predicted) < 2:
        return None
    fastest = min(seconds for _, seconds in predicted)
    best = next(limit for limit, seconds in predicted if seconds <= _TOLERANCE * fastest)
    return Choice(best, tuple(predicted))


def _parts_within(
    groups: list[tuple[Group, Divisible]], limit: int, chunk_bytes: int
) -> list[tuple[Divisible, int]] | None:
    """Into how many parts each group is divided; None if a group cannot be run in parts that use so little."""
    wanted = []
    for group, made in groups:
        parts = made.parts_within(limit, chunk_bytes)
        if parts is None and limit < group.part_bytes:
            return None
        wanted.append((made, parts if parts is not None else made.parts))  # it ran like that within less
    return wanted
