"""Simulator: the timeline of a plan, by the executor's rules.

Three resources work at the same time: the computation, the link out, the link in. Each does one thing at a time, in
order, and memory is counted in chunks. The rules:

- Function i starts when function i - 1 has ended, all that it uses is resident, and there is room for what it
  allocates. What a function uses does not leave while the function waits or runs. No in starts while it waits for room.
- Outs and ins follow their lists, as `planning.plan` says. A move is skipped when its variable is not live, when its
  chunks have moved already, and when it is late: a function that uses the variable has come since `after_function`
  (for an out: or is about to run). A late out is not needed, as a sound plan counts the variable as resident by then.
- Chunks with a valid host copy are dropped, which takes no time but that of unmapping them.
- Where mapping takes time, a piece of an in is mapped before it is copied, beside the copy of the piece before it if it
  was due by then; a piece of an out is unmapped after its copy, beside the copy of the next one.
- An in of a variable that the iteration before still has to swap out waits for that.
- What a function needs and no waiting in brings is swapped in on demand, ahead of the list.
- When nothing else can make progress, the unpinned variable whose next use is furthest makes room.

The iteration repeats; the last of several is reported, so that the figures are those of the steady state. With an
empty plan the timeline is that of demand mode.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.events import Copy, Event, Events, Held, Lost, Run, SimulationResult, Stall
from swapd.simulation.simulated_machine import SimulatedMachine

__all__ = ["SimulationResult", "simulate", "simulate_events"]


def simulate(problem: Problem, plan: Plan, iterations: int = 2) -> SimulationResult:
    """Run `iterations` of the problem under `plan` and report the last.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    return _run(problem, plan, iterations, None).timeline


_known: WeakKeyDictionary[Plan, tuple[ReferenceType[Problem], SimulationResult]] = WeakKeyDictionary()


def simulate_once(problem: Problem, plan: Plan) -> SimulationResult:
    """As `simulate`, but the result is kept for later calls with this plan and problem. Callers must not change it."""
    known = _known.get(plan)
    if known is None or known[0]() is not problem:
        known = _known[plan] = (ref(problem), simulate(problem, plan))
    return known[1]


def simulate_events(problem: Problem, plan: Plan, iterations: int = 2) -> tuple[SimulationResult, Events]:
    """As `simulate`, and with everything that happens in the iteration that is reported.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    machine = _run(problem, plan, iterations, [])
    found: dict[type, list[Any]] = {Run: [], Stall: [], Copy: [], Held: [], Lost: []}
    for event in machine.log or ():
        times = {name: getattr(event, name) - machine.began for name in ("start", "end") if hasattr(event, name)}
        found[type(event)].append(event._replace(**times))
    return machine.timeline, Events(machine.timeline.seconds, *map(tuple, found.values()))


def _run(problem: Problem, plan: Plan, iterations: int, log: list[Event] | None) -> SimulatedMachine:
    problem.require_feasible()
    machine = SimulatedMachine(problem, plan)
    machine.log = log
    for _ in range(max(1, iterations)):
        machine.iteration()
    return machine
