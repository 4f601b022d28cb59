"""Simulator: the timeline of a plan, by the executor's rules.

Three resources work at the same time: the computation, the link out, the link in. Each does one thing at a time, in
order, and memory is counted in chunks. The rules:

- Function i starts when function i - 1 has ended, all that it uses is resident, and there is room for what it
  allocates. What a function uses does not leave while the function waits or runs.
- Outs and ins follow their lists, as `swapd.plan` says. A move is skipped when its variable is not live, when its
  chunks have moved already, and when it is late: a function that uses the variable has come since `after_function`
  (for an out: or is about to run). A late out is not needed, as a sound plan counts the variable as resident by then.
- Chunks with a valid host copy are dropped, which takes no time.
- An in of a variable that the iteration before still has to swap out waits for that.
- What a function needs and no waiting in brings is swapped in on demand, ahead of the list.
- When nothing else can make progress, the unpinned variable whose next use is furthest makes room.

The iteration repeats; the last of several is reported, so that the figures are those of the steady state. With an
empty plan the timeline is that of demand mode.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field

from swapd.plan import Plan
from swapd.problem import Problem

_NEVER = math.inf


@dataclass
class Timeline:
    """What one iteration of the steady state does."""

    seconds: float = 0.0  # from the end of the iteration before to the end of this one
    compute_seconds: float = 0.0
    stall_seconds: float = 0.0  # seconds - compute_seconds
    out_bytes: int = 0  # copied to the host
    in_bytes: int = 0  # copied to the device
    dropped_bytes: int = 0  # left clean, without a copy
    out_count: int = 0
    in_count: int = 0
    demand_in_count: int = 0  # swap-ins that no plan asked for
    demand_out_count: int = 0  # swap-outs and drops that no plan asked for
    peak_chunks: int = 0  # most chunks held while a function runs
    average_chunks: float = 0.0
    starts: list[float] = field(default_factory=list)  # [n] when each function starts
    stall_by_function: dict[int, float] = field(default_factory=dict)  # seconds that it waited
    stall_by_variable: dict[int, float] = field(default_factory=dict)  # by what was waited for last; -1: for room


def simulate(problem: Problem, plan: Plan, iterations: int = 2) -> Timeline:
    """Run `iterations` of the problem under `plan` and report the last.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem.require_feasible()
    run = _Run(problem, plan)
    for _ in range(max(1, iterations)):
        run.iteration()
    return run.timeline


def _mask(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


def _lowest(mask: int, count: int) -> int:
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


class _Table:
    """What the event loop asks of a problem, as plain lists."""

    def __init__(self, problem: Problem) -> None:
        n = problem.functions
        self.chunks: list[int] = problem.chunks.tolist()
        self.full = [(1 << count) - 1 for count in self.chunks]
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
        self.births: list[list[int]] = [[] for _ in range(n + 1)]
        self.deaths: list[list[int]] = [[] for _ in range(n + 2)]  # by the function before which they are gone
        for v, died in enumerate(problem.died.tolist()):
            if born[v] >= 0:
                self.births[born[v]].append(v)
            self.deaths[died + 1].append(v)
        self.birth_chunks = [sum(self.chunks[v] for v in row) for row in self.births]
        self.entries = [v for v in range(problem.variables) if born[v] == -1]

    def next_use(self, v: int, function: int) -> int:
        """The function that uses v next after `function`, counted on into the next iteration."""
        n = len(self.needs)
        uses = self.uses[v]
        at = bisect_right(uses, function)
        if at < len(uses):
            return uses[at]
        later = self.uses[self.successor[v]] if self.successor[v] >= 0 else []
        return n + later[0] if later else 3 * n


class _Run:
    """The state of the machine. Masks are integers with one bit per chunk of a variable."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan, self.table = problem, plan, _Table(problem)
        self.n = problem.functions
        self.outs: deque[tuple[int, int, int]] = deque()  # variable, mask, after_function
        self.ins: deque[tuple[int, int, int, int]] = deque()  # variable, mask, after_function, outs to complete
        self.out_copy: tuple[int, int, bool] | None = None  # variable (-1: freed meanwhile), mask, planned
        self.in_copy: tuple[int, int] | None = None
        self.outs_queued = self.outs_done = 0  # of all iterations
        self.ran = [-1] * problem.variables  # the last function of this iteration that used each variable
        self.ended = -1  # the last function that has ended
        self.now = 0.0
        self.function_end = self.out_end = self.in_end = _NEVER
        machine = problem.machine
        self.latency = machine.latency_seconds
        self.out_rate = problem.chunk_bytes / machine.out_bytes_per_second
        self.in_rate = problem.chunk_bytes / machine.in_bytes_per_second
        self.timeline = Timeline()
        self.held_seconds = 0.0
        self.capacity = self.free = problem.capacity_chunks
        self._first_state()

    def _first_state(self) -> None:
        """Entry variables are where the plan leaves them.

        Chunks that are moved in first are on the host, and those that do not move but left under their previous number.
        """
        table = self.table
        self.absent = table.full.copy()  # not on the device
        self.valid = [0] * len(table.full)  # with a host copy that holds the same bytes
        self.alive = [False] * len(table.full)
        seen = [0] * len(table.full)
        away = [0] * len(table.full)
        left = [0] * len(table.full)
        moves = [(m.after_function, 0, m.variable, m.first_chunk, m.chunk_count) for m in self.plan.outs]
        moves += [(m.after_function, 1, m.variable, m.first_chunk, m.chunk_count) for m in self.plan.ins]
        for _, is_in, v, first, count in sorted(moves):
            mask = _mask(first, count)
            left[v] = left[v] & ~mask if is_in else left[v] | mask
            away[v] |= mask & ~seen[v] if is_in else 0
            seen[v] |= mask
        for v in table.entries:
            if table.previous[v] >= 0 and not self.problem.dormant[v]:
                self.alive[v] = True
                gone = away[v] | left[table.previous[v]] & ~seen[v]
                self.absent[v] = self.valid[v] = gone & table.full[v]
                self.free -= table.chunks[v] - self.absent[v].bit_count()

    def iteration(self) -> None:
        """Run one iteration."""
        self._arrive()
        began, timeline = self.now, self.timeline
        while self.ended < self.n - 1:
            self._start_outs()
            if self.function_end == _NEVER:
                self._start_function()
            if self.in_end == _NEVER:
                self._start_ins()
            if min(self.function_end, self.out_end, self.in_end) == _NEVER:
                self._unblock()
            self._advance()
        self._leave()
        timeline.seconds = self.now - began
        timeline.compute_seconds = sum(self.table.seconds)
        timeline.stall_seconds = max(0.0, timeline.seconds - timeline.compute_seconds)
        timeline.average_chunks = self.held_seconds / timeline.seconds if timeline.seconds > 0 else 0.0

    def _arrive(self) -> None:
        """The iteration starts: entry variables of unknown past appear, and its moves join the queues."""
        table = self.table
        self.timeline = Timeline()
        self.held_seconds = 0.0
        self.ended = -1
        self.ran = [-1] * len(self.ran)
        self.ready = self.now
        self.waits_for = -1
        for v in table.entries:
            if table.previous[v] < 0:
                self._allocate(v)
        guard: dict[int, int] = {}  # variable: how many outs must be complete before it may come in
        at = self.outs_done
        if self.out_copy is not None:
            at += self.out_copy[2]
            guard[self.out_copy[0]] = at
        for v, _, _ in self.outs:
            at += 1
            guard[v] = at
        base = self.outs_queued
        for out in self.plan.outs:
            self.outs.append((out.variable, _mask(out.first_chunk, out.chunk_count), out.after_function))
        self.outs_queued += len(self.plan.outs)
        for move in self.plan.ins:
            needed = base + move.after_outs if move.after_outs else 0
            needed = max(needed, guard.get(move.variable, 0))
            self.ins.append((move.variable, _mask(move.first_chunk, move.chunk_count), move.after_function, needed))
        for v in table.deaths[0]:
            self._release(v)

    def _leave(self) -> None:
        """The iteration ends: what survives takes its number of the next one, in the queues too."""
        table = self.table
        for v in table.births[self.n]:
            self._allocate(v)
        absent, valid, alive = self.absent, self.valid, self.alive
        for v in table.deaths[self.n + 1]:
            if table.successor[v] < 0:
                self._release(v)
        self.absent, self.valid = table.full.copy(), [0] * len(valid)
        self.alive = [False] * len(valid)
        for v in table.entries:
            before = table.previous[v]
            if before >= 0:
                self.absent[v], self.valid[v], self.alive[v] = absent[before], valid[before], alive[before]
        name = [*table.successor, -1]
        self.outs = deque((name[v], mask, -1) for v, mask, _ in self.outs)
        self.ins = deque((name[v], mask, -1, needed) for v, mask, _, needed in self.ins)
        if self.out_copy is not None:
            self.out_copy = (name[self.out_copy[0]], *self.out_copy[1:])
        if self.in_copy is not None:
            self.in_copy = (name[self.in_copy[0]], self.in_copy[1])

    def _allocate(self, v: int) -> None:
        self.alive[v] = True
        self.absent[v] = self.valid[v] = 0
        self.free -= self.table.chunks[v]

    def _release(self, v: int) -> None:
        if not self.alive[v]:
            return
        self.alive[v] = False
        self.free += self.table.chunks[v] - self.absent[v].bit_count()
        if self.out_copy is not None and self.out_copy[0] == v:
            self.free -= self.out_copy[1].bit_count()  # free when the copy ends
            self.out_copy = (-1, *self.out_copy[1:])
        if self.in_copy is not None and self.in_copy[0] == v:
            self.in_copy = (-1, self.in_copy[1])

    def _start_outs(self) -> None:
        while self.out_end == _NEVER and self.outs:
            v, mask, after = self.outs[0]
            if after > self.ended:
                return
            if v >= 0 and self.alive[v] and self.ran[v] <= after and v not in self.table.pins[self.ended + 1]:
                if self.in_copy is not None and self.in_copy[0] == v and self.in_copy[1] & mask:
                    return
                mask = self._drop(v, mask & self.table.full[v] & ~self.absent[v])
                if mask:
                    self._copy_out(v, mask, True)
                    self.outs.popleft()
                    return
            self.outs.popleft()
            self.outs_done += 1

    def _drop(self, v: int, mask: int) -> int:
        """Drop what is clean of `mask`. Returns what has to be copied."""
        clean = mask & self.valid[v]
        self.absent[v] |= clean
        self.free += clean.bit_count()
        self.timeline.dropped_bytes += clean.bit_count() * self.problem.chunk_bytes
        return mask & ~clean

    def _copy_out(self, v: int, mask: int, planned: bool) -> None:
        count = mask.bit_count()
        self.out_copy = (v, mask, planned)
        self.out_end = self.now + self.latency + count * self.out_rate
        self.timeline.out_bytes += count * self.problem.chunk_bytes
        self.timeline.out_count += 1

    def _start_ins(self) -> None:
        if self.function_end == _NEVER and self._demand():
            return
        while self.ins:
            v, mask, after, needed = self.ins[0]
            if after > self.ended or self.outs_done < needed:
                return
            if v >= 0 and self.alive[v] and self.ran[v] <= after:
                mask &= self.absent[v]
                if mask.bit_count() > self.free:
                    return
                if mask:
                    self._copy_in(v, mask)
                    self.ins.popleft()
                    return
            self.ins.popleft()

    def _copy_in(self, v: int, mask: int) -> None:
        count = mask.bit_count()
        self.free -= count
        self.in_copy = (v, mask)
        self.in_end = self.now + self.latency + count * self.in_rate
        self.timeline.in_bytes += count * self.problem.chunk_bytes
        self.timeline.in_count += 1
        self.timeline.peak_chunks = max(self.timeline.peak_chunks, self.capacity - self.free)

    def _demand(self) -> bool:
        """Whether the link in is taken, or kept, for what the waiting function needs and no queued in brings."""
        for v in self.table.needs[self.ended + 1] if self.ended + 1 < self.n else ():
            mask = self.absent[v]
            if mask and not any(queued[0] == v for queued in self.ins):
                if mask.bit_count() <= self.free:
                    self.timeline.demand_in_count += 1
                    self._copy_in(v, mask)
                return True
        return False

    def _start_function(self) -> None:
        i = self.ended + 1
        if i == self.n:
            return
        copying = self.out_copy[0] if self.out_copy is not None else -1
        for v in self.table.needs[i]:
            if self.absent[v] or v == copying:
                self.waits_for = v
                return
        if self.free < self.table.birth_chunks[i]:
            self.waits_for = -1
            return
        for v in self.table.births[i]:
            self._allocate(v)
        for v in self.table.pins[i]:
            self.ran[v] = i
        timeline, stall = self.timeline, self.now - self.ready
        if stall > 0:
            timeline.stall_by_function[i] = stall
            timeline.stall_by_variable[self.waits_for] = timeline.stall_by_variable.get(self.waits_for, 0.0) + stall
        timeline.starts.append(self.now)
        timeline.peak_chunks = max(timeline.peak_chunks, self.capacity - self.free)
        self.function_end = self.now + self.table.seconds[i]

    def _unblock(self) -> None:
        """Nothing is under way, and function `ended + 1` waits: swap in what it needs, or evict to make room."""
        i = self.ended + 1
        missing = next((v for v in self.table.needs[i] if self.absent[v]), None)
        need = self.table.birth_chunks[i] if missing is None else self.absent[missing].bit_count()
        while self.free < need:
            room = self.free
            self._evict(need - self.free)
            if self.out_copy is not None:
                return
            if self.free == room:
                raise RuntimeError(f"no room for function {i}, which fits by itself")
        if missing is not None:
            self.timeline.demand_in_count += 1
            self._copy_in(missing, self.absent[missing])
        else:
            self._start_function()

    def _evict(self, count: int) -> None:
        """Move out `count` chunks, or fewer, of the unpinned variable whose next use is furthest."""
        i = self.ended + 1
        pins, full, best, victim = self.table.pins[i], self.table.full, -1, -1
        for v, alive in enumerate(self.alive):
            if alive and self.absent[v] != full[v] and v not in pins:
                distance = self.table.next_use(v, self.ended)
                if distance > best:
                    best, victim = distance, v
        if victim >= 0:
            self.timeline.demand_out_count += 1
            mask = self._drop(victim, _lowest(full[victim] & ~self.absent[victim], count))
            if mask:
                self._copy_out(victim, mask, False)

    def _advance(self) -> None:
        """Go to the next end of a copy or of a function."""
        then = min(self.function_end, self.out_end, self.in_end)
        self.held_seconds += (self.capacity - self.free) * (then - self.now)
        self.now = then
        if self.out_end == then and self.out_copy is not None:
            v, mask, planned = self.out_copy
            if v >= 0:
                self.absent[v] |= mask
                self.valid[v] |= mask
            self.free += mask.bit_count()
            self.outs_done += planned
            self.out_copy, self.out_end = None, _NEVER
        if self.in_end == then and self.in_copy is not None:
            v, mask = self.in_copy
            if v >= 0:
                self.absent[v] &= ~mask
            else:
                self.free += mask.bit_count()
            self.in_copy, self.in_end = None, _NEVER
        if self.function_end == then:
            self.ended += 1
            self.ready, self.function_end = self.now, _NEVER
            for v in self.table.writes[self.ended]:
                self.valid[v] = 0
            if self.ended < self.n:
                for v in self.table.deaths[self.ended + 1]:
                    self._release(v)
