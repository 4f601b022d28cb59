"""Simulated machine: memory, a processor and two links. `swapd.simulation.simulator` states the rules it goes by."""

from __future__ import annotations

import math
from collections import deque

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Event, Held, Lost, Run, SimulationResult, Stall
from swapd.simulation.steps import lowest, mask_of, steps_of

_NEVER = math.inf
_PIECE_BYTES = 4 << 20  # of one copy of the executor: the next piece is mapped, and the last unmapped, meanwhile


class SimulatedMachine:
    """The state of the machine. Masks are integers with one bit per chunk of a variable."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.steps = problem, steps_of(problem)
        self.n = problem.functions
        self.outs: deque[tuple[int, int, int]] = deque()  # variable, mask, after_function
        self.ins: deque[tuple[int, int, int, int]] = deque()  # variable, mask, after_function, outs to complete
        self.queued = [0] * (problem.variables + 1)  # how many of the ins are of each variable; the last: of none
        self.backs: deque[tuple[int, int, int]] = deque()  # write-backs: variable, mask, after_function
        # Variable (-1 if freed meanwhile), mask, whether it is an out of the plan, whether it is a write-back. Where
        # unmapping takes time, also what is dropped.
        self.out_copy: tuple[int, int, bool, bool] | None = None
        self.in_copy: tuple[int, int] | None = None
        self.outs_queued = self.outs_done = 0  # of all iterations
        self.ran = [-1] * problem.variables  # the last function of this iteration that used each variable
        self.ended = -1  # the last function that has ended
        self.now = 0.0
        self.function_end = self.out_end = self.in_end = _NEVER
        machine = self.machine = problem.machine
        self.latency = machine.latency_seconds
        self.out_rate = problem.chunk_bytes / machine.out_bytes_per_second
        self.in_rate = problem.chunk_bytes / machine.in_bytes_per_second
        self.map, self.unmap = machine.map_seconds, machine.unmap_seconds
        self.piece = max(1, _PIECE_BYTES // problem.chunk_bytes)
        self.mapped_from = _NEVER  # since when the next in has been mapped, beside the copy under way
        self.unmapping = 0.0  # of the last out, after its copy
        self.out_moves, self.back_moves = (
            [(m.variable, mask_of(m.first_chunk, m.chunk_count), m.after_function) for m in moves]
            for moves in (plan.outs, plan.write_backs)
        )
        self.in_moves = [
            (m.variable, mask_of(m.first_chunk, m.chunk_count), m.after_function, m.after_outs) for m in plan.ins
        ]
        self.timeline = SimulationResult()
        self.log: list[Event] | None = None  # of this iteration, copies still under way as it began included
        self.held_seconds = 0.0
        self.capacity = self.free = problem.capacity_chunks
        self._first_state()

    def _first_state(self) -> None:
        """Put entry variables where the plan leaves them.

        A chunk is on the host if its first move is an in, or if it does not move but was last moved out under its
        previous number.
        """
        steps = self.steps
        self.absent = steps.full.copy()  # not on the device
        self.valid = [0] * len(steps.full)  # with a host copy that holds the same bytes
        self.alive = [False] * len(steps.full)
        seen = [0] * len(steps.full)
        away = [0] * len(steps.full)
        left = [0] * len(steps.full)
        moves = [(after, False, v, mask) for v, mask, after in self.out_moves]
        moves += [(after, True, v, mask) for v, mask, after, _ in self.in_moves]
        for _, is_in, v, mask in sorted(moves, key=lambda move: move[:2]):
            left[v] = left[v] & ~mask if is_in else left[v] | mask
            away[v] |= mask & ~seen[v] if is_in else 0
            seen[v] |= mask
        for v in steps.entries:
            if steps.previous[v] >= 0 and not self.problem.dormant[v]:
                self.alive[v] = True
                gone = away[v] | left[steps.previous[v]] & ~seen[v]
                self.absent[v] = self.valid[v] = gone & steps.full[v]
                self.free -= steps.chunks[v] - self.absent[v].bit_count()

    def iteration(self) -> None:
        """Run one iteration."""
        self._arrive()
        timeline, outs, ins, backs = self.timeline, self.outs, self.ins, self.backs
        while self.ended < self.n - 1:
            # What is asked here is what those functions would ask first: in most steps none of them has anything to do.
            ended = self.ended
            if self.out_end == _NEVER and ((outs and outs[0][2] <= ended) or (backs and backs[0][2] <= ended)):
                self._start_outs()
            if self.function_end == _NEVER:
                self._start_function()
            if self.in_end == _NEVER and (self.function_end == _NEVER or (ins and ins[0][2] <= ended)):
                self._start_ins()
            if self.map and self.in_end != _NEVER and self.mapped_from == _NEVER and self._next_in_is_due():
                self.mapped_from = self.now
            if (then := min(self.function_end, self.out_end, self.in_end)) == _NEVER:
                self._unblock()
                then = min(self.function_end, self.out_end, self.in_end)
            self._advance(then)
        self._leave()
        timeline.seconds = self.now - self.began
        timeline.compute_seconds = sum(self.steps.seconds)
        timeline.stall_seconds = max(0.0, timeline.seconds - timeline.compute_seconds)
        timeline.average_chunks = self.held_seconds / timeline.seconds if timeline.seconds > 0 else 0.0

    def _arrive(self) -> None:
        """The iteration starts: entry variables of unknown past appear, and its moves join the queues."""
        steps = self.steps
        self.timeline = SimulationResult()
        self.began = self.now
        if self.log is not None:
            name = [*steps.successor, -1]
            under_way = [copy for copy in self.log if isinstance(copy, Copy) and copy.end > self.now]
            self.log = [copy._replace(variable=name[copy.variable]) for copy in under_way]
        self.held_seconds = 0.0
        self.ended = -1
        self.ran = [-1] * len(self.ran)
        self.ready = self.now
        self.waits_for = -1
        for v in steps.entries:
            if steps.previous[v] < 0:
                self._allocate(v)
        guard: dict[int, int] = {}  # variable: how many outs must be complete before it may come in
        at = self.outs_done
        if self.out_copy is not None and not self.out_copy[3]:
            at += self.out_copy[2]
            guard[self.out_copy[0]] = at
        for v, _, _ in self.outs:
            at += 1
            guard[v] = at
        base = self.outs_queued
        self.outs.extend(self.out_moves)
        self.outs_queued += len(self.out_moves)
        self.backs.extend(self.back_moves)
        for v, mask, after, outs in self.in_moves:
            self.ins.append((v, mask, after, max(base + outs if outs else 0, guard.get(v, 0))))
            self.queued[v] += 1
        for v in steps.deaths[0]:
            self._release(v)

    def _leave(self) -> None:
        """The iteration ends: what survives gets its number in the next iteration, in the queues too."""
        steps = self.steps
        for v in steps.births[self.n]:
            self._allocate(v)
        absent, valid, alive = self.absent, self.valid, self.alive
        for v in steps.deaths[self.n + 1]:
            if steps.successor[v] < 0:
                self._release(v)
        self.absent, self.valid = steps.full.copy(), [0] * len(valid)
        self.alive = [False] * len(valid)
        for v in steps.entries:
            before = steps.previous[v]
            if before >= 0:
                self.absent[v], self.valid[v], self.alive[v] = absent[before], valid[before], alive[before]
        name = [*steps.successor, -1]
        self.outs = deque((name[v], mask, -1) for v, mask, _ in self.outs)
        self.backs = deque((name[v], mask, -1) for v, mask, _ in self.backs)
        self.ins = deque((name[v], mask, -1, needed) for v, mask, _, needed in self.ins)
        self.queued = [0] * len(self.queued)
        for v, *_ in self.ins:
            self.queued[v] += 1
        if self.out_copy is not None:
            self.out_copy = (name[self.out_copy[0]], *self.out_copy[1:])
        if self.in_copy is not None:
            self.in_copy = (name[self.in_copy[0]], self.in_copy[1])

    def _allocate(self, v: int) -> None:
        self.alive[v] = True
        self.absent[v] = self.valid[v] = 0
        self.free -= self.steps.chunks[v]

    def _release(self, v: int) -> None:
        if not self.alive[v]:
            return
        if self.log is not None and self.absent[v]:
            self.log.append(Lost(v, self.absent[v], self.now))
        self.alive[v] = False
        self.free += self.steps.chunks[v] - self.absent[v].bit_count()
        if self.out_copy is not None and self.out_copy[0] == v:
            self.free -= self.out_copy[1].bit_count()  # free when the copy ends
            self.out_copy = (-1, *self.out_copy[1:])
        if self.in_copy is not None and self.in_copy[0] == v:
            self.in_copy = (-1, self.in_copy[1])

    def _start_outs(self) -> None:
        while self.out_end == _NEVER and self.outs:
            v, mask, after = self.outs[0]
            if after > self.ended:
                break
            if v >= 0 and self.alive[v] and self.ran[v] <= after and v not in self.steps.pins[self.ended + 1]:
                if self.in_copy is not None and self.in_copy[0] == v and self.in_copy[1] & mask:
                    return
                mask = self._drop(v, mask & self.steps.full[v] & ~self.absent[v], True)
                if mask and self.out_copy is None:
                    self._copy_out(v, mask, True, self.now - self.ready if after == self.ended else _NEVER)
                    mask = 0
                if self.out_copy is not None:
                    if not mask:
                        self.outs.popleft()
                    return
            self.outs.popleft()
            self.outs_done += 1
        while self.out_end == _NEVER and self.backs and self.backs[0][2] <= self.ended:
            self._start_write_back(*self.backs.popleft())

    def _start_write_back(self, v: int, mask: int, after: int) -> None:
        """Copy what is not on the host yet, if no function after `after` has used the variable or is about to."""
        if v < 0 or not self.alive[v] or self.ran[v] > after or v in self.steps.pins[self.ended + 1]:
            return
        mask &= self.steps.full[v] & ~self.absent[v] & ~self.valid[v]
        if mask:
            self._copy_out(v, mask, False, self.now - self.ready if after == self.ended else _NEVER, stays=True)

    def _drop(self, v: int, mask: int, planned: bool = False) -> int:
        """Drop the clean chunks of `mask`. Returns the mask of those that have to be copied."""
        clean = mask & self.valid[v]
        count = clean.bit_count()
        self.timeline.dropped_bytes += self.steps.bytes_in(v, clean)
        if clean and self.unmap:
            self.out_copy = (v, clean, planned and clean == mask, False)
            self.out_end, self.unmapping = self.now + count * self.unmap, 0.0
        else:
            self.absent[v] |= clean
            self.free += count
        return mask & ~clean

    def _copy_out(self, v: int, mask: int, planned: bool, waited: float = 0.0, stays: bool = False) -> None:
        """Copy out what could have begun `waited` seconds ago, had the link been free."""
        count, size = mask.bit_count(), self.steps.bytes_in(v, mask)
        self.out_copy = (v, mask, planned, stays)
        begun = self.now + self.latency
        self.out_end = begun + size / self.machine.out_bytes_per_second
        if self.unmap:
            first = min(count, self.piece)
            hidden = min(self.unmapping, first * self.out_rate, waited)  # while the last was unmapped
            self.out_end = max(begun, self.out_end - hidden)
            self.unmapping = 0.0 if stays else first * self.unmap
            self.out_end += self.unmapping
            self.out_end += 0.0 if stays else (count - first) * max(0.0, self.unmap - self.out_rate)
        self.timeline.out_bytes += size
        self.timeline.write_back_bytes += stays * size
        self.timeline.out_count += 1
        if self.log is not None:
            self.log.append(Copy(True, v, size, planned, self.now, self.out_end, mask))

    def _start_ins(self) -> None:
        if self._waits_for_room() or (self.function_end == _NEVER and self._demand()):
            return
        while self.ins and self.in_end == _NEVER:
            v, mask, after, needed = self.ins[0]
            if after > self.ended or self.outs_done < needed:
                return
            if v >= 0 and self.alive[v] and self.ran[v] <= after:
                mask &= self.absent[v]
                if mask.bit_count() > self.free:
                    return
                if mask:
                    self._copy_in(v, mask, True)
            self.ins.popleft()
            self.queued[v] -= 1

    def _waits_for_room(self) -> bool:
        """Whether function `ended + 1` lacks nothing but room; what is free is for it then."""
        return self.function_end == _NEVER and self.waits_for < 0

    def _next_in_is_due(self) -> bool:
        """Whether an in could start if the link were free."""
        if self.function_end == _NEVER and self.ended + 1 < self.n and self.in_copy is not None:
            needs = (v for v in self.steps.needs[self.ended + 1] if self.absent[v] and v != self.in_copy[0])
            if any(self.absent[v].bit_count() <= self.free for v in needs):
                return True
        if self._waits_for_room() or not self.ins or self.ins[0][2] > self.ended or self.outs_done < self.ins[0][3]:
            return False
        v, mask, _, _ = self.ins[0]
        return v >= 0 and self.alive[v] and (mask & self.absent[v]).bit_count() <= self.free

    def _copy_in(self, v: int, mask: int, planned: bool) -> None:
        count, size = mask.bit_count(), self.steps.bytes_in(v, mask)
        self.free -= count
        self.in_copy = (v, mask)
        self.in_end = self.now + self.latency + size / self.machine.in_bytes_per_second
        if self.map:
            first = min(count, self.piece)
            lead = min(max(0.0, self.now - self.mapped_from), self.piece * self.in_rate)
            self.in_end += max(0.0, first * self.map - lead) + (count - first) * max(0.0, self.map - self.in_rate)
            self.mapped_from = _NEVER
        self.timeline.in_bytes += size
        self.timeline.in_count += 1
        if self.log is not None:
            self.log.append(Copy(False, v, size, planned, self.now, self.in_end, mask))
        self.timeline.peak_chunks = max(self.timeline.peak_chunks, self.capacity - self.free)

    def _demand(self) -> bool:
        """Swap in what the waiting function needs and no queued in brings. Returns whether the link is kept for it."""
        for v in self.steps.needs[self.ended + 1] if self.ended + 1 < self.n else ():
            mask = self.absent[v]
            if mask and not self.queued[v]:
                if mask.bit_count() <= self.free:
                    self.timeline.demand_in_count += 1
                    self._copy_in(v, mask, False)
                return True
        return False

    def _start_function(self) -> None:
        i, steps, absent, ran = self.ended + 1, self.steps, self.absent, self.ran
        copying = self.out_copy[0] if self.out_copy is not None and not self.out_copy[3] else -1
        for v in steps.needs[i]:
            if absent[v] or v == copying:
                self.waits_for = v
                return
        if self.free < steps.birth_chunks[i]:
            self.waits_for = -1
            return
        for v in steps.births[i]:
            self._allocate(v)
        for v in steps.pins[i]:
            ran[v] = i
        if self.out_copy is not None and self.out_copy[3] and self.out_copy[0] in steps.writes[i]:
            self.out_copy = (self.out_copy[0], 0, False, True)  # what it copies is about to change
        timeline, stall = self.timeline, self.now - self.ready
        if stall > 0:
            timeline.stall_by_function[i] = stall
            timeline.stall_by_variable[self.waits_for] = timeline.stall_by_variable.get(self.waits_for, 0.0) + stall
        timeline.starts.append(self.now)
        if self.capacity - self.free > timeline.peak_chunks:
            timeline.peak_chunks = self.capacity - self.free
        self.function_end = self._end_of(i)
        if self.log is not None:
            if stall > 0:
                self.log.append(Stall(i, self.waits_for, self.ready, self.now))
            self.log.append(Run(i, self.now, self.function_end))

    def _end_of(self, i: int) -> float:
        """When function i, which starts now, will have ended."""
        return self.now + self.steps.seconds[i]

    def _unblock(self) -> None:
        """Nothing is under way, and function `ended + 1` waits: swap in what it needs, or evict to make room."""
        i = self.ended + 1
        missing = next((v for v in self.steps.needs[i] if self.absent[v]), None)
        need = self.steps.birth_chunks[i] if missing is None else self.absent[missing].bit_count()
        while self.free < need:
            room = self.free
            self._evict(need - self.free)
            if self.out_copy is not None:
                return
            if self.free == room:
                raise RuntimeError(f"no room for function {i}, which fits by itself")
        if missing is not None:
            self.timeline.demand_in_count += 1
            self._copy_in(missing, self.absent[missing], False)
        else:
            self._start_function()

    def _evict(self, count: int) -> None:
        """Move out `count` chunks, or fewer, of the unpinned variable whose next use is furthest."""
        i = self.ended + 1
        pins, full, best, victim = self.steps.pins[i], self.steps.full, -1, -1
        for v, alive in enumerate(self.alive):
            if alive and self.absent[v] != full[v] and v not in pins:
                distance = self.steps.next_use(v, self.ended)
                if distance > best:
                    best, victim = distance, v
        if victim >= 0:
            self.timeline.demand_out_count += 1
            mask = self._drop(victim, lowest(full[victim] & ~self.absent[victim], count))
            if mask:
                self._copy_out(victim, mask, False)

    def _advance(self, then: float) -> None:
        """Go to the next end of a copy or of a function."""
        if self.log is not None:
            self.log.append(Held(self.now, self.capacity - self.free))
        self.held_seconds += (self.capacity - self.free) * (then - self.now)
        self.now = then
        if self.out_end == then and self.out_copy is not None:
            v, mask, planned, stays = self.out_copy
            if v >= 0:
                self.absent[v] |= 0 if stays else mask
                self.valid[v] |= mask
            self.free += 0 if stays and v >= 0 else mask.bit_count()
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
            steps, self.ended = self.steps, self.ended + 1
            self.ready, self.function_end = then, _NEVER
            for v in steps.writes[self.ended]:
                self.valid[v] = 0
            for v in steps.deaths[self.ended + 1]:
                self._release(v)
