"""Observer: what a session shows of itself while it runs and when it ends: timeline, report, status, NVTX ranges.

Everything is off unless a setting asks for it. Nothing here may stop a program: what cannot be written is a warning.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ooc_alloc import Iteration, OocError
from ooc_alloc.timeline import EVENTS_KEPT
from swapd.files import write_whole
from swapd.observing import nvtx
from swapd.observing.perfetto import encoded, measured_to_perfetto
from swapd.observing.recording import Predicted, Recording
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.simulation.simulator import simulate_events
from swapd.trace.ranged import plan_in_parts
from swapd.trace.trace import Trace

if TYPE_CHECKING:
    from swapd.session import Session

log = logging.getLogger("ooc.swapd")

_MOST_STEPS = 100_000
_MOST_PLACED = 64  # iterations in which places are looked for: sequences that never repeat would take them for ever
_MOST_SIMULATED = 20_000  # functions; a longer sequence takes too long for the end of a program


class Step(NamedTuple):
    """One iteration that has ended."""

    seconds: float
    stall_seconds: float
    followed_plan: bool
    fingerprint: int = 0  # of its sequence


class Observer:
    """Of one session; made before its first iteration."""

    def __init__(self, session: Session, timeline: Path | None, report: Path | None) -> None:
        self.session, self.core, self.daemon = session, session.core, session.daemon
        self.timeline_path, self.report_path = timeline, report
        self.steps: list[Step] = []
        self.began = time.time()
        self.arguments = list(sys.argv) or ["?"]
        self._iterations: dict[int, Iteration] = {}
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._server: Any = None
        self._placing, self._placed = False, 0
        self._place_again = 0  # iterations in which places are looked for although their sequence is known
        self._written = False

    @property
    def recorded(self) -> bool:
        """Whether the ring is wanted from the start to the end."""
        return self.timeline_path is not None or self.report_path is not None

    def start(self) -> None:
        """Turns on what the settings ask for."""
        config = self.session.config
        if self.recorded:
            self.core.timeline_start()
            self._place(True)
        if config.nvtx:
            self._load_ranges(config.nvtx)
        if config.status:
            from swapd.observing.status import Server

            try:
                self._server = Server(self)
            except OSError as error:
                log.warning("swapd top will not find this process: %s", error)

    def _load_ranges(self, wanted: str) -> None:
        reasons = []
        for library in [wanted] if wanted != "1" else nvtx.candidates():
            try:
                return self.core.ranges_load(library)
            except OocError as error:
                reasons.append(str(error))
        log.warning("no NVTX ranges: %s", "; ".join(reasons))

    def _place(self, on: bool) -> None:
        if on != self._placing:
            self._placing = on
            self.session.record_places(on)

    def ended(self, iteration: Iteration) -> None:
        """An iteration has ended."""
        if iteration.functions == 0:
            return
        if len(self.steps) < _MOST_STEPS:
            step = Step(iteration.seconds, iteration.stall_seconds, iteration.followed_plan, iteration.fingerprint)
            self.steps.append(step)
        if len(self._iterations) < _MOST_PLACED or iteration.fingerprint in self._iterations:
            self._iterations[iteration.fingerprint] = iteration
            self._seconds[iteration.fingerprint] += iteration.seconds
        if not self._placing and not self.recorded:
            return
        if self._placing:
            self._placed += 1
            self._place_again = max(self._place_again - 1, 0)
            if iteration.fingerprint in self._iterations:
                self.daemon.trace(iteration)  # keeps the places
        # Once a sequence was seen twice, its variables' places are known.
        new = self.recorded and iteration.seen_count == 1 and self._placed < _MOST_PLACED
        self._place(new or self._place_again > 0)

    def start_timeline(self, events: int = EVENTS_KEPT) -> None:
        """Keeps the newest events from now on; what was there is forgotten. Any thread."""
        self.core.timeline_start(events)
        self._place_again = 2  # the one under way is there in part
        self._place(True)

    def main_trace(self) -> Trace | None:
        """Of the sequence that took the most time, of those that came twice if any did; None: none is kept."""

        def worth(fingerprint: int) -> tuple[bool, float]:
            return self._iterations[fingerprint].seen_count > 1, self._seconds[fingerprint]

        for fingerprint in sorted(self._seconds, key=worth, reverse=True):
            try:
                return self.daemon.trace(self._iterations[fingerprint])
            except OocError:  # no longer kept
                continue
        return None

    def predicted(self, trace: Trace | None) -> Predicted | None:
        """What the simulator says of the iteration, under the plan that is installed or in demand mode."""
        if trace is None or not 0 < trace.functions <= _MOST_SIMULATED:
            return None
        plan = plan_in_parts(self.daemon.plans.get(trace.fingerprint) or Plan(policy="demand"), trace)
        try:
            problem = Problem.from_trace(trace, int(self.core.stats()["budget_bytes"]))
            return Predicted(problem, simulate_events(problem, plan)[1], plan)
        except ValueError as error:  # infeasible, or not in these chunks
            log.info("nothing is predicted: %s", error)
            return None

    def recording(self) -> Recording:
        """What is in the ring now. Raises OocError if it never was on."""
        if self.core.timeline_state().capacity == 0:
            raise OocError("the timeline is off: set OOC_TIMELINE, or start it with timeline_start()")
        return Recording.of(self.core)

    def timeline_text(self) -> str:
        """The Perfetto JSON of what is in the ring now. Raises OocError if it never was on."""
        recording, trace = self.recording(), self.main_trace()
        return measured_to_perfetto(recording, self.predicted(trace), trace)

    def report_text(self, *, advise: bool) -> str:
        """The page about the run so far. Raises OocError if the timeline is off."""
        from swapd.observing.report_facts import run_facts
        from swapd.observing.report_page import page

        return page(run_facts(self, advise=advise))

    def save_timeline(self, path: Path) -> None:
        """Writes what is in the ring now. Raises OocError if it never was on, or OSError."""
        write_whole(path, encoded(self.timeline_text(), path))

    def save_report(self, path: Path) -> None:
        """Writes the page about the run so far. Raises OocError if the timeline is off, or OSError."""
        write_whole(path, self.report_text(advise=True).encode("utf-8"))

    def write(self, *, in_a_hurry: bool) -> None:
        """Writes the files that were asked for, once. In a hurry advice is left out: each piece takes simulations."""
        if self._written or not self.recorded or not self.session.managed():
            return
        self._written = True
        self.core.timeline_stop()
        if self.timeline_path is not None:
            path = self.timeline_path
            self._write(path, lambda: encoded(self.timeline_text(), path))
        if self.report_path is not None:
            self._write(self.report_path, lambda: self.report_text(advise=not in_a_hurry).encode("utf-8"))

    def _write(self, path: Path, content: Any) -> None:
        try:
            write_whole(path, content())
            log.info("wrote %s", path)
        except Exception as error:
            log.warning("cannot write %s: %s", path, error, exc_info=not isinstance(error, OSError))

    def close(self) -> None:
        """The session has ended."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def in_child(self) -> None:
        """This is a forked copy, which its session tells to write nothing; the socket's name is the parent's."""
        if self._server is not None:
            self._server.in_child()
            self._server = None
