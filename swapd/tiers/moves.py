"""Moves of the second level as the core makes them: whole blocks, by the first level's functions and variables."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.tiers.first_level import FirstLevel
from swapd.tiers.host_blocks import HostBlocks
from swapd.trace.trace import Trace


class Shift(NamedTuple):
    """The block of a variable goes down to the disk, or comes up from it, when `after_function` has ended."""

    variable: int
    after_function: int  # -1: as the iteration starts


class BlockMoves(NamedTuple):
    """Both directions, each in the order in which its moves are made."""

    downs: tuple[Shift, ...] = ()
    ups: tuple[Shift, ...] = ()
    exclusive: bool = False  # what came in to the device has no host copy any more

    def columns(self) -> dict[str, Any]:
        """What `Core.install_plan` takes beside a plan of one level."""
        downs, ups = ([np.array(column, np.int32) for column in zip(*moves)] for moves in (self.downs, self.ups))
        return {"downs": downs, "ups": ups, "exclusive": self.exclusive}


def of_whole_blocks(plan: Plan, problem: Problem) -> Plan:
    """The plan with blocks that move whole: out with the first part that leaves, in with the last that returns.

    So there is never more in memory than under `plan`. There are no write-backs, which the core does not make here.
    """
    sizes = problem.chunks.tolist()
    # Moves of a variable in the order in which they count: a part returns just before the function that needs it.
    moves = [(float(out.after_function), False, n) for n, out in enumerate(plan.outs)]
    moves += [(move.before_function - 0.5, True, n) for n, move in enumerate(plan.ins)]
    groups: dict[int, list[tuple[bool, list[int]]]] = {}  # by variable: its moves in turn, those of one kind together
    for _, is_in, n in sorted(moves):
        row = groups.setdefault((plan.ins if is_in else plan.outs)[n].variable, [])
        if not row or row[-1][0] != is_in:
            row.append((is_in, []))
        row[-1][1].append(n)
    for v, before in enumerate(problem.previous.tolist()):  # a group may go on in the next iteration
        if v in groups and before in groups and groups[before][-1][0] == groups[v][0][0]:
            last, first = groups[before][-1][1], groups[v][0][1]
            if last is not first:
                last += first
                first.clear()
    chosen: dict[bool, set[int]] = {False: set(), True: set()}
    for is_in, group in (group for row in groups.values() for group in row):
        chosen[is_in].update(group[-1:] if is_in else group[:1])
    leaves, returns = chosen[False], chosen[True]
    outs: list[Out] = []
    done = [0]  # done[k]: how many outs the first k outs became
    for n, out in enumerate(plan.outs):
        if n in leaves:
            outs.append(out._replace(first_chunk=0, chunk_count=sizes[out.variable]))
        done.append(len(outs))
    ins: list[In] = [
        move._replace(first_chunk=0, chunk_count=sizes[move.variable], after_outs=done[move.after_outs])
        for n, move in enumerate(plan.ins)
        if n in returns
    ]
    return replace(plan, outs=tuple(outs), ins=tuple(ins), write_backs=())


def shifts_of(
    plan: Plan, level: FirstLevel, blocks: HostBlocks, trace: Trace
) -> tuple[tuple[Shift, ...], tuple[Shift, ...]]:
    """Downs and ups of a `plan` of whole blocks, by functions of the first level and variables as recorded.

    A variable that functions use in ranges is several in `trace`, with a block for all of them: it is left to demand.
    """
    ends = [run.end for run in level.runs]
    starts = [*level.starts, *(level.starts[:1] and [level.starts[0] + level.seconds])]
    parts = Counter(map(trace.recorded, range(trace.variables)))

    def shifts(moves: tuple[Out, ...] | tuple[In, ...]) -> tuple[Shift, ...]:
        found = []
        for move in moves:
            # A copy's turn in the second level ends as the next copy starts.
            after = move.after_function
            function = bisect_right(ends, starts[after + 1]) - 1 if after >= 0 else -1
            variable = trace.recorded(blocks.owner[move.variable])
            if parts[variable] == 1:
                found.append(Shift(variable, function))
        return tuple(found)

    return shifts(plan.outs), shifts(plan.ins)
