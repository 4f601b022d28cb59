"""Advice: what would make a step faster, or cheaper, found by planning and simulating it.

Nothing is estimated: every piece of advice is the difference between two simulations. A change that saves less than a
hundredth of a step is left out, but the budget with which everything fits is always told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from swapd.observing.analysis import IN_CORE, Outcome, run_plan, run_policy, with_budget
from swapd.observing.recomputing import OURS, run_recomputing
from swapd.planning.problem import InfeasibleError, Problem
from swapd.tiers.first_level import UnsteadyError
from swapd.trace.trace import Trace
from swapd.units import format_bandwidth, format_bytes, format_need

WORTH_SAYING = 0.01  # of the step's time
_STEPS = 8  # budgets tried between the given one and the one with which everything fits
_HALVINGS = 4  # of the range in which a smaller budget is looked for

Report = Callable[[str, int, int], None]  # text, done, total


@dataclass(frozen=True)
class Advice:
    """One thing to change. `saved` is a share of the step's present time, negative if the step would take longer."""

    kind: str  # budget, fits, less, link, chunk, policy, recompute, none
    text: str
    seconds: float  # of a step after the change
    saved: float
    budget_bytes: int | None = None
    chunk_bytes: int | None = None


class Advisor:
    """Looks for advice on `outcome`.

    Args:
        outcome: the simulation that changes are compared with.
        trace: what was simulated; without it no other chunk sizes are tried.
        window_bytes: the schedule window, if the policy has one.
        is_fixed: whether the plan was given; then only changes that leave it as it is are tried.
        link: what copies go over, as the texts call it: "link" or "disk".
        recompute: whether to look for what could be computed again; it takes the trace, and no disk below host memory.
    """

    def __init__(
        self,
        outcome: Outcome,
        trace: Trace | None = None,
        window_bytes: int | None = None,
        is_fixed: bool = False,
        link: str = "link",
        recompute: bool = True,
    ) -> None:
        self.now, self.trace = outcome, trace
        self.window_bytes, self.is_fixed, self.link = window_bytes, is_fixed, link
        self.recompute = recompute and not is_fixed and outcome.lower is None
        self.problem = outcome.problem
        self.seconds = outcome.seconds
        self.waits = self.seconds - outcome.timeline.compute_seconds

    def advise(self, report: Report = lambda text, done, total: None) -> list[Advice]:
        """All advice, the most useful first within its kind."""
        if self.now.policy == IN_CORE or self.seconds <= 0:
            return []
        found: list[Advice] = []
        waits = self.waits >= WORTH_SAYING * self.seconds
        parts = [self._fits, self._less]
        if waits:
            parts = [self._policy, self._recompute, self._budget, *parts, self._link, self._chunk]
        for done, part in enumerate(parts):
            report(f"looking for advice: {part.__name__.strip('_')}", done, len(parts))
            found += part()
        if not waits:
            words = f"neither memory nor a faster {self.link} would save anything"
            text = f"the step takes the time of its computation: {words}"
            found.insert(0, Advice("none", text, self.seconds, 0.0))
        return found

    def _try(self, problem: Problem | None) -> float:
        """The seconds of a step, or infinity if the policy cannot run."""
        if problem is None:
            return math.inf
        try:
            if self.is_fixed:
                return run_plan(problem, self.now.plan, self.now.policy, lower=self.now.lower).seconds
            return run_policy(problem, self.now.policy, self.window_bytes, self.now.lower).seconds
        except (InfeasibleError, UnsteadyError):
            return math.inf

    def _saved(self, seconds: float) -> float:
        return 1 - seconds / self.seconds

    def _saving(self, kind: str, words: str, seconds: float, **sizes: int) -> Advice:
        """Advice whose text is `words` and then how much of the step is saved."""
        saved = self._saved(seconds)
        return Advice(kind, f"{words} {_percent(saved)}", seconds, saved, **sizes)

    def _policy(self) -> Iterator[Advice]:
        if self.now.policy == "auto":
            return
        seconds = run_policy(self.problem, "auto", lower=self.now.lower).seconds
        if self._saved(seconds) >= WORTH_SAYING:
            yield self._saving("policy", "policy auto saves", seconds)

    def _recompute(self) -> Iterator[Advice]:
        if not self.recompute or self.trace is None or self.problem.fits:
            return
        found = run_recomputing(self.problem, OURS, self.trace)
        if found.recomputed is not None and self._saved(found.seconds) >= WORTH_SAYING:
            count = found.recomputed.drop_count
            words = f"dropping {count} tensors instead of moving them (OOC_RECOMPUTE=exact, in PyTorch) saves"
            yield self._saving("recompute", words, found.seconds)

    def _budget(self) -> Iterator[Advice]:
        """The first budget that saves at least half of what memory can save, and the first that saves nearly all."""
        if self.is_fixed or self.problem.fits:
            return
        given, most = self.problem.budget_bytes, self.problem.fit_budget_bytes
        tried = []
        for step in range(1, _STEPS):
            budget = _whole(given + (most - given) * step // _STEPS, self.problem.chunk_bytes)
            if given < budget < most:
                tried.append((budget, self._try(with_budget(self.problem, budget))))
        for share in (0.5, 0.95):
            enough = self.seconds - share * self.waits
            found = next(((budget, seconds) for budget, seconds in tried if seconds <= enough), None)
            if found is not None and self._saved(found[1]) >= WORTH_SAYING:
                budget, seconds = found
                tried = [row for row in tried if row[0] > budget and row[1] < seconds]
                words = f"a budget of +{format_bytes(budget - given)} saves"
                yield self._saving("budget", words, seconds, budget_bytes=budget)

    def _fits(self) -> Iterator[Advice]:
        if self.problem.fits:
            return
        budget, seconds = self.problem.fit_budget_bytes, self.problem.compute_seconds
        more = format_bytes(budget - self.problem.budget_bytes)
        words = f"everything fits from {format_need(budget)} on (+{more}), which saves"
        yield self._saving("fits", words, seconds, budget_bytes=budget)

    def _less(self) -> Iterator[Advice]:
        """The smallest budget with which a step takes at most a hundredth longer."""
        if self.is_fixed:
            return
        chunk = self.problem.chunk_bytes
        enough, low = min(self.problem.budget_bytes, self.problem.fit_budget_bytes), self.problem.min_budget_bytes
        high, at = enough, self.seconds
        for _ in range(_HALVINGS):
            middle = _whole((low + high) // 2, chunk)
            if not low <= middle < high:
                break
            seconds = self._try(with_budget(self.problem, middle))
            if seconds <= self.seconds * (1 + WORTH_SAYING):
                high, at = middle, seconds
            else:
                low = middle
        if high < self.problem.budget_bytes:
            less = format_bytes(self.problem.budget_bytes - high)
            cost = max(0.0, -self._saved(at))
            text = f"{format_need(high)} would do (-{less}): a step takes {_percent(cost)} longer with it"
            yield Advice("less", text, at, self._saved(at), budget_bytes=high)

    def _link(self) -> Iterator[Advice]:
        """A link of twice the speed: in one direction only if that saves most of what both directions save."""
        machine = self.problem.machine
        out, into = 2 * machine.out_bytes_per_second, 2 * machine.in_bytes_per_second
        faster = replace(machine, out_bytes_per_second=out, in_bytes_per_second=into)
        both = self._try(replace(self.problem, machine=faster))
        if self._saved(both) < WORTH_SAYING:
            return
        for text, faster in (
            (f"out ({format_bandwidth(out)})", replace(machine, out_bytes_per_second=out)),
            (f"in ({format_bandwidth(into)})", replace(machine, in_bytes_per_second=into)),
        ):
            seconds = self._try(replace(self.problem, machine=faster))
            if self._saved(seconds) >= 0.9 * self._saved(both):
                yield self._saving("link", f"a {self.link} twice as fast on the way {text} saves", seconds)
                return
        words = f"a {self.link} twice as fast (out {format_bandwidth(out)}, in {format_bandwidth(into)}) saves"
        yield self._saving("link", words, both)

    def _chunk(self) -> Iterator[Advice]:
        """Half the chunk size if that saves time, and a quarter of it if that saves still more."""
        if self.is_fixed:
            return
        least = WORTH_SAYING
        for divisor in (2, 4):
            size = self.problem.chunk_bytes // divisor
            seconds = self._try(self._with_chunks(size)) if size else math.inf
            if self._saved(seconds) >= least:
                least = self._saved(seconds) + WORTH_SAYING
                words = f"chunks of {format_bytes(size)}, where the device has them, save"
                yield self._saving("chunk", words, seconds, chunk_bytes=size)

    def _with_chunks(self, chunk_bytes: int) -> Problem | None:
        if self.trace is None:
            return None
        try:
            return Problem.from_trace(
                self.trace, self.problem.budget_bytes, chunk_bytes=chunk_bytes, machine=self.problem.machine
            )
        except ValueError:
            return None  # more chunks than a problem may have


def _whole(budget_bytes: int, chunk_bytes: int) -> int:
    """A budget rounded up to whole chunks."""
    return -(-budget_bytes // chunk_bytes) * chunk_bytes


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if abs(share) < 0.0995 else f"{100 * share:.0f}%"
