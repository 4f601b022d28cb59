"""Observer: what a session shows of itself while it runs and when it ends: timeline, report, status, NVTX ranges.

Everything is off unless a setting asks for it. Nothing here may stop a program: a failed write causes a warning.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ooc_alloc import Core, Iteration, OocError
from ooc_alloc.timeline import EVENTS_KEPT
from swapd.files import write_whole
from swapd.host_limits import peak_rss_bytes
from swapd.observing.perfetto import encoded, measured_to_perfetto
from swapd.observing.recording import Predicted, Recording, Waited
from swapd.planner import Planner
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.simulator import simulate_events
from swapd.trace.ranged import plan_in_parts
from swapd.trace.trace import Trace

log = logging.getLogger("ooc.swapd")

_MOST_PLACED = 64  # iterations in which places are looked up; where no sequence repeats, it would never end
_LAST_STEPS, _WAITS_SHOWN = 120, 8  # how many steps, and how many waits, `swapd top` is told of
_NVTX = ("libnvtx3interop.so", "libnvToolsExt.so.1")  # of CUDA 13's package, and of the packages before it
_MOST_SIMULATED = 20_000  # functions; the simulation of more takes too long for the end of a program


class Observer:
    """The observer of one session; it has to be made before the session's first iteration.

    Args:
        timeline: the file that the timeline is written to when the session ends.
        report: the file that the report is written to when the session ends.
        summary: returns the figures so far.
        record_places: switches whether the integration tells where the program allocates variables.
    """

    def __init__(
        self,
        core: Core,
        planner: Planner,
        *,
        timeline: Path | None,
        report: Path | None,
        summary: Callable[[], dict[str, Any]],
        record_places: Callable[[bool], None],
    ) -> None:
        self.core, self.planner = core, planner
        self.timeline_path, self.report_path = timeline, report
        self._summary, self._record_places = summary, record_places
        self.steps = planner.steps.kept
        self.began = time.time()
        self.arguments = list(sys.argv) or ["?"]
        self._iterations: dict[int, Iteration] = {}
        self._server: Any = None
        self._placing, self._placed = False, 0
        self._place_again = 0  # how many more iterations look up places although their sequence is known
        self._written = False

    @property
    def recorded(self) -> bool:
        """Whether the ring of events is on from the start of the session to its end."""
        return self.timeline_path is not None or self.report_path is not None

    def start(self, ranges: str | None, status: bool) -> None:
        """Turns on what the settings ask for.

        Args:
            ranges: the library of NVTX's calls, or "1" to look for one; None for no NVTX ranges.
            status: whether `swapd top` may look into this process.
        """
        if self.recorded:
            self.core.timeline_start()
            self._place(True)
        if ranges:
            self._load_ranges(ranges)
        if status:
            from swapd.observing.status import Server

            try:
                self._server = Server(self.answer)
            except OSError as error:
                log.warning("swapd top will not find this process: %s", error)

    def _load_ranges(self, wanted: str) -> None:
        reasons = []
        for library in [wanted] if wanted != "1" else nvtx_libraries():
            try:
                return self.core.ranges_load(library)
            except OocError as error:
                reasons.append(str(error))
        log.warning("no NVTX ranges: %s", "; ".join(reasons))

    def _place(self, on: bool) -> None:
        if on != self._placing:
            self._placing = on
            self._record_places(on)

    def ended(self, iteration: Iteration) -> None:
        """An iteration has ended."""
        if iteration.functions == 0:
            return
        if len(self._iterations) < _MOST_PLACED or iteration.fingerprint in self._iterations:
            self._iterations[iteration.fingerprint] = iteration
        if not self._placing and not self.recorded:
            return
        if self._placing:
            self._placed += 1
            self._place_again = max(self._place_again - 1, 0)
            if iteration.fingerprint in self._iterations:
                self.planner.trace(iteration)  # makes the planner keep the places
        # Once a sequence was seen twice, its variables' places are known.
        new = self.recorded and iteration.seen_count == 1 and self._placed < _MOST_PLACED
        self._place(new or self._place_again > 0)

    def start_timeline(self, events: int = EVENTS_KEPT) -> None:
        """Keeps the newest `events` events from now on, and forgets those that are there. Any thread may call this."""
        self.core.timeline_start(events)
        self._place_again = 2  # the rest of the iteration under way, and one whole iteration
        self._place(True)

    def main_trace(self) -> Trace | None:
        """Returns the trace of the sequence that took the most time, or None if no trace is kept.

        Sequences that came more than once go before all others.
        """

        def worth(fingerprint: int) -> tuple[bool, float]:
            return self._iterations[fingerprint].seen_count > 1, self.planner.seconds[fingerprint]

        for fingerprint in sorted(self._iterations, key=worth, reverse=True):
            try:
                return self.planner.trace(self._iterations[fingerprint])
            except OocError:  # no longer kept
                continue
        return None

    def predicted(self, trace: Trace | None) -> Predicted | None:
        """Simulates the iteration of a trace under its plan, or in demand mode if it has none; None if that fails."""
        if trace is None or not 0 < trace.functions <= _MOST_SIMULATED:
            return None
        made = self.planner.made.get(trace.fingerprint)
        plan = plan_in_parts(made.known if made is not None else Plan(policy="demand"), trace)
        try:
            problem = Problem.from_trace(trace, int(self.core.stats()["budget_bytes"])).within_slabs()
            return Predicted(problem, simulate_events(problem, plan)[1], plan)
        except ValueError as error:  # the budget is too small, or the trace has too many chunks
            log.info("nothing is predicted: %s", error)
            return None

    def recording(self) -> Recording:
        """A copy of what is in the ring now. Raises OocError if the timeline never was on."""
        if self.core.timeline_state().capacity == 0:
            raise OocError("the timeline is off: set OOC_TIMELINE, or start it with timeline_start()")
        return Recording.of(self.core)

    def timeline_text(self) -> str:
        """The Perfetto JSON of what is in the ring now. Raises OocError if the timeline never was on."""
        recording, trace = self.recording(), self.main_trace()
        return measured_to_perfetto(recording, self.predicted(trace), trace)

    def report_text(self, *, advise: bool) -> str:
        """The page about the run so far. Raises OocError if the timeline never was on."""
        from swapd.observing.report_facts import RunSoFar
        from swapd.observing.report_page import page

        recording, trace = self.recording(), self.main_trace()
        predicted, policy = self.predicted(trace), self.planner.policy
        run = RunSoFar(self.arguments, self._summary(), self.steps, recording, trace, predicted, policy)
        return page(run, advise=advise)

    def answer(self, request: str) -> str:
        """The text for a request of `swapd top` (`status.py` lists the requests). Raises whatever goes wrong."""
        if request == "status":
            return json.dumps(self._status())
        if request == "timeline":
            return self.timeline_text()
        if request in ("timeline start", "timeline stop"):
            if self.recorded:  # `swapd top` does not change a timeline that the user asked for
                return "done"
            if request == "timeline start":
                self.start_timeline()
            else:
                self.core.timeline_stop()
            return "done"
        if request == "report":
            return self.report_text(advise=False)
        return f"error: {request[:40]!r} is no request; this release knows status, timeline and report"

    def _status(self) -> dict[str, Any]:
        state = self.core.timeline_state()
        waits: list[Waited] = []
        if state.on:
            recording = Recording.of(self.core)
            waits = recording.waits(recording.spans)[:_WAITS_SHOWN]
        stats = self.core.stats()
        return {
            "version": 1,
            "pid": os.getpid(),
            "arguments": self.arguments,
            "device": self.core.device_name,
            "unix_seconds": time.time(),
            "elapsed_seconds": time.time() - self.began,
            "stats": stats,
            "peak_rss_bytes": peak_rss_bytes(),
            "steps": self.planner.steps.histogram.count,
            "last_step_seconds": [step.seconds for step in self.steps[-_LAST_STEPS:]],
            "last_stall_seconds": [step.stall_seconds for step in self.steps[-_LAST_STEPS:]],
            **self.planner.figures(),
            "no_plan_reason": self.planner.no_plan_reason(stats["swap_out_bytes"] + stats["clean_drop_bytes"]),
            "timeline": {"on": state.on, "recorded": state.recorded, "lost": state.lost},
            "waits": [wait._asdict() for wait in waits],
        }

    def save_timeline(self, path: Path) -> None:
        """Writes what is in the ring now. Raises OocError if the timeline never was on, or OSError."""
        write_whole(path, encoded(self.timeline_text(), path))

    def save_report(self, path: Path, *, advise: bool = True) -> None:
        """Writes the page about the run so far. Raises OocError if the timeline never was on, or OSError."""
        write_whole(path, self.report_text(advise=advise).encode("utf-8"))

    def write(self, *, in_a_hurry: bool) -> None:
        """Writes the files that were asked for, once. In a hurry it leaves out advice, which takes simulations."""
        if self._written or not self.recorded:
            return
        self._written = True
        self.core.timeline_stop()
        save_report = functools.partial(self.save_report, advise=not in_a_hurry)
        for path, save in ((self.timeline_path, self.save_timeline), (self.report_path, save_report)):
            try:
                if path is not None:
                    save(path)
                    log.info("wrote %s", path)
            except Exception as error:
                log.warning("cannot write %s: %s", path, error, exc_info=not isinstance(error, OSError))

    def close(self) -> None:
        """Stops answering `swapd top`, because the session has ended."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def in_child(self) -> None:
        """Stops answering `swapd top` in a forked copy; the socket's name stays the parent's.

        The session keeps a forked copy from writing files.
        """
        if self._server is not None:
            self._server.in_child()
            self._server = None


def nvtx_libraries() -> list[str]:
    """Libraries that export NVTX's calls, best first: those of installed NVIDIA packages, then by the loader's name.

    NVTX itself is a header that looks for a tool, such as Nsight Systems; these libraries are for programs without it.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [str(path) for name in _NVTX for root in roots for path in sorted(root.glob(f"*/lib/{name}*"))]
    return [*found, *_NVTX]
