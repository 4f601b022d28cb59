"""Best fit: a caching allocator as frameworks have it. It has no memory, but shows what fragmentation costs a plan.

It follows PyTorch's CUDA caching allocator as its source describes itself (`c10/cuda/CUDACachingAllocator.cpp`), with
default settings:

    sizes are rounded up to 512 bytes
    requests of up to 1 MiB share segments of 2 MiB; those below 10 MiB get segments of 20 MiB; others have a segment of
        their own, rounded up to 2 MiB
    a request takes the smallest free block of its pool that holds it (best fit, then lowest address); what is left is
        split off when it is at least 512 bytes in the small pool, or more than 1 MiB in the large one
    free neighbours in a segment merge; a segment that is free as a whole is given back only when the device has no room
        for a new one

A request fails when no free block holds it and no new segment fits, however many bytes are free in pieces: that is
external fragmentation, which an allocator with virtual addresses does not have.

A plan that fits by its bytes can then fail for want of a block that is large enough. So `plan_fragmented` makes a plan
for less memory than there is: the most, in steps of a sixteenth, with which the allocations of three iterations all
succeed. Plans move whole variables.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from swapd.planning.plan import Plan
from swapd.planning.problem import PolicyInfeasibleError, Problem
from swapd.simulation.simulated_machine import SimulatedMachine
from swapd.simulation.simulator import simulate
from swapd.simulation.steps import steps_of

KIB, MIB = 1 << 10, 1 << 20
ROUND_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MIDDLE_BYTES = 10 * MIB
MIDDLE_SEGMENT_BYTES = 20 * MIB
SEGMENT_ROUND_BYTES = 2 * MIB
STEPS = 16  # of the memory, in which plans for less of it are tried


class OutOfMemory(Exception):
    """A request cannot be met; `free_bytes` are free all the same, in pieces or in another pool."""

    def __init__(self, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(f"no block of {requested_bytes} bytes, although {free_bytes} bytes are free")
        self.requested_bytes, self.free_bytes = requested_bytes, free_bytes


@dataclass(eq=False)
class Block:
    """A piece of a segment; the pieces of a segment are linked in the order of their addresses."""

    segment: int
    address: int
    bytes: int
    small: bool
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int, int]:
        """The key that free blocks are sorted by: size, then address."""
        return self.bytes, self.segment, self.address


class BestFitAllocator:
    """Blocks of a device of `memory_bytes`. Invariant: allocated + free bytes = reserved <= memory."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.allocated_bytes = self.reserved_bytes = self.reserved_peak_bytes = self.allocated_peak_bytes = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}  # by pool: keys, ascending
        self._blocks: dict[tuple[int, int], Block] = {}  # free blocks, by segment and address
        self._segments = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes. Raises OutOfMemory."""
        size = max(ROUND_BYTES, -(-size // ROUND_BYTES) * ROUND_BYTES)
        small = size <= SMALL_BYTES
        keys = self._free[small]
        index = bisect_left(keys, (size, -1, -1))
        block = self._take(keys[index], small) if index < len(keys) else self._new_segment(size, small)
        left = block.bytes - size
        if left >= ROUND_BYTES if small else left > SMALL_BYTES:
            rest = Block(block.segment, block.address + size, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.bytes = rest, size
            self._put(rest)
        self.allocated_bytes += block.bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it merges with free neighbours."""
        if block.free:
            raise ValueError("the block is free already")
        self.allocated_bytes -= block.bytes
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._take(neighbour.key, block.small)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.bytes += second.bytes
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._put(block)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], block.key)
        self._blocks[block.segment, block.address] = block

    def _take(self, key: tuple[int, int, int], small: bool) -> Block:
        keys = self._free[small]
        del keys[bisect_left(keys, key)]
        block = self._blocks.pop(key[1:])
        block.free = False
        return block

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            segment = SMALL_SEGMENT_BYTES
        elif size < MIDDLE_BYTES:
            segment = MIDDLE_SEGMENT_BYTES
        else:
            segment = -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
        if self.reserved_bytes + segment > self.memory_bytes:
            self._give_back()
        if self.reserved_bytes + segment > self.memory_bytes:
            raise OutOfMemory(size, self.memory_bytes - self.allocated_bytes)
        self._segments += 1
        self.reserved_bytes += segment
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        return Block(self._segments, 0, segment, small)

    def _give_back(self) -> None:
        """Segments that are free as a whole go back to the device."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._take(block.key, block.small)
            self.reserved_bytes -= block.bytes


class Replay:
    """What a plan whose moves are of whole variables does to the allocator.

    `problem.capacity_chunks` is the ledger that the plan was made for: swap-outs are completed, in their order, when
    a swap-in says so or when the ledger has no room. `memory_bytes` is what the allocator really has.
    """

    def __init__(self, problem: Problem, plan: Plan, memory_bytes: int, iterations: int = 3) -> None:
        self.problem, self.plan, self.steps = problem, plan, steps_of(problem)
        self.allocator = BestFitAllocator(memory_bytes)
        self.sizes: list[int] = problem.variable_bytes.tolist()
        self.blocks: dict[int, Block] = {}  # of the variables that are on the device
        self.held = 0  # chunks of the variables that are on the device
        self.done = 0  # outs of this iteration that are complete
        self.failed_function = -1  # before which a request could not be met; -1 if all were met
        self.requested_bytes = 0  # by the request that failed; 0 if none did
        self.free_bytes = 0  # at that moment
        self._run(iterations)

    def _run(self, iterations: int) -> None:
        function = 0
        try:
            start = SimulatedMachine(self.problem, self.plan)
            for v in self.steps.entries:
                if start.alive[v] and not start.absent[v]:
                    self._allocate(v)
            for _ in range(iterations):
                self._enter()
                for function in range(self.problem.functions):
                    self._function(function)
                self._leave()
        except OutOfMemory as error:
            self.failed_function = function
            self.requested_bytes, self.free_bytes = error.requested_bytes, error.free_bytes

    def _enter(self) -> None:
        self.done = 0
        self.next_in = 0
        for v in self.steps.entries:
            if self.steps.previous[v] < 0:
                self._allocate(v)
        for v in self.steps.deaths[0]:
            self._release(v)

    def _function(self, function: int) -> None:
        for v in self.steps.deaths[function] if function else ():
            self._release(v)
        while self.next_in < len(self.plan.ins) and self.plan.ins[self.next_in].after_function < function:
            move = self.plan.ins[self.next_in]
            self._complete(move.after_outs, function)
            self._make_room(move.chunk_count, function)
            self._allocate(move.variable)
            self.next_in += 1
        self._make_room(self.steps.birth_chunks[function], function)
        for v in self.steps.births[function]:
            self._allocate(v)

    def _make_room(self, chunks: int, function: int) -> None:
        while self.held + chunks > self.problem.capacity_chunks:
            if not self._complete(self.done + 1, function):
                return

    def _complete(self, count: int, function: int) -> bool:
        """Complete outs that are due until `count` of the list are complete. Returns whether any was completed."""
        before = self.done
        while self.done < min(count, len(self.plan.outs)) and self.plan.outs[self.done].after_function < function:
            self._release(self.plan.outs[self.done].variable)
            self.done += 1
        return self.done > before

    def _leave(self) -> None:
        n = self.problem.functions
        for v in self.steps.deaths[n]:
            self._release(v)
        self._complete(len(self.plan.outs), n)
        for v in self.steps.births[n]:
            self._allocate(v)
        for v in self.steps.deaths[n + 1]:
            if self.steps.successor[v] < 0:
                self._release(v)
        self.blocks = {self.steps.successor[v]: block for v, block in self.blocks.items()}

    def _allocate(self, v: int) -> None:
        if self.steps.chunks[v] and v not in self.blocks:
            self.blocks[v] = self.allocator.allocate(self.sizes[v])
            self.held += self.steps.chunks[v]

    def _release(self, v: int) -> None:
        block = self.blocks.pop(v, None)
        if block is not None:
            self.allocator.free(block)
            self.held -= self.steps.chunks[v]


def plan_fragmented(problem: Problem, policy: str, plans_for: Callable[[Problem], Iterable[Plan]]) -> Plan:
    """The fastest plan for the most memory for which a plan works, which is the plan's `capacity_chunks`.

    `plans_for` makes plans for a problem with less memory; the search ends where it raises PolicyInfeasibleError.

    Raises:
        PolicyInfeasibleError: no plan works.
    """
    memory = problem.capacity_chunks * problem.chunk_bytes  # without the slabs, in which small allocations are
    if problem.fits and Replay(problem, Plan(), memory).failed_function < 0:
        return Plan(policy=policy, capacity_chunks=problem.capacity_chunks)
    failed: tuple[int, int] | None = None  # of the first failure: the function, and the bytes that it would need
    for step in range(STEPS, 0, -1):
        scheduled = replace(problem, capacity_chunks=problem.capacity_chunks * step // STEPS)
        if scheduled.capacity_chunks < int(problem.pinned.max(initial=0)):
            break
        works = []
        try:
            for plan in plans_for(scheduled):
                result = Replay(scheduled, plan, memory)
                if result.failed_function < 0:
                    works.append(plan)
                elif failed is None:
                    need = problem.budget_bytes - result.free_bytes + result.requested_bytes
                    failed = result.failed_function, need
        except PolicyInfeasibleError as error:
            failed = failed or (error.function, error.need_bytes)
            break
        if works:
            best = min(works, key=lambda plan: simulate(scheduled, plan).seconds)
            return replace(best, policy=policy, capacity_chunks=scheduled.capacity_chunks)
    function, need = failed or (int(problem.pinned.argmax()), problem.min_budget_bytes)
    raise PolicyInfeasibleError(function, problem.names[function], need, problem.budget_bytes, 0, policy)
