"""The planner of a run: at each iteration boundary it decides whether to plan, plans, and installs the plan.

The native threads (`swapd/csrc/daemon.h`) carry plans out. This module works only once an iteration: it fetches the
recorded sequence, turns it into a :class:`~swapd.planning.problem.Problem`, asks a policy and hands the moves over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc_alloc import Core, Iteration
from swapd.no_plan import why_no_plan
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import simulate
from swapd.step_times import Step, StepTimes
from swapd.tiers.moves import BlockMoves
from swapd.tiers.planner import TierPlanner
from swapd.trace.ranged import RangedTrace, recorded_plan
from swapd.trace.trace import Machine, Trace

log = logging.getLogger("ooc.swapd")

_MOST_PLACED = 64  # sequences whose plans, and whose variables' places, are kept
_MOST_NEW_IN_A_ROW = 8  # after more, no new sequence is planned: with growing shapes, none ever comes back
_FALLBACK_BYTES_PER_SECOND = 8e9  # of a link that was never measured
_ENOUGH_BYTES = 16 << 20  # moved one way before the speed counts: less would be the speed of a few small copies
_PLANS = 2  # for a sequence
_PREDICTIONS = 3  # first steps under the last plan, whose times each give a prediction; later ever fewer do
_EXPLAINED = 1000  # of the kept iterations, when it is asked why there is no plan
_ENOUGH_CHUNKS = 8  # mapped or unmapped before the time of each counts


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
    ) -> None:
        self.core = core
        self.policy = policy
        self.window_bytes = window_bytes
        self.machine = machine
        self.expected = expected or Machine(
            out_bytes_per_second=_FALLBACK_BYTES_PER_SECOND, in_bytes_per_second=_FALLBACK_BYTES_PER_SECOND
        )
        self.trace_path = trace_path
        self.asynchronous = asynchronous
        self.tiers = TierPlanner(core, disk) if disk is not None else None
        self._moves = BlockMoves()  # of the last plan, below the device's own
        self.steps = StepTimes()
        self.planning_seconds = 0.0
        self.last_plan: Plan | None = None
        self.last_iteration: Iteration | None = None
        self._made: dict[int, Plan] = {}  # the last plan of each sequence, as `last_plan` is
        self._seconds_under: dict[int, float] = {}  # of each sequence's last iteration that ran under its plan
        self.seconds: defaultdict[int, float] = defaultdict(float)  # spent in iterations, by fingerprint
        self._measured: Counter[int] = Counter()
        self.calls_beside = 0  # of modules, by threads whose functions were not the recorded ones
        self._followed = 0  # iterations under the last plan of a sequence
        self._new_in_a_row = 0
        self._failed: dict[int, str] = {}  # why a sequence has no plan, by fingerprint
        self._trace_of: tuple[int, Trace] | None = None
        # By fingerprint, as many as the core keeps traces of. They have the core's numbers of variables, whereas
        # `last_plan` has those of its trace, in which parts of variables are variables.
        self.plans: dict[int, Plan] = {}
        self._places: dict[int, NDArray[np.uint32]] = {}  # by fingerprint: equal sequences number variables alike

    def boundary(self) -> Iteration:
        """Ends the iteration under way and, where it pays, plans the ones that will look like it."""
        ended = self.core.boundary()
        if ended.functions == 0:
            return ended
        began = time.perf_counter()
        moved = ended.swapped_bytes > 0
        self.steps.add(Step(ended.seconds, ended.stall_seconds, ended.followed_plan, ended.fingerprint, moved))
        if ended.followed_plan and ended.fingerprint in self._made:
            self._seconds_under[ended.fingerprint] = ended.seconds
            if self.last_plan is not None and self.last_plan.fingerprint == ended.fingerprint:
                self._predict_again(ended, self.last_plan)
        self.seconds[ended.fingerprint] += ended.seconds
        self.last_iteration = ended
        if self.trace_path is not None:
            self._keep_trace(ended)
        if self._worth_planning(ended):
            self._plan(ended)
        self.planning_seconds += time.perf_counter() - began
        return ended

    def _predict_again(self, ended: Iteration, plan: Plan) -> None:
        """What a step of the last plan takes, by the times of steps under it; it was made from those of one before."""
        if self._measured[ended.fingerprint] < _PLANS:
            return
        self._followed += 1
        rarely = self._followed.bit_count() == 1 and not self.asynchronous  # on streams nothing is timed any more
        if self._followed > _PREDICTIONS and not rarely:
            return
        budget = int(self.core.stats()["budget_bytes"])
        problem = Problem.from_trace(self.trace(ended), budget).within_slabs()
        seconds = self.simulated_seconds(problem, plan)
        self.last_plan = self._made[ended.fingerprint] = replace(plan, predicted_seconds=seconds)

    def simulated_seconds(self, problem: Problem, plan: Plan) -> float | None:
        """A step's time under the last plan with the functions' times of `problem`; None if that cannot be told."""
        if self.tiers is None:
            return simulate(problem, plan).seconds
        return self.tiers.predicted_seconds(problem, plan, self._moves)

    def _shown(self) -> int | None:
        """Of the sequences with a plan, the one whose iterations took the most time: training, not its validation."""
        return max(self._made, key=lambda fingerprint: self.seconds[fingerprint], default=None)

    @property
    def planned_step_seconds(self) -> float | None:
        """Of the last iteration that ran under the plan whose figures are shown."""
        shown = self._shown()
        return self._seconds_under.get(shown) if shown is not None else None

    def figures(self) -> dict[str, Any]:
        """What is shown of one plan, or of the settings before the first one, by the keys of the summary.

        The plan is the last one for the sequence that took the most time.
        """
        shown = self._shown()
        plan = self._made[shown] if shown is not None else None
        return {
            "policy": plan.policy if plan is not None else self.policy,
            "window_bytes": plan.window_bytes if plan is not None else self.window_bytes,
            "predicted_step_seconds": plan.predicted_seconds if plan is not None else None,
            "bound_step_seconds": plan.bound_seconds if plan is not None else None,
            "planning_seconds": self.planning_seconds,
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

    def _plan(self, ended: Iteration) -> None:
        began = time.perf_counter()
        recorded = self.recorded(ended)
        budget = int(self.core.stats()["budget_bytes"])
        trace = recorded.cut()
        problem = Problem.from_trace(trace, budget).within_slabs()
        try:
            if self.tiers is None:
                plan = make_plan(problem, policy=self.policy, window_bytes=self.window_bytes)
            else:
                plan, self._moves = self.tiers.plan(problem, trace, self.policy, self.window_bytes)
        except InfeasibleError as error:
            log.info("no plan for %016x: %s", ended.fingerprint, error)
            self._failed[ended.fingerprint] = str(error)
            return
        known = recorded_plan(plan, trace)
        arrays = known.to_arrays()
        outs, ins, write_backs = (
            [array for name, array in arrays.items() if name.startswith(kind)] for kind in ("out_", "in_", "back_")
        )
        self._keep_plan(ended.fingerprint, known)
        below = {} if self.tiers is None else self._moves.columns()
        self.core.install_plan(ended.fingerprint, outs, ins, write_backs, **below)
        self._measured[ended.fingerprint] += 1
        self.last_plan, self._followed = plan, 0
        self._made[ended.fingerprint] = plan
        self._seconds_under.pop(ended.fingerprint, None)
        if len(self._made) > _MOST_PLACED:
            del self._made[min(self._made, key=lambda fingerprint: self.seconds[fingerprint])]
        log.debug(
            "plan for %016x by %s: %d outs, %d ins, %d write-backs, %d down, %d up, predicted %.3f s, bound %.3f s, "
            "planned in %.3f s",
            ended.fingerprint,
            plan.policy,
            len(plan.outs),
            len(plan.ins),
            len(plan.write_backs),
            len(self._moves.downs),
            len(self._moves.ups),
            plan.predicted_seconds or 0.0,
            plan.bound_seconds or 0.0,
            time.perf_counter() - began,
        )

    def _keep_plan(self, fingerprint: int, plan: Plan) -> None:
        self.plans.pop(fingerprint, None)
        self.plans[fingerprint] = plan
        if len(self.plans) > _MOST_PLACED:
            del self.plans[next(iter(self.plans))]

    def link(self) -> Machine:
        """Speeds and costs: given, or achieved by this process's own transfers and calls, or expected."""
        if self.machine is not None:
            return self.machine
        stats = self.core.stats()

        def speed(way: str, expected: float) -> float:
            moved, busy = stats[f"swap_{way}_bytes"], stats[f"copy_{way}_seconds"]
            return moved / busy if moved >= _ENOUGH_BYTES and busy > 0 else expected

        known = self.expected
        out_speed, in_speed = speed("out", known.out_bytes_per_second), speed("in", known.in_bytes_per_second)

        def cost(call: str, chunks: float, expected: float) -> float:
            return stats[f"{call}_seconds"] / chunks if chunks >= _ENOUGH_CHUNKS else expected

        mapping = cost("map", stats["driver_calls_map"], known.map_seconds)
        unmapping = cost("unmap", stats["unmapped_bytes"] / stats["chunk_bytes"], known.unmap_seconds)
        if self.asynchronous:  # a chunk is unmapped when its address is wanted again, ahead of the next map
            mapping, unmapping = mapping + unmapping, 0.0
        return Machine(out_speed, in_speed, known.latency_seconds, mapping, unmapping)

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
        """Stops the native threads and writes the trace that was asked for."""
        self.core.stop_daemon()
        if self.trace_path is not None and self._trace_of is not None:
            self._trace_of[1].save(self.trace_path)


def offsets_of(use_function: NDArray[np.uint32], functions: int) -> NDArray[np.int64]:
    """Returns int64[functions + 1]: the index of each function's first use, then the number of all uses.

    Args:
        use_function: the function of each use, in ascending order.
    """
    return np.searchsorted(use_function, np.arange(functions + 1, dtype=np.uint32)).astype(np.int64)
