"""Groups: which functions of an iteration are one operator in parts.

An integration runs each operator that it splits within `SplitLog.split`, and asks `SplitLog.part_bytes` how large a
part may be. The log counts the functions that begin meanwhile, so that nothing else has to mark them.

    part_bytes = log.part_bytes(operator, shapes) or half_of_what_is_free
    with log.split(operator, shapes, part_bytes):
        run the parts

An operator that fails meanwhile is no group. Only the thread that ends iterations makes groups. Functions of other
threads are counted with those of that thread, so an iteration whose counts do not add up has no groups. The first
iteration with a split has none either, so that a program that never splits pays nothing for counting.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class Counting(Protocol):
    """What a log uses of a core."""

    def stats(self) -> dict[str, int | float]: ...


class Group(NamedTuple):
    """One operator in parts: the functions from `first` on, up to but without `stop`."""

    operator: str
    shapes: str
    part_bytes: int  # what a part was allowed to use at once
    first: int
    stop: int


class SplitLog:
    """The groups of one core's current iteration, and the limit that the planner chose for parts."""

    def __init__(self, core: Counting) -> None:
        self._core = core
        self._groups: list[Group] = []
        self._began: int | None = None  # the core's functions when the iteration began; None if not counted
        self._wanted = False
        self._thread = 0
        self._nested = False
        self.limit: int | None = None  # the bytes of a part that the planner chose; None until then

    def part_bytes(self, operator: str, shapes: str) -> int | None:
        """What a part of an operator may use at once, if the planner has chosen it; else None."""
        return self.limit

    @contextmanager
    def split(self, operator: str, shapes: str, part_bytes: int) -> Iterator[None]:
        """The functions that begin within are parts of one operator. An operator split within another is part of it."""
        self._wanted = True
        if self._nested or self._began is None or threading.get_ident() != self._thread:
            yield
            return
        self._nested = True
        first = self._functions() - self._began
        try:
            yield
            self._groups.append(Group(operator, shapes, part_bytes, first, self._functions() - self._began))
        finally:
            self._nested = False

    def end_iteration(self, functions: int) -> tuple[Group, ...]:
        """End an iteration of so many `functions`, and return its groups. The next iteration begins."""
        if not self._wanted:
            return ()
        count = self._functions()
        known = self._began is not None and count - self._began == functions
        found = tuple(group for group in self._groups if group.stop > group.first) if known else ()
        self._groups, self._began, self._thread = [], count, threading.get_ident()
        return found

    def _functions(self) -> int:
        return int(self._core.stats()["functions"])
