"""The planner of a run: at each iteration boundary it decides whether to ask for a plan, and installs what was made.

The native threads (`swapd/csrc/daemon.h`) carry plans out. This module works only once an iteration: it fetches the
recorded sequence and hands it over to be planned (`swapd/plan_making.py`), one at a time, by another process.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc_alloc import Core, Iteration, OocError
from swapd import speeds
from swapd.no_plan import why_no_plan
from swapd.plan_making import Answer, Made, Request, answer, step_seconds
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.recompute.account import Account
from swapd.recompute.schedule import Remaker
from swapd.speeds import LINK_UNKNOWN
from swapd.step_times import Step, StepTimes
from swapd.tiers.three_tiers import LowerTiers
from swapd.trace.ranged import RangedTrace
from swapd.trace.trace import Machine, Trace

log = logging.getLogger("ooc.swapd")

_MOST_PLACED = 64  # sequences whose plans, and whose variables' places, are kept
_MOST_NEW_IN_A_ROW = 8  # after more, no new sequence is planned: with growing shapes, none ever comes back
_PLANS = 2  # for a sequence
_PREDICTIONS = 3  # first steps under the last plan, whose times each give a prediction; later ever fewer do
_EXPLAINED = 1000  # of the kept iterations, when it is asked why there is no plan


class Planner:
    """Plans for one core.

    Args:
        core: the allocator whose iterations are planned.
        policy: name of a policy in :mod:`swapd.policies`, or "none" for demand mode only.
        window_bytes: the schedule window; None leaves it to the policy.
        machine: link speeds; None measures them from the core's own transfers.
        expected: link speeds until enough was transferred to measure them, such as the probe's
            (:func:`swapd.devices.profile.known_machine`).
        trace_path: the file that gets, when the program ends, the trace of the sequence whose iterations took the most
            time in all.
        asynchronous: as the core is.
        disk: speeds of the disk below host memory until they are measured; None without one.
        executor: makes the plans, while the program goes on; without one, the thread that ends an iteration does.
        recompute: whether variables may be dropped and made again, where an integration sets `remaker`.
    """

    def __init__(
        self,
        core: Core,
        *,
        policy: str = "auto",
        window_bytes: int | None = None,
        machine: Machine | None = None,
        expected: Machine | None = None,
        trace_path: Path | None = None,
        asynchronous: bool = False,
        disk: Machine | None = None,
        executor: Executor | None = None,
        recompute: bool = False,
    ) -> None:
        self.core = core
        self.policy = policy
        self.window_bytes = window_bytes
        self.machine = machine
        self.expected = expected or LINK_UNKNOWN
        self.trace_path = trace_path
        self.asynchronous = asynchronous
        self.disk = disk
        self.executor = executor
        self.recompute = recompute
        self.steps = StepTimes()
        self.planning_seconds = 0.0
        self.last_iteration: Iteration | None = None
        self.made: dict[int, Made] = {}  # the last plan of each sequence, of as many as the core keeps traces of
        self._last: int | None = None  # the sequence that was planned last
        self._asked: tuple[int, Request, Future[Answer]] | None = None  # what is being made, and for which sequence
        self._seconds_under: dict[int, float] = {}  # of each sequence's last iteration that ran under its plan
        self.seconds: defaultdict[int, float] = defaultdict(float)  # spent in iterations, by fingerprint
        self._measured: Counter[int] = Counter()
        self.calls_beside = 0  # of modules, by threads whose functions were not the recorded ones
        self._followed = 0  # iterations under the last plan of a sequence
        self._new_in_a_row = 0
        self._failed: dict[int, str] = {}  # why a sequence has no plan, by fingerprint
        self._trace_of: tuple[int, Trace] | None = None
        self._places: dict[int, NDArray[np.uint32]] = {}  # by fingerprint: equal sequences number variables alike
        self._account = Account()
        self._budget: int | None = None  # bytes, for which plans are made

    @property
    def remaker(self) -> Remaker | None:
        """Who drops variables and makes them again. An integration that can sets it before the first iteration."""
        return self._account.remaker

    @remaker.setter
    def remaker(self, remaker: Remaker) -> None:
        self._account.remaker = remaker

    def boundary(self) -> Iteration:
        """Ends the iteration under way and, where it pays, has those planned that will look like it."""
        self._account.iteration_ends()
        ended = self.core.boundary()
        if ended.functions == 0:
            return ended
        moved = ended.swapped_bytes > 0
        waited = self._asked is not None and not ended.planned
        self.steps.add(Step(ended.seconds, ended.stall_seconds, ended.followed_plan, ended.fingerprint, moved, waited))
        if ended.followed_plan and ended.fingerprint in self.made:
            self._seconds_under[ended.fingerprint] = ended.seconds
        self.seconds[ended.fingerprint] += ended.seconds
        self.last_iteration = ended
        if self.trace_path is not None:
            self._keep_trace(ended)
        waits = self._asked is not None
        self._account.count(ended, last_plan=self._measured[ended.fingerprint] >= _PLANS, waits=waits)
        planned_now = self._take()
        wanted = self._worth_planning(ended)
        timed = None if wanted else self._timed(ended)
        under = None if wanted else self._worth_predicting(ended)
        if timed is not None:
            under = self.made.get(ended.fingerprint)
        if (wanted or under is not None) and self._asked is None and ended.fingerprint != planned_now:
            self._ask(ended, under, timed)
        return ended

    def _ask(self, ended: Iteration, under: Made | None, timed: RangedTrace | None) -> None:
        budget = int(self.core.stats()["budget_bytes"])
        if budget != self._budget:
            self._budget_is(budget)
            timed = None
        if timed is not None:
            self._account.asked(ended.fingerprint)
        recorded, drops = timed or self.recorded(ended), timed is not None
        request = Request(recorded, budget, self.policy, self.window_bytes, self.lower(), under, recompute=drops)
        if self.executor is not None:
            self._asked = ended.fingerprint, request, self.executor.submit(answer, request)
        else:
            self._accept(ended.fingerprint, request, answer(request))

    def _timed(self, ended: Iteration) -> RangedTrace | None:
        """The sequence with the least times of its functions, if it is known well enough to choose what to drop.

        Not where there is a disk below host memory: what moves there is planned from a trace that repeats itself as it
        was recorded, and nobody has solved that for one that is rewritten.
        """
        can = self.recompute and self.remaker is not None and self.disk is None and ended.timed
        can = can and self.policy != "none"
        last = ended.followed_plan and self._measured[ended.fingerprint] >= _PLANS
        if not can or not last or self._account.is_timed(ended.fingerprint):
            return None
        recorded = self.recorded(ended)
        seconds = self._account.time_alone(ended, recorded.whole.function_seconds)
        return None if seconds is None else replace(recorded, whole=replace(recorded.whole, function_seconds=seconds))

    def _budget_is(self, budget_bytes: int) -> None:
        """There is another budget than before. What was chosen for that one is no longer right."""
        if self._budget is not None and self.remaker is not None:
            self._account.forget()
            self._measured.clear()  # the core forgets its plans, too: sequences are planned as if they were new
        self._budget = budget_bytes

    def give_up(self) -> None:
        """From now on nothing is planned or dropped any more: the program goes on in demand mode."""
        self.policy = "none"
        self._account.forget()

    def _take(self) -> int | None:
        """Takes what was made meanwhile; returns the sequence if it is a plan. Raises what went wrong there."""
        if self._asked is None or not self._asked[2].done():
            return None
        (fingerprint, request, future), self._asked = self._asked, None
        self._accept(fingerprint, request, future.result())
        return fingerprint if request.under is None else None

    def _accept(self, fingerprint: int, request: Request, got: Answer) -> None:
        self.planning_seconds += got.spent_seconds
        under = request.under
        if got.failure:
            log.info("no plan for %016x: %s", fingerprint, got.failure)
            self._failed[fingerprint] = got.failure
            self._account.unplannable(fingerprint)
        elif got.made is not None:
            self._install(fingerprint, got.made, got.spent_seconds)
        elif under is not None and self.made.get(fingerprint) is under:
            plan = replace(under.plan, predicted_seconds=got.predicted_seconds)
            self.made[fingerprint] = replace(under, plan=plan)
            if got.schedule is not None and request.budget_bytes == int(self.core.stats()["budget_bytes"]):
                self._account.follow(got.schedule, got.recompute_bound_seconds)

    def _worth_predicting(self, ended: Iteration) -> Made | None:
        """The plan that was followed, if the times under it are to say again what a step takes.

        The plan was made from the times of a step before it. So the first steps are worth it, and later ever fewer.
        """
        if not ended.followed_plan or ended.fingerprint != self._last or self._measured[ended.fingerprint] < _PLANS:
            return None
        self._followed += 1
        rarely = self._followed.bit_count() == 1 and not self.asynchronous  # on streams nothing is timed any more
        return self.made.get(self._last) if self._followed <= _PREDICTIONS or rarely else None

    @property
    def last_plan(self) -> Plan | None:
        """Of the sequence that was planned last; in it, parts of variables are variables."""
        made = self.made.get(self._last) if self._last is not None else None
        return made.plan if made is not None else None

    def simulated_seconds(self, problem: Problem) -> float | None:
        """A step's time under the last plan with the functions' times of `problem`; None if that cannot be told."""
        made = self.made.get(self._last) if self._last is not None else None
        return step_seconds(problem, made, self.lower()) if made is not None else None

    def _shown(self) -> int | None:
        """Of the sequences with a plan, the one whose iterations took the most time: training, not its validation."""
        return max(self.made, key=lambda fingerprint: self.seconds[fingerprint], default=None)

    @property
    def planned_step_seconds(self) -> float | None:
        """Of the last iteration that ran under the plan whose figures are shown."""
        shown = self._shown()
        return self._seconds_under.get(shown) if shown is not None else None

    def figures(self) -> dict[str, Any]:
        """What is shown of one plan, or of the settings before the first one, by the keys of the summary.

        The plan is the last one for the sequence that took the most time. The bound of one that recomputes is of
        swapping and recomputing. What was recomputed is all since the start.
        """
        shown = self._shown()
        plan = self.made[shown].plan if shown is not None else None
        return {
            "policy": plan.policy if plan is not None else self.policy,
            "window_bytes": plan.window_bytes if plan is not None else self.window_bytes,
            "predicted_step_seconds": plan.predicted_seconds if plan is not None else None,
            "bound_step_seconds": plan.bound_seconds if plan is not None else None,
            "planning_seconds": self.planning_seconds,
            "recompute": "exact" if self.recompute else "off",
            **self._account.shown(),
        }

    def no_plan_reason(self, left_bytes: float) -> str | None:
        """Why iterations had no plan (:func:`swapd.no_plan.why_no_plan`), where so many bytes have left the device."""
        if not self.steps.kept and left_bytes > 0:
            return "no iteration was found: call ooc.step() at the end of each, in the thread that runs them"
        threads = 2 * self.calls_beside > self.steps.histogram.count
        return why_no_plan(self.steps.kept[-_EXPLAINED:], self.policy, self._failed, side_by_side=threads)

    @property
    def unplannable_sequences(self) -> int:
        """The number of sequences for which the policy found no plan."""
        return len(self._failed)

    def _worth_planning(self, ended: Iteration) -> bool:
        first_time = ended.seen_count == 1
        self._new_in_a_row = self._new_in_a_row + 1 if first_time else 0
        if self.policy == "none" or ended.contains_first or ended.fingerprint in self._failed:
            return False
        if ended.planned:
            # The first iteration under a plan is the first one that is recorded without demand stalls, so its times
            # are worth a second plan.
            return ended.followed_plan and self._measured[ended.fingerprint] < _PLANS
        return ended.swapped_bytes > 0 and self._new_in_a_row <= _MOST_NEW_IN_A_ROW

    def _install(self, fingerprint: int, made: Made, spent_seconds: float) -> None:
        bound = self._account.bound_seconds(fingerprint)
        if bound is not None:  # the plan's own is of swapping with these drops only
            plan, known = (replace(plan, bound_seconds=bound) for plan in (made.plan, made.known))
            made = replace(made, plan=plan, known=known)
        below = {} if self.disk is None else made.moves.columns()
        try:
            self.core.install_plan(fingerprint, *made.columns(), **below)
        except OocError as error:  # meanwhile an iteration like it freed less of what was there before
            log.info("%016x is planned again: %s", fingerprint, error)
            return
        self._measured[fingerprint] += 1
        self._last, self._followed = fingerprint, 0
        self.made[fingerprint] = made
        self._seconds_under.pop(fingerprint, None)
        if len(self.made) > _MOST_PLACED:
            del self.made[min(self.made, key=lambda fingerprint: self.seconds[fingerprint])]
        plan = made.plan
        log.debug(
            "plan for %016x by %s: %d outs, %d ins, %d write-backs, %d down, %d up, predicted %.3f s, bound %.3f s, "
            "planned in %.3f s",
            fingerprint,
            plan.policy,
            len(plan.outs),
            len(plan.ins),
            len(plan.write_backs),
            len(made.moves.downs),
            len(made.moves.ups),
            plan.predicted_seconds or 0.0,
            plan.bound_seconds or 0.0,
            spent_seconds,
        )

    def link(self) -> Machine:
        """Speeds and costs: given, or achieved by this process's own transfers and calls, or expected."""
        if self.machine is not None:
            return self.machine
        return speeds.link(self.core.stats(), self.expected, asynchronous=self.asynchronous)

    def lower(self) -> LowerTiers | None:
        """What lies under the device where host memory has a disk below it, as fast as it was so far."""
        return speeds.lower_tiers(self.core.stats(), self.disk) if self.disk is not None else None

    def trace(self, ended: Iteration) -> Trace:
        """Returns the recorded sequence of an iteration that `boundary` returned.

        A variable that is used in ranges becomes several variables, one for each part. Raises OocError if the core no
        longer keeps the sequence.
        """
        return self.recorded(ended).cut()

    def recorded(self, ended: Iteration) -> RangedTrace:
        """Returns the sequence as the core recorded it: whole variables, and for each use the chunks that it is of."""
        arrays = self.core.trace_arrays(ended)
        stats = self.core.stats()
        chunk = int(stats["chunk_bytes"])
        names = [self.core.function_name(int(identifier)) for identifier in range(int(arrays.function_name.max()) + 1)]
        whole = Trace(
            function_names=tuple(names[int(identifier)] for identifier in arrays.function_name),
            function_start=arrays.function_start,
            function_seconds=arrays.function_seconds.clip(min=0.0),
            variable_bytes=arrays.variable_bytes.astype("int64"),
            born=arrays.variable_born,
            died=arrays.variable_died,
            previous=arrays.variable_previous,
            use_offsets=offsets_of(arrays.use_function, ended.functions),
            use_variables=arrays.use_variable.astype("int32"),
            use_flags=arrays.use_access.astype("uint8"),
            fingerprint=ended.fingerprint,
            chunk_bytes=chunk,
            slab_chunks_peak=-(-ended.slab_peak_bytes // chunk),
            machine=self.link(),
            **self._places_of(ended),
        )
        return RangedTrace(
            whole, arrays.use_first_chunk, arrays.use_chunk_count, most_chunks=int(stats["budget_bytes"]) // chunk
        )

    def _places_of(self, ended: Iteration) -> dict[str, Any]:
        """Returns the trace's fields about places.

        Places are recorded in some iterations only, and kept for later iterations of the same sequence.
        """
        found = self.core.trace_places(ended.fingerprint, ended.variables)
        known = self._places.get(ended.fingerprint)
        if known is not None:
            found = np.where(found == 0, known, found)
        if not found.any():
            return {}
        if known is not None or len(self._places) < _MOST_PLACED:
            self._places[ended.fingerprint] = found
        numbers, which = np.unique(found, return_inverse=True)
        texts = [self.core.place_text(int(number)) for number in numbers if number]
        return {"places": tuple(texts), "variable_place": which - (len(numbers) - len(texts))}

    def _keep_trace(self, ended: Iteration) -> None:
        if self._trace_of is None or self.seconds[ended.fingerprint] >= self.seconds[self._trace_of[0]]:
            self._trace_of = (ended.fingerprint, self.trace(ended))

    def close(self) -> None:
        """Stops the native threads and what plans, and writes the trace that was asked for."""
        self._account.close()
        if self.executor is not None:
            self.executor.shutdown()
        self.core.stop_daemon()
        if self.trace_path is not None and self._trace_of is not None:
            self._trace_of[1].save(self.trace_path)


def offsets_of(use_function: NDArray[np.uint32], functions: int) -> NDArray[np.int64]:
    """Returns int64[functions + 1]: the index of each function's first use, then the number of all uses.

    Args:
        use_function: the function of each use, in ascending order.
    """
    return np.searchsorted(use_function, np.arange(functions + 1, dtype=np.uint32)).astype(np.int64)
