"""The facts of a report about a run: what happened, what waited for what, what was predicted, what to change."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from swapd.observing.advice import Advisor
from swapd.observing.analysis import DEMAND, allocated_by, printable, run_plan
from swapd.observing.recording import Predicted, Recording, Scene, Span, Waited
from swapd.planning.lower_bound import lower_bound
from swapd.step_times import Step
from swapd.trace.trace import Trace
from swapd.units import format_bytes, format_duration

_MOST_WAITS = 12
_LONGEST_ADVICE_SECONDS = 20.0  # of simulations, at the end of a program
_PLANS_FOR_ADVICE = 25  # advice makes about as many
_MUCH_OF_WAITING, _MUCH_OF_TIME = 0.3, 0.02  # shares from which on a place is worth advice


@dataclass(frozen=True)
class RunSoFar:
    """What a report is made from."""

    arguments: list[str]  # the program's command line
    summary: dict[str, Any]
    steps: list[Step]
    recording: Recording
    trace: Trace | None  # of the main sequence
    predicted: Predicted | None  # for that sequence
    policy: str


@dataclass(frozen=True)
class WaitRow:
    """How long a function waited for a variable, per iteration."""

    seconds: float
    share: float  # of an iteration's time
    function: str
    waited_for: str
    place: str  # in the user's program, where the variable was allocated
    allocated_by: str


@dataclass(frozen=True)
class RunFacts:
    """Everything that the page shows. Texts may hold anything a program can put into a name: they are not escaped."""

    title: str
    summary: dict[str, Any]
    happened: list[str]
    steps: list[Step]
    steady: list[Step]  # the later half of the main sequence's iterations
    whole: Scene  # as far back as the ring goes
    measured: Scene | None  # one iteration
    predicted: Scene | None  # the same iteration
    waits: list[WaitRow]
    waits_of: int  # the iterations that `waits` are means over
    comparison: list[tuple[str, str, str]]
    advice: list[str]
    notes: list[str]


def run_facts(run: RunSoFar, *, advise: bool) -> RunFacts:
    """The facts of a report. With `advise`, plans are simulated to find advice, which takes seconds."""
    recording, trace, predicted, summary = run.recording, run.trace, run.predicted, run.summary
    fingerprint = trace.fingerprint if trace is not None else None
    span = recording.span_of(fingerprint)
    spans = [found for found in recording.spans if found.fingerprint == fingerprint]
    later = [found for found in spans if found.planned] or spans
    waits = recording.waits(later)
    steady = [step for step in run.steps if fingerprint in (None, step.fingerprint)]
    steady = steady[len(steady) // 2 :]
    return RunFacts(
        title=printable(" ".join(run.arguments), 120),
        summary=summary,
        happened=list(_happened(summary, run.steps, steady)),
        steps=run.steps,
        steady=steady,
        whole=recording.scene(recording.begin, recording.now),
        measured=None if span is None else recording.scene(span.start, span.end),
        predicted=None if predicted is None else predicted.scene(),
        waits=list(_wait_rows(waits, trace, predicted, later)),
        waits_of=len(later),
        comparison=[] if predicted is None else _comparison(recording, predicted, later),
        advice=[
            *_run_advice(summary, run.steps),
            *_place_advice(waits, trace, later),
            *(_simulated_advice(run, predicted) if advise and predicted is not None else ()),
        ],
        notes=list(_notes(recording, trace, predicted, summary)),
    )


def _happened(summary: dict[str, Any], steps: list[Step], steady: list[Step]) -> Iterator[str]:
    budget, peak = summary["budget_bytes"], summary["live_peak_bytes"]
    device = "the emulated device" if summary["device"] == "emulated" else summary["device"]
    yield (
        f"On {device}, the program had {format_bytes(peak)} live at its peak and a budget of "
        f"{format_bytes(budget)}: {peak / budget:.2f} times as much as fits. The device held "
        f"{format_bytes(summary['device_peak_bytes'])} at most."
    )
    if steps:
        later = [step.seconds for step in steady or steps]
        total, waiting = sum(step.seconds for step in steps), sum(step.stall_seconds for step in steps)
        share = waiting / total if total > 0 else 0.0
        yield (
            f"{len(steps)} iterations took {format_duration(total)}; the median of the main sequence's "
            f"later half is {format_duration(statistics.median(later))}. Functions waited "
            f"{format_duration(waiting)} of it ({share:.1%})."
        )
        planned = sum(step.followed_plan for step in steps)
        yield (
            f"{planned} iterations ran under a plan from start to end, by policy {summary['policy']}; the others "
            "in demand mode, as the first ones always do, while the sequence is recorded."
        )
    moved_out, moved_in = summary["swap_out_bytes"], summary["swap_in_bytes"]
    if moved_out + moved_in == 0:
        yield "Nothing was moved: everything fitted."
    else:
        yield (
            f"{format_bytes(moved_out)} were moved out and {format_bytes(moved_in)} in, of which "
            f"{format_bytes(summary['demand_swap_in_bytes'])} because a function stood and waited for them; "
            f"{format_bytes(summary['clean_drop_bytes'])} left without a copy, as the host had them still."
        )


def _wait_rows(
    waits: list[Waited], trace: Trace | None, predicted: Predicted | None, spans: list[Span]
) -> Iterator[WaitRow]:
    count = max(len(spans), 1)
    whole = sum(span.end - span.start for span in spans)
    for row in waits[:_MOST_WAITS]:
        variable = _variable_of(row, trace)
        room = row.variable < 0
        size = f" of {format_bytes(_bytes(trace, variable, room))}" if trace is not None and variable >= 0 else ""
        by = allocated_by(predicted.problem, variable) if predicted is not None and variable >= 0 and not room else ""
        yield WaitRow(
            seconds=row.seconds / count,
            share=row.seconds / whole if whole > 0 else 0.0,
            function=printable(row.function) + (f" (function {row.place})" if row.place >= 0 else ""),
            waited_for=f"room for its result{size}" if room else f"variable {row.variable}{size}",
            place=_place(trace, variable),
            allocated_by=by,
        )


def _variable_of(row: Waited, trace: Trace | None) -> int:
    """Returns the variable that was waited for, or -1 if it is not known.

    For a wait for room, this is the largest variable that the function allocates. Rows have the recorder's numbers of
    variables, but the result is the trace's number; that of the first part if the variable has parts.
    """
    if row.variable < 0:
        return _largest_born(trace, row.place)
    parts = trace.parts_of(row.variable) if trace is not None else ()
    return parts[0] if parts else -1


def _bytes(trace: Trace, variable: int, alone: bool) -> int:
    """The bytes of a variable, together with all other parts of the same recorded variable unless `alone`."""
    parts = [variable] if alone else trace.parts_of(trace.recorded(variable))
    return int(sum(trace.variable_bytes[v] for v in parts))


def _place(trace: Trace | None, variable: int) -> str:
    return printable(trace.place(variable), 200) if trace is not None and variable >= 0 else ""


def _largest_born(trace: Trace | None, function: int) -> int:
    """The largest variable that a function allocates, or -1 if none is known."""
    if trace is None or function < 0:
        return -1
    born = [(int(trace.variable_bytes[v]), v) for v in (trace.born == function).nonzero()[0].tolist()]
    return max(born)[1] if born else -1


def _comparison(recording: Recording, predicted: Predicted, spans: list[Span]) -> list[tuple[str, str, str]]:
    """Rows of (what, predicted, measured) about one iteration. Measured figures are medians over those in the ring."""
    problem, scene = predicted.problem, predicted.scene()
    waiting = sum(bar.end - max(bar.start, 0.0) for bar in scene.stalls)
    copies = predicted.events.copies
    bytes_of = {out: sum(c.chunks for c in copies if c.is_out == out) * problem.chunk_bytes for out in (True, False)}
    compute = sum(bar.end - bar.start for bar in scene.runs)
    rows: list[tuple[str, float, list[float], Callable[[float], str]]] = [
        ("an iteration", scene.seconds, [span.end - span.start for span in spans], format_duration),
        ("of it, functions waiting", waiting, [recording.stall_seconds(span) for span in spans], format_duration),
        ("of it, functions running", compute, [], format_duration),
        ("lower bound of all plans", lower_bound(problem).seconds, [], format_duration),
        ("moved out", bytes_of[True], [recording.moved_bytes(s, is_out=True) for s in spans], format_bytes),
        ("moved in", bytes_of[False], [recording.moved_bytes(s, is_out=False) for s in spans], format_bytes),
    ]
    return [
        (name, text(simulated), text(statistics.median(measured)) if measured else "")
        for name, simulated, measured, text in rows
    ]


def _run_advice(summary: dict[str, Any], steps: list[Step]) -> Iterator[str]:
    """Advice that the run's own figures give."""
    moved = summary["swap_out_bytes"] + summary["swap_in_bytes"]
    if moved and not summary["plan_count"]:
        yield (
            "No plan was made: no sequence of functions came twice. If batches differ in shape, pad them to a few "
            "sizes. If iterations end elsewhere than at optimizer.step(), call ooc.pytorch.step() there."
        )
    elif summary["divergence_count"] > max(2, len(steps) // 10):
        yield (
            f"The program departed from its plan {summary['divergence_count']} times in {len(steps)} iterations. Each "
            "such iteration goes on in demand mode: keep shapes and branches the same where you can."
        )
    if summary["driver_failure_count"]:
        failures = summary["driver_failure_count"]
        yield f"{failures} driver calls failed and were made up for; `swapd doctor` looks at the device."
    if moved and summary["demand_swap_in_bytes"] > 0.5 * max(summary["swap_in_bytes"], 1) and len(steps) < 6:
        yield "Most of what came in came on demand, as the run was short: the first iterations run without a plan."


def _place_advice(waits: list[Waited], trace: Trace | None, spans: list[Span]) -> Iterator[str]:
    """Advice about the one place that most of the waiting is for, if it is worth advice."""
    total, whole = sum(row.seconds for row in waits), sum(span.end - span.start for span in spans)
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in waits:
        if place := _place(trace, _variable_of(row, trace)):
            seconds[place] += row.seconds
    place, longest = max(seconds.items(), key=lambda item: item[1], default=("", 0.0))
    if not place or longest < _MUCH_OF_WAITING * total or total < _MUCH_OF_TIME * whole:
        return
    yield (
        f"{longest / total:.0%} of the waiting is for what {place} allocates. Recomputing it in the backward pass "
        "(torch.utils.checkpoint), or making it smaller, shortens an iteration most."
    )


def _simulated_advice(run: RunSoFar, predicted: Predicted) -> list[str]:
    """The advice of `swapd simulate`, if there is time for it."""
    plans = max(int(run.summary["plan_count"]), 1)
    if run.summary["planning_seconds"] / plans * _PLANS_FOR_ADVICE > _LONGEST_ADVICE_SECONDS:
        return ["More advice takes simulations: `swapd simulate` gives it for the run's trace (OOC_TRACE)."]
    outcome = run_plan(predicted.problem, predicted.plan, DEMAND if run.policy == "none" else run.policy)
    return [f"As simulated: {advice.text}." for advice in Advisor(outcome, run.trace).advise()]


def _notes(
    recording: Recording, trace: Trace | None, predicted: Predicted | None, summary: dict[str, Any]
) -> Iterator[str]:
    if str(summary["device"]).lower().startswith("emulated"):
        yield "The device is emulated: its memory is the machine's, and its times say nothing about a GPU."
    seconds = format_duration(recording.now - recording.begin)
    text = f"The pictures and the waits are of the last {seconds}, {len(recording.events)} events"
    if recording.lost:
        yield f"{text}; {recording.lost} older ones were overwritten."
    else:
        yield f"{text}: all since the timeline was turned on."
    if trace is None:
        yield "No whole iteration was recorded, so nothing is predicted."
    elif predicted is None:
        yield "Nothing is predicted: the sequence is too long to simulate at the end of a program, or does not fit."
    if trace is not None and trace.variable_place is not None:
        known = int((trace.variable_place >= 0).sum())
        yield f"The place of allocation is known of {known} of {trace.variables} variables of an iteration."
    yield "A wait counts for the variable that took longest of those that a function waited for at once."
