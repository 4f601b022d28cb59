"""The facts of a report about a run: what happened, what waited for what, what was predicted, what to change."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swapd.observing.advice import Advisor
from swapd.observing.analysis import DEMAND, allocated_by, printable, run_plan
from swapd.observing.recording import Predicted, Recording, Span, Waited
from swapd.planning.lower_bound import lower_bound
from swapd.recompute.schedule import runs_again
from swapd.step_times import Step
from swapd.tiers import store
from swapd.trace.trace import Trace
from swapd.units import format_bytes, format_duration

_MOST_WAITS = 12
_LONGEST_ADVICE_SECONDS = 20.0  # of simulations, at the end of a program
_PLANS_FOR_ADVICE = 25  # advice makes about as many
_MUCH_LONGER, _MOSTLY_BUSY = 1.2, 0.8  # from which on a disk is the limit: times the computation, share of the time
_MUCH_OF_WAITING, _MUCH_OF_TIME = 0.3, 0.02  # shares from which on a place is worth advice


@dataclass(frozen=True, eq=False)
class RunSoFar:
    """What a report is made from. Its texts may hold anything a program can put into a name."""

    arguments: list[str]  # the program's command line
    summary: dict[str, Any]
    steps: list[Step]
    recording: Recording
    trace: Trace | None  # of the main sequence
    predicted: Predicted | None  # for that sequence
    policy: str

    @property
    def fingerprint(self) -> int | None:
        """The main sequence's; None if no trace is kept."""
        return self.trace.fingerprint if self.trace is not None else None

    @cached_property
    def spans(self) -> list[Span]:
        """The main sequence's iterations in the ring: those under a plan, where there are any."""
        found = [span for span in self.recording.spans if span.fingerprint == self.fingerprint]
        return [span for span in found if span.planned] or found

    @cached_property
    def waits(self) -> list[Waited]:
        """What waited in `spans`, longest first."""
        return self.recording.waits(self.spans)

    @property
    def steady(self) -> list[Step]:
        """The later half of the main sequence's iterations, of all iterations if no trace is kept."""
        found = [step for step in self.steps if self.fingerprint in (None, step.fingerprint)]
        return found[len(found) // 2 :]


@dataclass(frozen=True)
class WaitRow:
    """How long a function waited for a variable, per iteration."""

    seconds: float
    share: float  # of an iteration's time
    function: str
    waited_for: str
    place: str  # in the user's program, where the variable was allocated
    allocated_by: str


def happened(run: RunSoFar) -> Iterator[str]:
    """Sentences about the run."""
    summary, steps = run.summary, run.steps
    budget, peak = summary["budget_bytes"], summary["live_peak_bytes"]
    tier = store(summary)
    device = "the emulated device" if summary["device"] == "emulated" else summary["device"]
    device = "this machine's memory" if tier == "disk" and summary["device"] == "emulated" else device
    yield (
        f"On {device}, the program had {format_bytes(peak)} live at its peak and a budget of "
        f"{format_bytes(budget)}: {peak / budget:.2f} times the budget. The device held "
        f"{format_bytes(summary['device_peak_bytes'])} at most."
    )
    if steps:
        later = [step.seconds for step in run.steady or steps]
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
            f"{format_bytes(summary['clean_drop_bytes'])} left without a copy, as the {tier} had them still."
        )
    if summary.get("recompute_drop_count"):
        yield (
            f"{format_bytes(summary['recompute_drop_bytes'])} left without a copy and were computed again, by "
            f"{summary['recompute_function_count']} functions that ran once more, in "
            f"{format_duration(summary['recompute_seconds'])}."
        )
    if tier == "disk":
        yield (
            f"Swapped data were on the disk: {format_bytes(summary['disk_peak_bytes'])} of the "
            f"{format_bytes(summary['disk_budget_bytes'])} that they may take. "
            f"{format_bytes(summary['disk_written_bytes'])} were written and "
            f"{format_bytes(summary['disk_read_bytes'])} read. The process had "
            f"{format_bytes(summary['peak_rss_bytes'])} of the machine's memory at most."
        )
    elif summary.get("disk_budget_bytes"):
        yield (
            f"Swapped data took {format_bytes(summary['host_peak_bytes'])} of host memory at most, of the "
            f"{format_bytes(summary['host_budget_bytes'])} that they may take, and "
            f"{format_bytes(summary['disk_peak_bytes'])} of the disk below it: "
            f"{format_bytes(summary['disk_written_bytes'])} were written there and "
            f"{format_bytes(summary['disk_read_bytes'])} read. Functions waited "
            f"{format_duration(summary['stall_disk_seconds'])} for the disk."
        )


def wait_rows(run: RunSoFar) -> Iterator[WaitRow]:
    """What waited longest, as means over `run.spans`."""
    trace, predicted = run.trace, run.predicted
    count = max(len(run.spans), 1)
    whole = sum(span.end - span.start for span in run.spans)
    for row in run.waits[:_MOST_WAITS]:
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


def comparison(run: RunSoFar) -> list[tuple[str, str, str]]:
    """Rows of (what, predicted, measured) about one iteration. Measured figures are medians over `run.spans`."""
    recording, predicted, spans = run.recording, run.predicted, run.spans
    if predicted is None:
        return []
    problem, scene = predicted.problem, predicted.scene()
    waiting = sum(bar.end - max(bar.start, 0.0) for bar in scene.stalls)
    copies = predicted.events.copies
    bytes_of = {out: sum(c.bytes for c in copies if c.is_out == out) for out in (True, False)}
    compute = sum(bar.end - bar.start for bar in scene.runs)
    least = predicted.plan.bound_seconds if run.trace is not None and runs_again(run.trace) else None
    rows: list[tuple[str, float, list[float], Callable[[float], str]]] = [
        ("an iteration", scene.seconds, [span.end - span.start for span in spans], format_duration),
        ("of it, functions waiting", waiting, [recording.stall_seconds(span) for span in spans], format_duration),
        ("of it, functions running", compute, [], format_duration),
        ("lower bound of all plans", lower_bound(problem) if least is None else least, [], format_duration),
        ("moved out", bytes_of[True], [recording.moved_bytes(s, is_out=True) for s in spans], format_bytes),
        ("moved in", bytes_of[False], [recording.moved_bytes(s, is_out=False) for s in spans], format_bytes),
    ]
    return [
        (name, text(simulated), text(statistics.median(measured)) if measured else "")
        for name, simulated, measured, text in rows
    ]


def advice(run: RunSoFar, *, simulate: bool) -> list[str]:
    """What to change. With `simulate`, plans are simulated to find more, which takes seconds."""
    return [*_run_advice(run), *_disk_advice(run), *_place_advice(run), *(_simulated_advice(run) if simulate else ())]


def _run_advice(run: RunSoFar) -> Iterator[str]:
    """Advice that the run's own figures give."""
    summary, steps = run.summary, run.steps
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


def _disk_advice(run: RunSoFar) -> Iterator[str]:
    """Advice about a disk: one that fails, and one whose copies are what an iteration takes, as predicted."""
    if not run.summary.get("disk_budget_bytes"):
        return
    if failures := run.summary["disk_failure_count"]:
        yield (
            f"{failures} reads or writes of the disk failed or came short, and were made again where that helped: look "
            "into dmesg, and at what is free in the folder of OOC_DISK."
        )
    if run.predicted is None or store(run.summary) != "disk":
        return
    seconds, events = run.predicted.events.seconds, run.predicted.events
    compute = sum(bar.end - bar.start for bar in events.runs)
    busy = {out: sum(c.end - c.start for c in events.copies if c.is_out == out) for out in (True, False)}
    out = busy[True] >= busy[False]
    if seconds > _MUCH_LONGER * compute and busy[out] > _MOSTLY_BUSY * seconds:
        way = "written to" if out else "read from"
        yield (
            f"The disk is the limit: an iteration is predicted to take {format_duration(seconds)}, of which its "
            f"functions run {format_duration(compute)}, while the disk is {way} for {format_duration(busy[out])}. A "
            "larger OOC_BUDGET, a smaller batch or a faster disk shortens it; `swapd probe --disk` measures a disk."
        )


def _place_advice(run: RunSoFar) -> Iterator[str]:
    """Advice about the one place that most of the waiting is for, if it is worth advice."""
    total, whole = sum(row.seconds for row in run.waits), sum(span.end - span.start for span in run.spans)
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in run.waits:
        if place := _place(run.trace, _variable_of(row, run.trace)):
            seconds[place] += row.seconds
    place, longest = max(seconds.items(), key=lambda item: item[1], default=("", 0.0))
    if not place or longest < _MUCH_OF_WAITING * total or total < _MUCH_OF_TIME * whole:
        return
    yield (
        f"{longest / total:.0%} of the waiting is for what {place} allocates. Recomputing it in the backward pass "
        "(torch.utils.checkpoint), or making it smaller, shortens an iteration most."
    )


def _simulated_advice(run: RunSoFar) -> list[str]:
    """The advice of `swapd simulate`, if there is time for it."""
    if run.predicted is None:
        return []
    plans = max(int(run.summary["plan_count"]), 1)
    if run.summary["planning_seconds"] / plans * _PLANS_FOR_ADVICE > _LONGEST_ADVICE_SECONDS:
        return ["More advice takes simulations: `swapd simulate` gives it for the run's trace (OOC_TRACE)."]
    outcome = run_plan(run.predicted.problem, run.predicted.plan, DEMAND if run.policy == "none" else run.policy)
    off = run.summary.get("recompute") == "off"  # else the run has looked for it
    advisor = Advisor(outcome, run.trace, link=run.recording.link, recompute=off)
    return [f"As simulated: {found.text}." for found in advisor.advise()]


def notes(run: RunSoFar) -> Iterator[str]:
    """Sentences about what the figures are of."""
    recording, trace = run.recording, run.trace
    if str(run.summary["device"]).lower().startswith("emulated"):
        if store(run.summary) == "disk":
            yield "The device is this machine's memory, and what does not fit there is on its disk."
        else:
            yield "The device is emulated: its memory is the machine's, and its times say nothing about a GPU."
    seconds = format_duration(recording.now - recording.begin)
    text = f"The pictures and the waits are of the last {seconds}, {len(recording.events)} events"
    if recording.lost:
        yield f"{text}; {recording.lost} older ones were overwritten."
    else:
        yield f"{text}: all since the timeline was turned on."
    if trace is None:
        yield "No whole iteration was recorded, so nothing is predicted."
    elif run.predicted is None:
        yield "Nothing is predicted: the sequence is too long to simulate at the end of a program, or does not fit."
    if trace is not None and trace.variable_place is not None:
        known = int((trace.variable_place >= 0).sum())
        yield f"The place of allocation is known of {known} of {trace.variables} variables of an iteration."
    yield "A wait counts for the variable that took longest of those that a function waited for at once."
