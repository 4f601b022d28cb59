"""Validator: everything that can be wrong with a plan, found the slow and obvious way.

It assumes nothing of how plans are made. It repeats the iteration three times, one step per function, and at each
step does every move that could have happened by then: an out once its function and those of all outs before it in
the list have ended (a function that lacks room can wait for it), an in once its function, its outs and all ins before
it are done. What is then resident is the most that can be, so it has to fit. No function may use what is then absent.
A plan without a violation can be carried out at any speed of the link without a demand swap-in, without an eviction
and without a deadlock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.planning.violations import Violation, malformed

ITERATIONS = 3


class Fault(enum.Enum):
    """Each way in which a plan for the problem can be wrong."""

    NOT_LIVE = "the variable is not live at the move"
    OUT_WHILE_PINNED = "a swap-out while the next function uses the variable"
    OUT_TOO_LATE = "a swap-out that others hold up until its variable is used again"
    OUT_OF_ABSENT = "a swap-out of chunks that are not on the device"
    IN_OF_RESIDENT = "a swap-in of chunks that are on the device"
    IN_BEFORE_OUT = "a swap-in that does not wait for the swap-out of the same chunks"
    IN_TOO_LATE = "a swap-in that says to be needed later than its variable is used"
    USE_OF_ABSENT = "a function uses chunks that no swap-in brings back before"
    OVER_CAPACITY = "more chunks than the capacity are resident when a function starts"
    DEADLOCK = "a function waits for a move that the order of a list puts behind a later function"


def validate(problem: Problem, plan: Plan) -> list[Violation]:
    """All violations of `plan`, each once. An empty list means that the plan is sound."""
    found = malformed(problem, plan)
    return found if found else _Walk(problem, plan).walk()


def planned_residency(problem: Problem, plan: Plan) -> list[dict[int, set[int]]]:
    """What `plan` has on the device while each function of the steady state runs, if links were infinitely fast.

    Returns a list [n] of {variable: its chunks on the device}, with every variable that is live at the function and not
    dormant.
    """
    walk = _Walk(problem, plan)
    first, found = (ITERATIONS - 1) * problem.functions, []
    for step in range(ITERATIONS * problem.functions):
        walk.move(step)
        if step >= first:
            names = enumerate(walk.named[ITERATIONS - 1])
            found.append(
                {
                    v: set(range(storage.chunks)) - storage.absent
                    for v, storage in names
                    if storage.first <= step <= storage.died and not problem.dormant[v]
                }
            )
    return found


@dataclass
class _Storage:
    """One variable across the iterations that it lives in. A step is a function of the repeated iteration."""

    chunks: int
    first: int  # the first step at which it is live
    movable: int  # the first step before which it can move, because it is live already as that step starts
    died: int = -1  # the last step at which it is live
    uses: list[int] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)


@dataclass
class _Event:
    storage: _Storage
    chunks: set[int]
    own: int  # the step before which the move may happen by its own `after_function`
    step: int  # the step before which it may happen, given all that it has to wait for
    iteration: int
    index: int
    move: Out | In


class _Walk:
    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan, self.n = problem, plan, problem.functions
        self.found: dict[Violation, None] = {}
        self.storages: list[_Storage] = []
        self.named: list[list[_Storage]] = []  # per iteration, per variable
        for iteration in range(ITERATIONS + 1):
            self._name(iteration)
        self.outs, self.ins = self._events()
        self._first_state()

    def _name(self, iteration: int) -> None:
        """Give each variable of an iteration a new storage, or that of the variable that it was in the one before."""
        problem, n = self.problem, self.n
        names = []
        for v in range(problem.variables):
            before = int(problem.previous[v])
            if before >= 0 and iteration > 0:
                storage = self.named[iteration - 1][before]
            else:
                born = int(problem.born[v])
                storage = _Storage(int(problem.chunks[v]), iteration * n + max(born, 0), iteration * n + born + 1)
                self.storages.append(storage)
            storage.died = iteration * n + min(int(problem.died[v]), n - 1)
            names.append(storage)
        for v, f in zip(problem.uses.variable.tolist(), problem.uses.function.tolist()):
            names[v].uses.append(iteration * n + f)
        self.named.append(names)

    def _events(self) -> tuple[list[_Event], list[_Event]]:
        outs: list[_Event] = []
        ins: list[_Event] = []
        for iteration in range(ITERATIONS):
            base = len(outs)
            for index, out in enumerate(self.plan.outs):
                own = iteration * self.n + out.after_function + 1
                step = max(own, outs[-1].step if outs else 0)
                outs.append(self._event(iteration, index, out, own, step))
            for index, move in enumerate(self.plan.ins):
                own = iteration * self.n + move.after_function + 1
                needed = outs[base + move.after_outs - 1].step if move.after_outs else 0
                step = max(own, needed, ins[-1].step if ins else 0)
                ins.append(self._event(iteration, index, move, own, step))
        return outs, ins

    def _event(self, iteration: int, index: int, move: Out | In, own: int, step: int) -> _Event:
        chunks = set(range(move.first_chunk, move.first_chunk + move.chunk_count))
        return _Event(self.named[iteration][move.variable], chunks, own, step, iteration, index, move)

    def _first_state(self) -> None:
        """Put the chunks of inherited variables where an iteration leaves them.

        A chunk is on the host if its first move is an in, or if it does not move and the last move under its previous
        number was an out.
        """
        moves: list[Out | In] = [*self.plan.outs, *self.plan.ins]
        moves.sort(key=lambda move: (move.after_function, isinstance(move, In)))
        first: dict[tuple[int, int], bool] = {}  # (variable, chunk): whether its first move is an in
        last: dict[tuple[int, int], bool] = {}
        for move in moves:
            for chunk in range(move.first_chunk, move.first_chunk + move.chunk_count):
                first.setdefault((move.variable, chunk), isinstance(move, In))
                last[move.variable, chunk] = isinstance(move, In)
        for v in np.flatnonzero(self.problem.previous >= 0).tolist():
            storage, before = self.named[0][v], int(self.problem.previous[v])
            for chunk in range(storage.chunks):
                away = first.get((v, chunk), not last.get((before, chunk), True))
                if away or self.problem.dormant[v]:
                    storage.absent.add(chunk)

    def walk(self) -> list[Violation]:
        for step in range(ITERATIONS * self.n):
            self.move(step)
            self._write_backs(step)
            self._run(step)
        return list(self.found)

    def move(self, step: int) -> None:
        """Make every move that may happen before function `step`."""
        for event in self.outs:
            if event.step == step:
                self._out(event, step)
        for event in self.ins:
            if event.step == step:
                self._in(event, step)

    def _report(self, fault: Fault, step: int = -1, variable: int = -1, move: int = -1) -> None:
        self.found[Violation(fault, step % self.n if step >= 0 else -1, variable, move)] = None

    def _out(self, event: _Event, step: int) -> None:
        storage, where = event.storage, (event.own, event.move.variable, event.index)
        if not storage.movable <= event.own <= storage.died:
            self._report(Fault.NOT_LIVE, *where)
        elif event.own in storage.uses:
            self._report(Fault.OUT_WHILE_PINNED, *where)
        elif any(event.own <= use < event.step for use in storage.uses):
            self._report(Fault.OUT_TOO_LATE, *where)  # the executor leaves it out
        elif event.chunks & storage.absent:
            self._report(Fault.OUT_OF_ABSENT, *where)
        storage.absent |= event.chunks

    def _write_backs(self, step: int) -> None:
        """Check the write-backs that may start at `step`.

        They are made when the link has time, or not at all, but there must be something to copy once they may start.
        """
        iteration, function = divmod(step, self.n)
        for index, move in enumerate(self.plan.write_backs):
            if move.after_function + 1 != function:
                continue
            storage, where = self.named[iteration][move.variable], (step, move.variable, index)
            if not storage.movable <= step <= storage.died:
                self._report(Fault.NOT_LIVE, *where)
            elif step in storage.uses:
                self._report(Fault.OUT_WHILE_PINNED, *where)
            elif set(range(move.first_chunk, move.first_chunk + move.chunk_count)) & storage.absent:
                self._report(Fault.OUT_OF_ABSENT, *where)

    def _in(self, event: _Event, step: int) -> None:
        move, storage = event.move, event.storage
        assert isinstance(move, In)
        where = (event.own, move.variable, event.index)
        if not storage.movable <= event.own <= storage.died:
            self._report(Fault.NOT_LIVE, *where)
        elif not event.chunks <= storage.absent:
            coming = any(
                out.storage is storage and out.chunks & event.chunks and out.own <= event.own and out.step >= step
                for out in self.outs
            )
            self._report(Fault.IN_BEFORE_OUT if coming else Fault.IN_OF_RESIDENT, *where)
        for out in self.plan.outs[move.after_outs :]:
            left = set(range(out.first_chunk, out.first_chunk + out.chunk_count))
            if out.variable == move.variable and left & event.chunks and out.after_function <= move.after_function:
                self._report(Fault.IN_BEFORE_OUT, *where)
        uses = [use for use in storage.uses if use >= event.own]
        if uses and event.iteration * self.n + move.before_function > min(uses):
            self._report(Fault.IN_TOO_LATE, *where)
        storage.absent -= event.chunks

    def _run(self, step: int) -> None:
        """Check, as function `step` starts, that all that it uses is there, and that all that is there fits."""
        live = [storage for storage in self.storages if storage.first <= step <= storage.died]
        for storage in live:
            if storage.absent and step in storage.uses:
                variable = self.named[step // self.n].index(storage)
                waiting = storage.absent <= self._overdue(self.ins, storage, step)
                self._report(Fault.DEADLOCK if waiting else Fault.USE_OF_ABSENT, step, variable)
        if sum(storage.chunks - len(storage.absent) for storage in live) > self.problem.capacity_chunks:
            gone = [storage.absent | self._overdue(self.outs, storage, step) for storage in live]
            least = sum(storage.chunks - len(chunks) for storage, chunks in zip(live, gone))
            self._report(Fault.DEADLOCK if least <= self.problem.capacity_chunks else Fault.OVER_CAPACITY, step)

    def _overdue(self, events: list[_Event], storage: _Storage, step: int) -> set[int]:
        """Chunks whose move may happen by now as it says itself, but has to wait for something later."""
        chunks: set[int] = set()
        for event in events:
            if event.storage is storage and event.own <= step < event.step:
                chunks |= event.chunks
        return chunks
