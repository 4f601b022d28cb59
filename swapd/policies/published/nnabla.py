"""The policy of Neural Network Libraries (github.com/sony/nnabla, `SwapInOutScheduler`), the program that the seed
paper's authors published: the schedule window as a ledger of bytes.

A head runs along the variable-sequence and a tail behind it. Three sums are kept: what is swapped in, what is being
swapped out, and what the head has passed and the functions have not used up (*prefetched*). Before each function

    the head goes on while prefetched bytes stay within the prefetch limit, one and a half times the budget unless said
        otherwise, and what is swapped in stays within the budget. A variable on its way out is kept after all; one that
        the program has yet to allocate takes no room until its function; another one is swapped in, for which the
        oldest swap-outs are completed until there is room.
    room is made for what the function allocates. If completing all swap-outs does not make enough, prefetches are taken
        back, the latest first, and forbidden until after this function; then scheduling starts over.

After each function, those of its variables that the head has not passed again are swapped out. At the end of the
iteration everything is swapped out, and the next one begins with nothing on the device (but for what the very next
function uses).

Two things differ here. That program waits for the whole device at the end of each iteration, while here the last
swap-outs go on beside the next iteration's first functions; and sizes are in chunks here. What that program drops
without a copy, because the host has it, is dropped here too.
"""

from __future__ import annotations

from itertools import accumulate, count

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.simulation.steps import steps_of

PREFETCH_SHARE = 1.5  # of the budget


def nnabla(problem: Problem, prefetch_bytes: int | None = None) -> Plan:
    """Plan by the ledger; `prefetch_bytes` limits how far the head runs ahead.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
        ValueError: the limit is not positive.
    """
    plan = nnabla_within(problem, None, prefetch_bytes)
    assert plan is not None
    return plan


def nnabla_within(problem: Problem, passes: int | None, prefetch_bytes: int | None = None) -> Plan | None:
    """As `nnabla`, but None if scheduling takes more than so many `passes`. Each pass goes through the whole iteration.

    Raises what `nnabla` raises.
    """
    problem.require_feasible()
    if prefetch_bytes is not None and prefetch_bytes <= 0:
        raise ValueError(f"the prefetch limit must be positive, not {prefetch_bytes}")
    if problem.fits:
        return Plan(policy="nnabla")
    limit = int(problem.capacity_chunks * PREFETCH_SHARE)
    if prefetch_bytes is not None:
        limit = max(1, prefetch_bytes // problem.chunk_bytes)
    stops: dict[int, int] = {}
    for _ in count() if passes is None else range(passes):
        known = dict(stops)
        ledger = _Ledger(problem, limit, stops)
        try:
            ledger.run()
            return Plan(outs=tuple(ledger.outs), ins=tuple(ledger.ins), policy="nnabla")
        except _StartOver:
            if stops == known:
                raise RuntimeError("the ledger starts over although no prefetch was forbidden") from None
    return None


class _StartOver(Exception):
    """Prefetches were taken back, so scheduling has to start over."""


class _Ledger:
    """One pass over the iteration."""

    def __init__(self, problem: Problem, limit: int, stops: dict[int, int]) -> None:
        self.problem, self.limit, self.capacity = problem, limit, problem.capacity_chunks
        self.stops = stops  # entry of the sequence: the function before which the head may not pass it
        steps = steps_of(problem)
        self.steps, self.chunks, self.n = steps, steps.chunks, problem.functions
        self.sequence = [(f, v) for f in range(self.n) for v in steps.sized[f]]
        self.first = list(accumulate(map(len, steps.sized), initial=0))  # the index of each function's first entry
        self.born: list[int] = problem.born.tolist()
        self.count = [0] * problem.variables  # how often the variable occurs between the function and the head
        self.inside = [False] * problem.variables  # counted as swapped in
        self.waiting: dict[int, int] = {}  # on the way out, the oldest first: variable, function after which it leaves
        self.swapped_in = self.swapped_out = self.prefetched = self.head = 0
        self.outs: list[Out] = []
        self.ins: list[In] = []

    def run(self) -> None:
        """Schedule the iteration. Raises _StartOver."""
        for v in self.steps.entries:
            if self._stays(v):
                self._count_in(v)
        for v in self.steps.entries:
            if self.steps.previous[v] < 0 and self.chunks[v]:
                self._send_out(v, -1)
        for function in range(self.n):
            for v in self.steps.deaths[function]:
                self._forget(v)
            self._extend(function)
            self._make_room(function)
            self._leave(function)
        self._finish()

    def _extend(self, function: int) -> None:
        """Move the head on, at least past all of the function's own entries."""
        for v in self.steps.sized[function]:
            if v in self.waiting:
                self._keep(v)
        while self.head < len(self.sequence):
            user, v = self.sequence[self.head]
            size, own = self.chunks[v], user == function
            if not own and self.stops.get(self.head, 0) > function:
                break
            if self.count[v] == 0:
                if not own and (self.prefetched + size > self.limit or self.swapped_in + size > self.capacity):
                    break
                if v in self.waiting:
                    self._keep(v)
                elif not self.inside[v] and self.born[v] < user:
                    self._require(size, function)
                    self.ins.append(In(v, 0, size, function - 1, len(self.outs), user))
                    self._count_in(v)
                self.prefetched += size
            self.count[v] += 1
            self.head += 1

    def _make_room(self, function: int) -> None:
        """Make room for what the function allocates."""
        born = [v for v in self.steps.sized[function] if not self.inside[v]]
        self._require(sum(self.chunks[v] for v in born), function)
        for v in born:
            self._count_in(v)

    def _require(self, need: int, function: int) -> None:
        """Complete swap-outs until there is room for `need` chunks; take prefetches back if that is not enough."""
        if not self._complete(need):
            self._take_back(function, self.swapped_in + need - self.capacity)

    def _complete(self, need: int) -> bool:
        """Complete the oldest swap-outs until there is room for `need` chunks. Returns whether there is."""
        while self.swapped_in + self.swapped_out + need > self.capacity and self.waiting:
            v = next(iter(self.waiting))
            self.outs.append(Out(v, 0, self.chunks[v], self.waiting.pop(v)))
            self.swapped_out -= self.chunks[v]
        return self.swapped_in + self.swapped_out + need <= self.capacity

    def _take_back(self, function: int, excess: int) -> None:
        """Forbid the latest prefetches until after `function`, enough to free `excess` chunks. Raises _StartOver."""
        counts = self.count.copy()
        for index in range(self.head - 1, self.first[function + 1] - 1, -1):
            v = self.sequence[index][1]
            if counts[v] == 1 and self.inside[v]:
                self.stops[index] = function + 1
                excess -= self.chunks[v]
                if excess <= 0:
                    raise _StartOver
            counts[v] -= 1
        raise RuntimeError(f"function {function} fits by itself, and does not although nothing is prefetched")

    def _leave(self, function: int) -> None:
        """Swap out what the head has not passed again."""
        for v in self.steps.sized[function]:
            self.count[v] -= 1
            if self.count[v] == 0:
                self.prefetched -= self.chunks[v]
                self.inside[v] = False
                self.swapped_in -= self.chunks[v]
                if self.problem.died[v] > function:
                    self._send_out(v, function)

    def _finish(self) -> None:
        """The rest leaves, so that the next iteration begins with nothing on the device."""
        for v in self.steps.deaths[self.n]:
            self._forget(v)
        for v in self.steps.births[self.n]:
            if self.chunks[v]:
                self._send_out(v, self.n - 1)
        for v in list(self.waiting):
            successor = self.steps.successor[v]
            ends_here = self.waiting[v] == self.n - 1 and self.problem.died[successor] < 0
            if successor < 0 or ends_here or self._stays(successor):
                self._forget(v)
        self._complete(self.capacity + 1)

    def _stays(self, v: int) -> bool:
        """Whether the function before the end of the iteration and the one after it both use an entry variable."""
        before = self.steps.previous[v]
        if before < 0 or not self.chunks[v] or not self.n or v not in self.steps.pins[0]:
            return False
        return self.born[before] == self.n or before in self.steps.pins[self.n - 1]

    def _send_out(self, v: int, after: int) -> None:
        self.waiting[v] = after
        self.swapped_out += self.chunks[v]

    def _keep(self, v: int) -> None:
        del self.waiting[v]
        self.swapped_out -= self.chunks[v]
        self._count_in(v)

    def _forget(self, v: int) -> None:
        if self.waiting.pop(v, None) is not None:
            self.swapped_out -= self.chunks[v]

    def _count_in(self, v: int) -> None:
        self.inside[v] = True
        self.swapped_in += self.chunks[v]
