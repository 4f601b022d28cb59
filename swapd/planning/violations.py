"""Violations: what is wrong with a plan that was made for another problem.

`benchmarks.planning.validator` finds what is wrong with the course of a plan that was made for this one.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem


class Misfit(enum.Enum):
    """Each way in which a move can name what the problem does not have."""

    UNKNOWN_VARIABLE = "the variable does not exist"
    BAD_CHUNK_RANGE = "the chunks are not all the variable's, or there are none"
    BAD_FUNCTION = "the function does not exist, or an in is needed before it may start"
    BAD_OUT_COUNT = "an in waits for a number of outs that the list does not have"


class Violation(NamedTuple):
    """One thing that is wrong. A number that does not apply is -1. `move` indexes outs, ins or write-backs."""

    fault: enum.Enum
    function: int = -1
    variable: int = -1
    move: int = -1

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in zip(self._fields[1:], self[1:]) if value >= 0]
        return f"{self.fault.value} ({', '.join(where)})"


def malformed(problem: Problem, plan: Plan) -> list[Violation]:
    """Violations of moves that name variables, chunks or functions that do not exist. Other plans can be simulated."""
    n, found = problem.functions, []
    moves: list[tuple[int, Out | In]] = [*enumerate(plan.outs), *enumerate(plan.ins), *enumerate(plan.write_backs)]
    for index, move in moves:
        if not 0 <= move.variable < problem.variables:
            found.append(Violation(Misfit.UNKNOWN_VARIABLE, move=index))
            continue
        stop = move.first_chunk + move.chunk_count
        if move.first_chunk < 0 or move.chunk_count < 1 or stop > problem.chunks[move.variable]:
            found.append(Violation(Misfit.BAD_CHUNK_RANGE, variable=move.variable, move=index))
        before = move.before_function if isinstance(move, In) else n
        if not -1 <= move.after_function < min(before, n) or before > n:
            found.append(Violation(Misfit.BAD_FUNCTION, move.after_function, move.variable, index))
        if isinstance(move, In) and not 0 <= move.after_outs <= len(plan.outs):
            found.append(Violation(Misfit.BAD_OUT_COUNT, move.after_function, move.variable, index))
    return found
