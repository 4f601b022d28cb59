"""The schedule-window policy: "Out-of-core training for extremely large-scale neural networks with adaptive
window-based scheduling" (the seed paper), section 3.

The variable-sequence is the concatenation of each function's variables. The window W_i is the longest run of it that
begins with the variables of function f_i and whose sizes sum to at most the schedule window (all of f_i's at least).
Before f_i:

    (a) swap in what is in W_i and was not in W_(i-1);
    (b) complete the oldest reserved swap-outs until what is swapped in, and what is reserved and not yet
        completed, fit the budget.

After f_i:

    (c) reserve the swap-out of f_i's variables;
    (d) skip what is scheduled already, and what the next window holds.

Beyond the paper: sizes are in chunks, and only as many chunks of the oldest reservation leave as are needed; a
reservation that never has to be completed costs no transfer; the sequence does not end but goes on with the next
iteration, until the state in which an iteration starts repeats. A window never holds more than the budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.simulation.simulator import simulate
from swapd.simulation.steps import steps_of

SHARES = (1 / 4, 1 / 2, 3 / 4, 1.0)  # of the capacity: the windows tried when none is given
_PIECES = 8
_ITERATIONS = 6  # at most, until the state repeats


def window(problem: Problem, window_bytes: int | None = None, *, whole: bool = False) -> Plan:
    """Plan with a schedule window of `window_bytes`; if it is None, with the one of `SHARES` that simulates fastest.

    Variables leave and come back as wholes if `whole`, as they do in memory without virtual addresses.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
        ValueError: the window is not positive.
    """
    problem.require_feasible()
    if window_bytes is not None and window_bytes <= 0:
        raise ValueError(f"the schedule window must be positive, not {window_bytes}")
    if problem.fits:
        return Plan(policy="window", window_bytes=window_bytes)
    sizes = windows(problem) if window_bytes is None else [window_bytes]
    plans = [_plan(problem, size, whole) for size in sizes]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: simulate(problem, plan).seconds)


def windows(problem: Problem, shares: tuple[float, ...] = SHARES) -> list[int]:
    """The schedule windows in bytes that are tried when none is given."""
    return sorted({max(1, int(share * problem.capacity_chunks)) * problem.chunk_bytes for share in shares})


def _plan(problem: Problem, window_bytes: int, whole: bool) -> Plan:
    for cut in (False, True):
        found = _Schedule(problem, window_bytes // problem.chunk_bytes, cut, whole).run()
        if found is not None:
            return Plan(outs=tuple(found[0]), ins=tuple(found[1]), policy="window", window_bytes=window_bytes)
    raise RuntimeError("the schedule does not repeat although every iteration starts from the same state")


@dataclass(slots=True, eq=False)
class _Storage:
    """One variable, across the iterations that it lives in."""

    chunks: int
    variable: int  # its number in the current iteration
    exists: bool = False
    away: int = 0  # how many of its first chunks are on the host
    in_window: int = 0  # how often the window holds it
    reserved: tuple[int, int, int] | None = None  # iteration, number in it, function after which it may leave

    @property
    def resident(self) -> int:
        return self.chunks - self.away


class _Schedule:
    """The algorithm over an endless repetition of the iteration, one step per function."""

    def __init__(self, problem: Problem, window_chunks: int, cut: bool, whole: bool) -> None:
        self.problem, self.window_chunks, self.n = problem, window_chunks, problem.functions
        self.whole = whole  # a reservation is completed as a whole
        self.cut = cut  # the window ends with the iteration, and all is swapped out then, as in the paper's program
        self.steps = steps_of(problem)
        self.storages: dict[int, list[_Storage]] = {}  # per iteration
        self.moves: dict[int, tuple[list[Out], list[In]]] = {}
        self.window: deque[tuple[int, int, _Storage]] = deque()  # W_i: step, variable, storage
        self.next = (0, 0)  # the entry of the variable-sequence behind the window: step, index
        self.queue: deque[_Storage] = deque()  # reserved, the oldest first
        self.window_sum = 0  # chunks in W_i; those of a variable that occurs twice count twice
        self.held = 0  # chunks of the variables in W_i
        self.reserved = 0  # chunks that are reserved and still on the device
        self.states: list[object] = []

    def run(self) -> tuple[list[Out], list[In]] | None:
        """The moves of an iteration that ends in the state in which it starts; None if no such iteration was found."""
        for iteration in range(_ITERATIONS):
            self._enter(iteration)
            if iteration > 1 and self.states[-1] == self.states[-2] == self.states[-3]:
                return self.moves[iteration - 2]  # its last reservations have been completed or dropped by now
            for function in range(self.n):
                self._step(iteration * self.n + function)
            if self.cut:
                self._finish(iteration)
        return None

    def _variables(self, iteration: int) -> list[_Storage]:
        """The storage of each variable of an iteration. Inherited variables have storages of the iteration before."""
        if iteration not in self.storages:
            made = []
            for v, (chunks, before) in enumerate(zip(self.problem.chunks.tolist(), self.problem.previous.tolist())):
                if before >= 0 and iteration:
                    made.append(self._variables(iteration - 1)[before])
                else:
                    made.append(_Storage(chunks, v, before >= 0, chunks if before >= 0 else 0))
            self.storages[iteration] = made
            self.moves[iteration] = ([], [])
        return self.storages[iteration]

    def _enter(self, iteration: int) -> None:
        """An iteration starts: survivors get their new numbers, entry variables of unknown past appear."""
        n, steps = self.n, self.steps
        if iteration:
            old = self._variables(iteration - 1)
            for v in steps.deaths[n] + [v for v in steps.deaths[n + 1] if steps.successor[v] < 0]:
                self._die(old[v])
        now = self._variables(iteration)
        for v in steps.entries:
            now[v].variable = v
            if not now[v].exists and now[v].chunks:
                now[v].exists = True
                if not now[v].in_window:
                    self._reserve(now[v], iteration, v, -1)
        for v in steps.deaths[0]:
            self._die(now[v])
        self.states.append(self._state(iteration))

    def _state(self, iteration: int) -> object:
        place = {id(storage): index for index, storage in enumerate(self.queue)}
        now = self.storages[iteration]
        entries = [(v, now[v].away, now[v].in_window, place.get(id(now[v]), -1)) for v in self.steps.entries]
        return entries, self.next[0] - iteration * self.n, self.next[1], len(self.queue)

    def _step(self, step: int) -> None:
        """Do (a) and (b) for the function of `step`, after (c) and (d) for the one before it."""
        iteration, function = divmod(step, self.n)
        left = []
        while self.window and self.window[0][0] < step:
            _, v, storage = self.window.popleft()
            storage.in_window -= 1
            self.window_sum -= storage.chunks
            if not storage.in_window:
                self.held -= storage.chunks
                left.append((v, storage))
        if function:
            for v in self.steps.deaths[function]:
                self._die(self.storages[iteration][v])
        arrived = self._extend(step)
        for v, storage in left:
            if storage.exists and not storage.in_window:
                self._reserve(storage, (step - 1) // self.n, v, (step - 1) % self.n)
        self._complete(self.held + self.reserved - self.problem.capacity_chunks)
        outs, ins = self.moves[iteration]
        for at, v, storage, count in arrived:
            early = at // self.n != iteration
            variable, before = (storage.variable, self.n) if early else (v, at % self.n)
            ins.append(In(variable, 0, count, function - 1, len(outs), before))
        for v in self.steps.births[function]:
            self.storages[iteration][v].exists = True

    def _extend(self, step: int) -> list[tuple[int, int, _Storage, int]]:
        """Grow the window. Returns what has to come in: step of its use, variable, storage, chunks."""
        arrived = []
        at, index = self.next
        while at < step + self.n and not (self.cut and at // self.n != step // self.n):
            row = self.steps.sized[at % self.n]
            if index == len(row):
                at, index = at + 1, 0
                continue
            v = row[index]
            storage = self._variables(at // self.n)[v]
            fresh = 0 if storage.in_window else storage.chunks
            if at != step and (
                self.window_sum + storage.chunks > self.window_chunks
                or self.held + fresh > self.problem.capacity_chunks
            ):
                break
            self.window.append((at, v, storage))
            self.window_sum += storage.chunks
            self.held += fresh
            storage.in_window += 1
            if storage.reserved is not None:
                self._cancel(storage)
            if storage.away:
                arrived.append((at, v, storage, storage.away))
                storage.away = 0
            index += 1
        self.next = (at, index)
        return arrived

    def _reserve(self, storage: _Storage, iteration: int, v: int, after: int) -> None:
        storage.reserved = (iteration, v, after)
        self.queue.append(storage)
        self.reserved += storage.resident

    def _cancel(self, storage: _Storage) -> None:
        storage.reserved = None
        self.queue.remove(storage)
        self.reserved -= storage.resident

    def _die(self, storage: _Storage) -> None:
        if storage.reserved is not None:
            self._cancel(storage)
        storage.exists = False

    def _complete(self, excess: int) -> None:
        """Complete the oldest reservations until `excess` chunks are free, or none is left."""
        while excess > 0 and self.queue:
            storage = self.queue[0]
            count = min(storage.resident, max(excess, -(-storage.chunks // _PIECES)))
            count = storage.resident if self.whole else count
            assert storage.reserved is not None
            iteration, v, after = storage.reserved
            self.moves[iteration][0].append(Out(v, storage.away, count, after))
            storage.away += count
            self.reserved -= count
            excess -= count
            if not storage.resident:
                storage.reserved = None
                self.queue.popleft()

    def _finish(self, iteration: int) -> None:
        """Everything that survives leaves, so that each iteration starts from the same state."""
        last = self.n - 1
        for _, v, storage in self.window:
            storage.in_window = 0
            if storage.exists and self.problem.successor[v] >= 0:
                self._reserve(storage, iteration, v, last)
        self.window.clear()
        self.window_sum = self.held = 0
        for storage in list(self.queue):
            assert storage.reserved is not None
            if self.problem.successor[storage.reserved[1]] < 0:
                self._cancel(storage)
        self._complete(self.reserved)
