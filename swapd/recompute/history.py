"""History: which bytes each function of a trace reads, until when they exist, and which functions make them again.

The bytes of a variable between two writes are a *version* of it. Version k of a variable is what its k-th writer left,
counted from 0; the allocation counts as a write. Version -1 is what an entry variable held as the iteration began.

What makes lost versions again is a part of the program, run once more in the program's own order: for each version its
writers, and before them what makes the versions that these read and that are lost too. Because the order is the
program's, each of these functions finds in its variables the versions that it found the first time. Functions only
read what earlier functions wrote, so this comes to an end.

A variable *lingers* if it stays beyond its end for what is made again from it. It takes memory then, or is swapped, and
is not made again. That pays for what many functions read and few bytes hold, as the layers that a network concatenates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

import numpy as np

from swapd.planning.problem import Problem
from swapd.recompute.operators import Role, role
from swapd.trace.trace import READ, WRITE, Trace

Version = tuple[int, int]  # a variable, and which of its writers wrote last (-1: none)


class History:
    """What a trace's functions read, write and make.

    Args:
        trace: one iteration.
        without_statistics: whether normalisations by batch may run again, which the program must then call without
            their running statistics.
        linger_rate: a variable may linger if making it again, once for each function that may run again and reads it,
            makes fewer bytes a second than this, or if it cannot be made again; None if none may.
    """

    def __init__(self, trace: Trace, *, without_statistics: bool = False, linger_rate: float | None = None) -> None:
        self.trace = trace
        n, variables = trace.functions, trace.variables
        self.born: list[int] = trace.born.tolist()
        self.died: list[int] = trace.died.tolist()
        self.makes: list[list[int]] = [[] for _ in range(n)]  # what each function allocates
        self.reads: list[list[int]] = [[] for _ in range(n)]  # what it reads and did not allocate
        self.writers: list[list[int]] = [[] for _ in range(variables)]
        self.uses: list[list[int]] = [[] for _ in range(variables)]  # functions, allocation included
        self.writes: list[list[int]] = [[] for _ in range(n)]  # what it writes and did not allocate
        for v, f in enumerate(self.born):
            if 0 <= f < n:
                self.makes[f].append(v)
                self.uses[v].append(f)
                self.writers[v].append(f)
        functions = np.repeat(np.arange(n), np.diff(trace.use_offsets)).tolist()
        roles = {name: role(name) for name in set(trace.function_names)}
        sizes: list[int] = trace.variable_bytes.tolist()
        for f, v, flag in zip(functions, trace.use_variables.tolist(), trace.use_flags.tolist()):
            if f == self.born[v]:
                continue
            if roles[trace.function_names[f]] is Role.STATISTICS and any(sizes[v] == sizes[u] for u in self.makes[f]):
                flag = READ  # the input; a trace says of every operand that it may be a statistic
            if not self.uses[v] or self.uses[v][-1] != f:
                self.uses[v].append(f)
            if flag & READ:
                self.reads[f].append(v)
            if flag & WRITE and (not self.writers[v] or self.writers[v][-1] != f):
                self.writers[v].append(f)
                self.writes[f].append(v)
        allowed = (Role.MAKER, Role.STATISTICS) if without_statistics else (Role.MAKER,)
        whole = self._whole()
        self.repeatable: list[bool] = []
        for f, name in enumerate(trace.function_names):
            if self.writes[f]:
                fits = roles[name] is Role.LINK and len(self.writes[f]) == 1 and not self.makes[f]
            else:
                fits = roles[name] in allowed and len(self.makes[f]) > 0
            self.repeatable.append(fits and all(whole[v] for v in (*self.makes[f], *self.writes[f])))
        self.may_linger = frozenset() if linger_rate is None else self._may_linger(linger_rate, whole)
        # Of each function: the versions that it reads, each with the last function that still finds it.
        self.needs = [[self._lasting(self.version(v, f)) for v in read] for f, read in enumerate(self.reads)]

    @classmethod
    def beside(cls, problem: Problem, trace: Trace, *, without_statistics: bool = True) -> History:
        """The history of a problem's trace, where a variable may linger if a copy of it is faster than making it."""
        link = problem.link
        rate = min(link.out_bytes_per_second, link.in_bytes_per_second)
        return cls(trace, without_statistics=without_statistics, linger_rate=rate)

    def _may_linger(self, rate: float, whole: list[bool]) -> frozenset[int]:
        """Of the variables that functions of the iteration make, and that end in it."""
        seconds = self.trace.function_seconds.tolist()
        found = []
        for v in range(self.trace.variables):
            if self.born[v] < 0 or self.died[v] >= self.trace.functions or not whole[v]:
                continue
            writers = self.writers[v]
            readers = sum(self.repeatable[f] and f not in writers for f in self.uses[v])
            again = sum(seconds[f] if self.repeatable[f] else float("inf") for f in writers)
            if readers and readers * again * rate > self.trace.variable_bytes[v]:
                found.append(v)
        return frozenset(found)

    def _whole(self) -> list[bool]:
        """Whether each variable is a whole one, and no part of one."""
        trace = self.trace
        if trace.part_of is None or trace.part_first_chunk is None:
            return [True] * trace.variables
        count = np.bincount(trace.part_of, minlength=1)
        whole: list[bool] = ((count[trace.part_of] == 1) & (trace.part_first_chunk == 0)).tolist()
        return whole

    def version(self, variable: int, before: int) -> Version:
        """The version that a function finds in a variable."""
        return variable, bisect_left(self.writers[variable], before) - 1

    def _lasting(self, version: Version) -> tuple[int, int, int]:
        """A version, and the last function that finds it if nothing is dropped: a writer is the last one, too."""
        variable, number = version
        if variable in self.may_linger and number == len(self.writers[variable]) - 1:
            return variable, number, self.trace.functions
        following = self.writers[variable][number + 1 : number + 2]
        return variable, number, min([self.died[variable], *following])

    def repeats_alone(self, variable: int, before: int, limit: int | None = None) -> list[int] | None:
        """What runs again directly before a function if this variable alone has lost its bytes; else as `repeats`."""
        return self.repeats([self.version(variable, before)], before, variable.__eq__, limit)

    def repeats(
        self,
        wanted: Iterable[Version],
        before: int,
        dropped: Callable[[int], bool],
        limit: int | None = None,
        known: Iterable[int] = (),
    ) -> list[int] | None:
        """The functions that make versions again, in order, when they run directly before a function.

        Args:
            wanted: versions, which are made again whether or not they exist.
            before: the function.
            dropped: whether a variable that is live then has lost its bytes.
            limit: None is returned as soon as more functions are needed.
            known: functions that run again in any case, for which this was asked before; they are among the result.

        Returns:
            The functions; None if one of them may not run again.
        """
        found = set(known)
        todo = list(wanted)
        seen = set(todo)
        while todo:
            variable, number = todo.pop()
            if number < 0 or self.born[variable] < 0:
                return None  # bytes of an earlier iteration
            for writer in self.writers[variable][: number + 1]:
                if writer in found:
                    continue
                if not self.repeatable[writer]:
                    return None
                found.add(writer)
                if limit is not None and len(found) > limit:
                    return None
                for read, which, last in self.needs[writer]:
                    if (before > last or (self.born[read] >= 0 and dropped(read))) and (read, which) not in seen:
                        seen.add((read, which))
                        todo.append((read, which))
        return sorted(found)
