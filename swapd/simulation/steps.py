"""Steps: a problem laid out for code that goes through it function by function."""

from __future__ import annotations

from bisect import bisect_right
from weakref import WeakKeyDictionary

from swapd.planning.problem import Problem

_made: WeakKeyDictionary[Problem, Steps] = WeakKeyDictionary()


def steps_of(problem: Problem) -> Steps:
    """The steps of `problem`, made once."""
    if problem not in _made:
        _made[problem] = Steps(problem)
    return _made[problem]


class Steps:
    """What happens at each function, as plain lists, which are faster than arrays to go through one by one."""

    def __init__(self, problem: Problem) -> None:
        n = problem.functions
        self.chunks: list[int] = problem.chunks.tolist()
        self.full = [(1 << count) - 1 for count in self.chunks]
        self.chunk_bytes = problem.chunk_bytes
        self.last = [(1 << count) >> 1 for count in self.chunks]  # the bit of the last chunk
        self.unused: list[int] = (problem.chunks * problem.chunk_bytes - problem.variable_bytes).tolist()  # of it
        self.seconds: list[float] = problem.seconds.tolist()
        self.previous: list[int] = problem.previous.tolist()
        self.successor: list[int] = problem.successor.tolist()
        self.uses: list[list[int]] = [[] for _ in range(problem.variables)]
        self.needs: list[list[int]] = [[] for _ in range(n)]  # used, and not allocated by the function itself
        self.writes: list[list[int]] = [[] for _ in range(n)]
        pins: list[set[int]] = [set() for _ in range(n + 1)]
        born = problem.born.tolist()
        uses = problem.uses
        for v, f, write in zip(uses.variable.tolist(), uses.function.tolist(), uses.write.tolist()):
            self.uses[v].append(f)
            pins[f].add(v)
            if born[v] != f:
                self.needs[f].append(v)
            if write:
                self.writes[f].append(v)
        self.pins = pins
        self.sized = [[v for v in sorted(row) if self.chunks[v]] for row in pins]  # used, of at least one chunk
        self.births: list[list[int]] = [[] for _ in range(n + 1)]
        self.deaths: list[list[int]] = [[] for _ in range(n + 2)]  # by the function before which they are gone
        for v, died in enumerate(problem.died.tolist()):
            if born[v] >= 0:
                self.births[born[v]].append(v)
            self.deaths[died + 1].append(v)
        self.birth_chunks = [sum(self.chunks[v] for v in row) for row in self.births]
        self.entries = [v for v in range(problem.variables) if born[v] == -1]

    def bytes_in(self, v: int, mask: int) -> int:
        """What a copy of some chunks of v moves: of its last chunk only the bytes that it has there."""
        return mask.bit_count() * self.chunk_bytes - (self.unused[v] if mask >= self.last[v] else 0)

    def next_use(self, v: int, function: int) -> int:
        """The function that uses v next after `function`, counted on into the next iteration."""
        n = len(self.needs)
        uses = self.uses[v]
        at = bisect_right(uses, function)
        if at < len(uses):
            return uses[at]
        later = self.uses[self.successor[v]] if self.successor[v] >= 0 else []
        return n + later[0] if later else 3 * n


def mask_of(first: int, count: int) -> int:
    """A mask of `count` bits from bit `first` on."""
    return ((1 << count) - 1) << first


def lowest(mask: int, count: int) -> int:
    """The `count` lowest set bits of `mask`, or all when it has fewer."""
    if mask.bit_count() <= count:
        return mask
    low, high = 0, mask.bit_length()
    while low < high:
        middle = (low + high) // 2
        if (mask & ((1 << middle) - 1)).bit_count() < count:
            low = middle + 1
        else:
            high = middle
    return mask & ((1 << low) - 1)
