"""Convolutions in the micro-batches that were measured to be fastest, also where they fit whole (OOC_SPLIT=fast).

A convolution is measured when it is called for the first time, on its own operands: forward, to the data and to the
filter, at each size of a micro-batch and by each algorithm. micro-cuDNN's programmes then choose (Oyama et al. 2018,
section III): WR where each kernel has a workspace limit of its own, WD where one limit holds for all. The store keeps
the costs and the choice, so a later run of the program measures nothing and rounds as the first one did.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import conditions
from ooc.pytorch.splitting.calls import Call, Split
from ooc.pytorch.splitting.convolution_shapes import ConvolutionParameters, layout
from ooc.pytorch.splitting.kernels import BACKWARD_DATA, BACKWARD_FILTER, CPU, FORWARD, ConvolutionShape, Kernel, run
from ooc.pytorch.splitting.measure import Effort, Measurer, live_during
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.registry import overload_of
from ooc.pytorch.splitting.verification import Difference, difference
from ooc_alloc import Core
from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.division import divide_workspace, fronts_of
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError
from swapd.splitting.micro_batches import fastest_division, smallest_workspace_bytes
from swapd.splitting.store import Store, Verdict

log = logging.getLogger("ooc.pytorch")

OPERATORS = ("aten::convolution", "aten::convolution_backward")
TURNS = 7  # of a division and the whole call; the division has to be faster in all but one
GAIN = 0.95  # of the whole call's time: what gains less may be noise
NO_LIMIT = 1 << 62
_WHOLE = Split("whole", 1, lambda: None)
_EFFORT = Effort(2, 0.02, 5)


@dataclass(frozen=True)
class Limits:
    """Of workspaces, in bytes; and the sizes of micro-batches, a policy of `swapd.splitting.configurations`."""

    each: int | None = None
    total: int | None = None
    policy: str = "powerOfTwo"


@dataclass(frozen=True)
class Choice:
    """How a convolution runs, by how much its result was seen to differ, and the workspace that was measured."""

    split: Split
    apart: Difference
    workspace_bytes: int


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
        self._too_large: set[tuple[str, str]] = set()
        self._tables: dict[tuple[str, str], tuple[KernelTable, ...]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()  # of the iteration under way that came here
        self._layers: Counter[tuple[str, str]] = Counter()  # calls in one iteration, the most seen so far
        self._divided: dict[tuple[str, str], tuple[Configuration, ...]] | None = None  # by WD

    def takes(self, call: Call) -> bool:
        """Whether it is a convolution of which something fits the budget."""
        if call.operator not in OPERATORS:
            return False
        key = (call.operator, call.shapes)
        if torch.ops.ooc.whole_failed():
            self._too_large.add(key)
        return key not in self._too_large

    def choice(self, call: Call) -> Choice | None:
        """How to run a call; None if it is faster whole, or nothing can be chosen."""
        key = (call.operator, call.shapes)
        with self._lock:
            self._calls[key] += 1
            if key not in self._choices:
                convolution = _Convolution.of(call)
                self._choices[key] = None if convolution is None else self._choose(convolution)
            return self._choices[key]

    def does_not_fit(self, call: Call) -> None:
        """From now on the call is none of ours: its micro-batches do not fit the budget."""
        self._too_large.add((call.operator, call.shapes))

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

    def _choose(self, convolution: _Convolution) -> Choice | None:
        with self._apart():
            tables = self._measured(convolution)
            try:
                smallest = tuple(map(_smallest, tables))
            except UnreachableBatchError:  # some sizes do not fit the budget
                return None
            if self.limits.total is not None:
                self._tables[convolution.key] = tables
                chosen = (self._divided or {}).get(convolution.key) or smallest
                return self._as_choice(convolution, chosen)
            return self._confirmed(convolution, tuple(map(self._fastest, tables)))

    def _measured(self, convolution: _Convolution) -> tuple[KernelTable, ...]:
        limit = self.limits.each or self.limits.total
        largest = NO_LIMIT if limit is None else limit
        measurer = Measurer(self._store, measures=True, largest_bytes=largest, effort=_EFFORT)
        policy = self.limits.policy
        return tuple(
            measurer.table(kernel, convolution.batch, policy, operands=operands).cautious()
            for kernel, operands in zip(convolution.kernels, convolution.operands)
        )

    def _fastest(self, table: KernelTable) -> Configuration:
        """WR under the limit of each kernel."""
        try:
            return fastest_division(table, NO_LIMIT if self.limits.each is None else self.limits.each)
        except LimitTooSmallError as error:
            log.warning("OOC_WORKSPACE: %s; the smallest is taken", error)
            return _smallest(table)

    def _confirmed(self, convolution: _Convolution, chosen: tuple[Configuration, ...]) -> Choice | None:
        """The choice, if it is faster than the whole call in turns with it, or if the whole breaks the limit."""
        if _as_it_is(chosen):
            return None
        split = convolution.split(chosen)
        key = conditions.key(convolution.call.operator, f"{convolution.call.shapes} fast, {self.limits}")
        if (known := self._store.verdict(key, split.how, split.parts)) is not None:
            apart = Difference(known.identical, known.largest_difference, known.largest_relative)
            return Choice(split, apart, _workspace(chosen))
        if self._store.verdict(key, _WHOLE.how, _WHOLE.parts) is not None:
            return None
        whole = convolution.whole
        try:
            workspace = live_during(whole)
            apart = difference(whole(), split.run())
            turns = [] if self._over(workspace) else [(_seconds(split.run), _seconds(whole)) for _ in range(TURNS)]
        except torch.OutOfMemoryError:
            return None
        won = sum(divided < GAIN * undivided for divided, undivided in turns) >= len(turns) - 1
        kept = split if won else _WHOLE
        numbers = (apart.identical, apart.largest, apart.relative) if won else (True, 0.0, 0.0)
        self._store.put_verdict(key, Verdict(kept.how, kept.parts, *numbers))
        return Choice(split, apart, _workspace(chosen)) if won else None

    def _over(self, workspace_bytes: int) -> bool:
        return self.limits.each is not None and workspace_bytes > self.limits.each

    def _as_choice(self, convolution: _Convolution, chosen: tuple[Configuration, ...]) -> Choice | None:
        if self._divided is not None and _as_it_is(chosen):
            return None
        split = convolution.split(chosen)
        try:
            apart = difference(convolution.whole(), split.run())
        except torch.OutOfMemoryError:
            return None
        return Choice(split, apart, _workspace(chosen))

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
            found = {key: dict(enumerate(map(_smallest, self._tables[key]))) for key in self._layers}
        self._divided = {key: tuple(each[n] for n in sorted(each)) for key, each in found.items()}
        for key in found:
            self._choices.pop(key, None)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        before = self._core.set_apart(True)
        try:
            yield
        finally:
            self._core.set_apart(before)


@dataclass(frozen=True)
class _Convolution:
    """One call of a convolution that can be measured, with its kernels and their operands."""

    call: Call
    kernels: tuple[Kernel, ...]
    operands: tuple[tuple[Tensor, Tensor], ...]
    bias: Tensor | None  # to add; forward
    wants_bias: bool  # its gradient

    @classmethod
    def of(cls, call: Call) -> _Convolution | None:
        """None if no kernel of ours computes it."""
        op = overload_of(call.operator)
        assert op is not None
        named = bind(op, call.arguments, call.keywords)
        x, w = named["input"], named["weight"]
        usual = x.layout == w.layout == torch.strided and x.dtype == w.dtype and x.dtype.is_floating_point
        if not usual or x.dim() != w.dim() or not 3 <= x.dim() <= 5 or not x.numel():
            return None
        lies = layout(x, w) != torch.contiguous_format
        shape = ConvolutionShape(**vars(ConvolutionParameters.of(w, named)), size=tuple(x.shape[2:]), dtype=x.dtype,
                                 channels_last=lies)  # fmt: skip
        if call.operator == OPERATORS[0]:
            return cls(call, (Kernel(shape, FORWARD),), ((x, w),), named["bias"], False)
        mask, grad = named["output_mask"], named["grad_output"]
        wanted = [(BACKWARD_DATA, (grad, w))] * mask[0] + [(BACKWARD_FILTER, (grad, x))] * mask[1]
        kinds = tuple(Kernel(shape, kind) for kind, _ in wanted)
        return cls(call, kinds, tuple(both for _, both in wanted), None, mask[2]) if kinds else None

    @property
    def key(self) -> tuple[str, str]:
        """What tells calls apart."""
        return self.call.operator, self.call.shapes

    @property
    def batch(self) -> int:
        """Samples."""
        return int(self.operands[0][0].shape[0])

    def whole(self) -> Any:
        """The call as it is."""
        op = overload_of(self.call.operator)
        assert op is not None
        return op(*self.call.arguments, **self.call.keywords)

    def split(self, chosen: Sequence[Configuration]) -> Split:
        """The call in micro-batches; `run` takes arguments as the operator does, by default those of this call."""
        how = "; ".join(f"{kernel.kind}: {each}" for kernel, each in zip(self.kernels, chosen))
        kernels = self.kernels
        parts = [[(part.batch, CPU[part.algorithm]) for part in each.parts] for each in chosen]

        def again(*arguments: Any, **keywords: Any) -> Any:
            call = Call(self.call.operator, arguments, keywords) if arguments or keywords else self.call
            now = _Convolution.of(call)
            assert now is not None
            bias = None if now.bias is None else now.bias.view(-1, *[1] * len(kernels[0].convolution.size))
            made = [run(k, o, p, bias) for k, o, p in zip(kernels, now.operands, parts)]
            return now.results(made)

        return Split(how, sum(map(len, parts)), again)

    def results(self, made: list[Tensor]) -> Any:
        """The operator's results from its kernels'."""
        if self.kernels[0].kind == FORWARD:
            return made[0]
        found = {kernel.kind: result for kernel, result in zip(self.kernels, made)}
        grad = self.operands[0][0]
        bias = grad.sum([d for d in range(grad.dim()) if d != 1]) if self.wants_bias else None
        return found.get(BACKWARD_DATA), found.get(BACKWARD_FILTER), bias


def _as_it_is(chosen: Sequence[Configuration]) -> bool:
    """Whether that is what PyTorch does without us."""
    return all(len(each.parts) == 1 and each.parts[0].algorithm == "own" for each in chosen)


def _workspace(chosen: Sequence[Configuration]) -> int:
    return max(each.workspace_bytes for each in chosen)


def _smallest(table: KernelTable) -> Configuration:
    return fastest_division(table, smallest_workspace_bytes(table))


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
