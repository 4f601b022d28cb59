"""Joint simulation: both levels at once, so that the step's time is that of device, host memory and disk together.

The second level runs on a `SimulatedMachine` of its own, as any problem does: a copy of the first level, which is its
function, starts when its blocks are in host memory (an in) or there is room for them (an out). How long such a function
lasts, that is, when the first level is ready for its next copy, depends on the delays so far. The rules for that:

- The first level does what it does in its steady state with host memory for everything, in the same order: the same
  functions, the same copies, the links one copy at a time.
- A copy is ready when the one before it has started, and when of what is before it every function and every copy has
  ended that had ended by the time when it starts with host memory for everything.
- A function starts when the one before it has ended, as well as every copy that had ended of what it uses, every copy
  out that had ended if it allocates, and the copy whose end let it start.

Whatever takes room waits for all that made room before it, so the device's memory suffices. A program that follows the
plan could start some copies sooner than that, and none later. Without a delay every time is that of the first level.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, SimulationResult
from swapd.simulation.simulated_machine import SimulatedMachine
from swapd.simulation.steps import steps_of
from swapd.tiers.first_level import FirstLevel

ITERATIONS = 4  # simulated; the last is reported


@dataclass(frozen=True, eq=False)
class JointResult:
    """One iteration of the steady state of both levels."""

    seconds: float  # from the last function's end in the iteration before to that in this one
    second: SimulationResult  # what the second level does: the disk's bytes are its `out_bytes` and `in_bytes`


def simulate_jointly(level: FirstLevel, blocks: Problem, plan: Plan, iterations: int = ITERATIONS) -> JointResult:
    """Run `iterations` of the first level over `blocks`, its second level, which goes by `plan`.

    Raises:
        InfeasibleError: a copy's blocks alone are larger than the host budget.
    """
    if blocks.fits and not plan:
        return JointResult(level.seconds, _undisturbed(level, blocks))
    blocks.require_feasible()
    replay = _Replay(level)
    machine = _SecondLevel(blocks, plan, replay)
    machine.now = replay.until_next_copy()
    for _ in range(max(2, iterations)):
        machine.iteration()
    ends, n = replay.function_ends, level.problem.functions
    laps = len(ends) // n
    return JointResult(ends[laps * n - 1] - ends[(laps - 1) * n - 1], machine.timeline)


def _undisturbed(level: FirstLevel, blocks: Problem) -> SimulationResult:
    return SimulationResult(
        seconds=level.seconds, compute_seconds=level.seconds, peak_chunks=blocks.live_peak_chunks, starts=level.starts
    )


class _SecondLevel(SimulatedMachine):
    """The second level's machine. Its functions last until the first level is ready for its next copy."""

    def __init__(self, blocks: Problem, plan: Plan, replay: _Replay) -> None:
        super().__init__(blocks, plan)
        self.replay = replay

    def _end_of(self, i: int) -> float:
        self.replay.start_copy(self.now)
        return self.replay.until_next_copy()


class _Link:
    """The copies of one direction, counted on through the iterations: copy j of iteration l is l * count + j."""

    def __init__(self, level: FirstLevel, is_out: bool) -> None:
        copies = [copy for copy in level.copies if copy.is_out == is_out]
        carried = [copy for copy in level.carried if copy.is_out == is_out]
        self.count = len(copies)
        self.first = -len(carried)  # the number of the first copy that is under way at some time of the iteration
        self.known_ends = [copy.end for copy in (*carried, *copies)]
        self.ends: list[float] = []  # as simulated, of all iterations
        self.of: dict[int, tuple[list[float], list[int]]] = {}  # variable: the ends of its copies, and their numbers
        successor = level.problem.successor.tolist()
        for number, copy in enumerate(copies[: self.count + self.first], -self.count):
            self._note(successor[copy.variable], -1.0, number)
        for number, copy in enumerate((*carried, *copies), self.first):
            self._note(copy.variable, copy.end, number)

    def _note(self, v: int, end: float, number: int) -> None:
        ends, numbers = self.of.setdefault(v, ([], []))
        ends.append(end)
        numbers.append(number)

    def ended_by(self, time: float) -> int:
        """The last copy that had ended by then."""
        return self.first + bisect_right(self.known_ends, time) - 1

    def ended_of(self, v: int, time: float) -> int:
        """The last copy of variable v that had ended by then; one before all others if there is none."""
        ends, numbers = self.of.get(v, ((), ()))
        at = bisect_right(ends, time)
        return numbers[at - 1] if at else -self.count - 1

    def end(self, number: int, iteration: int) -> float:
        """When a copy ended in the simulation; 0 if it is one before the simulation."""
        number += iteration * self.count
        return self.ends[number] if number >= 0 else 0.0


class _Replay:
    """The first level, as the rules above let it go on."""

    def __init__(self, level: FirstLevel) -> None:
        problem, steps = level.problem, steps_of(level.problem)
        self.n, self.seconds = problem.functions, steps.seconds
        self.links = _, outs = _Link(level, False), _Link(level, True)
        run_ends = [run.end for run in level.runs]
        # At one time, a copy is before a function, which it may have let start, and after one that takes no time.
        order = [(run.start, 2 if run.end > run.start else 0, run.function) for run in level.runs]
        order += [(copy.start, 1, index) for index, copy in enumerate(level.copies)]
        self.order = [(kind == 1, index) for _, kind, index in sorted(order)]
        # What each function and each copy waits for, of what is before it: a function (copies only), an in, an out, as
        # numbered by `_Link`.
        self.function_waits: list[tuple[int, int]] = []
        self.copies: list[tuple[Copy, int, int, int]] = []
        started = [-1, -1]  # the last copy of each link
        for is_copy, index in self.order:
            if is_copy:
                copy = level.copies[index]
                ended_in, ended_out = (min(link.ended_by(copy.start), last) for link, last in zip(self.links, started))
                self.copies.append((copy, bisect_right(run_ends, copy.start) - 1, ended_in, ended_out))
                started[copy.is_out] += 1
                continue
            start, waits = level.runs[index].start, []
            for link, last in zip(self.links, started):
                latest = min(link.ended_by(start), last)
                is_trigger = latest >= link.first and link.known_ends[latest - link.first] == start
                makes_room = link is outs and steps.birth_chunks[index] > 0
                own = max((link.ended_of(v, start) for v in steps.pins[index]), default=-link.count - 1)
                waits.append(latest if is_trigger or makes_room else min(own, last))
            self.function_waits.append((waits[0], waits[1]))
        self.at = self.iteration = 0  # in `order`: what comes next
        self.function_ends: list[float] = []
        self.copy_start = 0.0  # of the last copy

    def start_copy(self, now: float) -> None:
        """The next copy starts."""
        copy = self.copies[self.order[self.at][1]][0]
        self.links[copy.is_out].ends.append(now + (copy.end - copy.start))
        self.copy_start = now
        self._go_on()

    def until_next_copy(self) -> float:
        """Run the functions before the next copy, and return when that is ready."""
        while True:
            kind, index = self.order[self.at]
            if kind:
                _, function, *waits = self.copies[index]
                ended = (link.end(number, self.iteration) for link, number in zip(self.links, waits))
                return max(self.copy_start, self._function_end(function), *ended)
            self._run(index)
            self._go_on()

    def _run(self, i: int) -> None:
        ended = (link.end(number, self.iteration) for link, number in zip(self.links, self.function_waits[i]))
        self.function_ends.append(max(self._function_end(i - 1), *ended) + self.seconds[i])

    def _function_end(self, i: int) -> float:
        i += self.iteration * self.n
        return self.function_ends[i] if i >= 0 else 0.0

    def _go_on(self) -> None:
        self.at += 1
        if self.at == len(self.order):
            self.at, self.iteration = 0, self.iteration + 1
