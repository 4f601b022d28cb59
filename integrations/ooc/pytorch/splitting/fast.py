"""Convolutions in the micro-batches that were measured to be fastest, also where they fit whole (OOC_SPLIT=fast).

A convolution is measured when it is called for the first time, on its own operands: forward, to the data and to the
filter, at each size of a micro-batch and by each algorithm. micro-cuDNN's programmes then choose (Oyama et al. 2018,
section III): WR where each kernel has a workspace limit of its own, WD where one limit holds for all. The store keeps
the costs and the choice, so a later run of the program measures nothing and rounds as the first one did.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import conditions
from ooc.pytorch.splitting.calls import Call, Split
from ooc.pytorch.splitting.kernels import CPU, FORWARD, Kernel, MicroBatches, kernels_of
from ooc.pytorch.splitting.measure import Effort, Measurer, live_during, timed
from ooc.pytorch.splitting.memory import NO_LIMIT
from ooc.pytorch.splitting.registry import overload_of
from ooc.pytorch.splitting.verification import difference
from ooc_alloc import Core
from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.division import divide_workspace, fronts_of
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError
from swapd.splitting.micro_batches import fastest_division, smallest_division
from swapd.splitting.store import Store, Verdict

log = logging.getLogger("ooc.pytorch")

Choice = tuple[Split, Verdict]  # how a convolution runs, and by how much its result was seen to differ
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
TURNS = 7  # of a division and the whole call; the division has to be faster in all but one
GAIN = 0.95  # of the whole call's time: what gains less may be noise
CALL_SECONDS = 1e-4  # more in a program than in a loop, whose code is in the processor's caches
_WHOLE = Verdict("whole", 1)
_EFFORT, _ONCE = Effort(2, 0.02, 5), Effort(1, 0.0, 1)


@dataclass(frozen=True)
class Limits:
    """Of workspaces, in bytes; and the sizes of micro-batches, a policy of `swapd.splitting.configurations`."""

    each: int | None = None
    total: int | None = None
    policy: str = "powerOfTwo"


class Fast:
    """Chooses for each convolution of a session. Any thread may ask.

    Args:
        core: the session's core: what is measured is no part of its sequence.
        store: where costs and choices are kept.
    """

    def __init__(self, core: Core, store: Store, limits: Limits) -> None:
        self.limits = limits
        self._core, self._store = core, store
        self._lock = threading.RLock()
        self._choices: dict[tuple[str, str], Choice | None] = {}
        self._tables: dict[tuple[str, str], tuple[KernelTable, ...]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()  # of the iteration under way that came here
        self._layers: Counter[tuple[str, str]] = Counter()  # calls in one iteration, the most seen so far
        self._divided: dict[tuple[str, str], tuple[Configuration, ...]] | None = None  # by WD

    def choice(self, call: Call) -> Choice | None:
        """How to run a call; None if it is faster whole, or nothing can be chosen."""
        key = (call.operator, call.shapes)
        with self._lock:
            self._calls[key] += 1
            if key not in self._choices:
                kernels = kernels_of(call)
                self._choices[key] = self._choose(call, kernels) if kernels else None
            return self._choices[key]

    def ended(self) -> bool:
        """An iteration ended. Returns whether choices have changed since: WD has seen new kernels."""
        with self._lock:
            calls, self._calls = self._calls, Counter()
            known = self._divided or {}
            new = [key for key in calls if key in self._tables and key not in known]
            self._layers |= Counter({key: calls[key] for key in new})
            if new:
                self._divide()
            return bool(new)

    def _choose(self, call: Call, kernels: Sequence[Kernel]) -> Choice | None:
        key = (call.operator, call.shapes)
        before = self._core.set_apart(True)
        try:
            limit = self.limits.each or self.limits.total
            measurer = Measurer(self._store, NO_LIMIT if limit is None else limit, _EFFORT)
            tables = tuple(_in_a_program(measurer.table(kernel, self.limits.policy).cautious()) for kernel in kernels)
            try:
                smallest = tuple(map(smallest_division, tables))
            except UnreachableBatchError:  # some sizes do not fit the budget
                return None
            if self.limits.total is not None:
                self._tables[key] = tables
                return self._as_choice(call, kernels, (self._divided or {}).get(key) or smallest)
            return self._confirmed(call, kernels, tuple(map(self._fastest, tables)))
        finally:
            self._core.set_apart(before)

    def _fastest(self, table: KernelTable) -> Configuration:
        """WR under the limit of each kernel."""
        try:
            return fastest_division(table, NO_LIMIT if self.limits.each is None else self.limits.each)
        except LimitTooSmallError as error:
            log.warning("OOC_WORKSPACE: %s; the smallest is taken", error)
            return smallest_division(table)

    def _confirmed(self, call: Call, kernels: Sequence[Kernel], chosen: Sequence[Configuration]) -> Choice | None:
        """The choice, if it is faster than the whole call in turns with it, or if the whole breaks the limit."""
        if _as_it_is(chosen):
            return None
        split = _split(call.operator, kernels, chosen)
        key = conditions.key(call.operator, f"{call.shapes} fast, {self.limits}")
        if (known := self._store.verdict(key, split.how, split.parts)) is not None:
            return split, known
        if self._store.verdict(key, _WHOLE.how, _WHOLE.parts) is not None:
            return None
        whole, divided = partial(_whole, call), partial(split.run, *call.arguments, **call.keywords)
        try:
            workspace, verdict = live_during(whole), _compared(call, split)
            over = self.limits.each is not None and workspace > self.limits.each
            turns = [] if over else [[timed(way, _ONCE)[0] for way in (divided, whole)] for _ in range(TURNS)]
        except torch.OutOfMemoryError:
            return None
        won = sum(one + CALL_SECONDS < GAIN * other for one, other in turns) >= len(turns) - 1
        self._store.put_verdict(key, verdict if won else _WHOLE)
        return (split, verdict) if won else None

    def _as_choice(self, call: Call, kernels: Sequence[Kernel], chosen: Sequence[Configuration]) -> Choice | None:
        if self._divided is not None and _as_it_is(chosen):
            return None
        split = _split(call.operator, kernels, chosen)
        try:
            return split, _compared(call, split)
        except torch.OutOfMemoryError:
            return None

    def _divide(self) -> None:
        """WD over all kernels seen so far: a kernel of several layers has a segment for each of them."""
        total = self.limits.total
        assert total is not None
        owners: list[tuple[tuple[str, str], int]] = []
        tables: list[KernelTable] = []
        for key, number in self._layers.items():
            for (n, table), _ in itertools.product(enumerate(self._tables[key]), range(number)):
                owners.append((key, n))
                tables.append(KernelTable(str(len(tables)), table.batch, table.rows))
        found: dict[tuple[str, str], dict[int, Configuration]] = {}
        try:
            fronts = fronts_of(tables, total if self.limits.each is None else min(self.limits.each, total))
            division = divide_workspace(fronts, total)
            for (key, n), table in zip(owners, tables):
                chosen = division[table.name]
                known = found.setdefault(key, {}).get(n)
                # Layers that are called alike run alike: in the smallest of their segments.
                if known is None or chosen.workspace_bytes < known.workspace_bytes:
                    found[key][n] = chosen
        except LimitTooSmallError as error:
            log.warning("OOC_WORKSPACE_TOTAL: %s; every convolution runs in its smallest workspace", error)
            found = {key: dict(enumerate(map(smallest_division, self._tables[key]))) for key in self._layers}
        self._divided = {key: tuple(each[n] for n in sorted(each)) for key, each in found.items()}
        for key in found:
            self._choices.pop(key, None)


def _whole(call: Call) -> Any:
    op: Any = overload_of(call.operator)
    return op(*call.arguments, **call.keywords)


def _compared(call: Call, split: Split) -> Verdict:
    apart = difference(_whole(call), split.run(*call.arguments, **call.keywords))
    return Verdict(split.how, split.parts, *astuple(apart))


def _split(operator: str, kernels: Sequence[Kernel], chosen: Sequence[Configuration]) -> Split:
    """A call in micro-batches; `run` takes arguments as the operator does."""
    op: Any = overload_of(operator)
    how = "; ".join(f"{kernel.kind}: {each}" for kernel, each in zip(kernels, chosen))
    names, forward = [argument.name for argument in op._schema.arguments], kernels[0].kind == FORWARD
    batches = [MicroBatches(k, [(one.batch, CPU[one.algorithm]) for one in c.parts]) for k, c in zip(kernels, chosen)]

    def run(*arguments: Any, **keywords: Any) -> Any:
        given = {**dict(zip(names, arguments)), **keywords}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        made = [each(tensors) for each in batches]
        if forward:
            return made[0][0]
        return tuple(next((result for result in each if result is not None), None) for each in zip(*made))

    return Split(how, sum(len(each.parts) for each in chosen), run)


def _in_a_program(table: KernelTable) -> KernelTable:
    """The table, in which all but PyTorch's own way take as much longer as they do in a program."""
    own = (table.batch, "own")
    more = [0.0 if (row.batch, row.algorithm) == own else CALL_SECONDS * row.batch / table.batch for row in table.rows]
    return replace(table, rows=tuple(replace(row, seconds=row.seconds + by) for row, by in zip(table.rows, more)))


def _as_it_is(chosen: Sequence[Configuration]) -> bool:
    """Whether that is what PyTorch does without us."""
    return all(len(each.parts) == 1 and each.parts[0].algorithm == "own" for each in chosen)
