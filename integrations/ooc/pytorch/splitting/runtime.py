"""One session's splitting: what a part may take, the verdicts, the counts, and how a handler is run."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ooc.pytorch.large_storages import plain_memory
from ooc.pytorch.splitting.calls import Call, CannotSplit, NotYet
from ooc.pytorch.splitting.conditions import key
from ooc.pytorch.splitting.context import HOST_BACKED, Context, Tally
from ooc.pytorch.splitting.fast import CONVOLUTIONS, Fast, Limits
from ooc.pytorch.splitting.mmcnn import LAYERS, Rules, Share
from ooc.pytorch.splitting.registry import Function, Handler, find, overload_of
from ooc.pytorch.splitting.verification import Verifier, tensors_in
from ooc_alloc import Core
from swapd.splitting.store import Store, Verdict, default_path
from swapd.trace.trace import Trace

log = logging.getLogger("ooc.pytorch")

CPU = torch.device("cpu")
_STEPS = 16  # of the budget; the free part is rounded down to steps, so that small variables do not change divisions
_MOST_HALVINGS = 6
LARGE_BYTES = 1 << 20  # of a call's arguments: with no more it takes milliseconds to compare a division


class FasterWhole(Exception):
    """The operator fits, and is faster in one piece."""


class Runtime:
    """What is split in a session, and how.

    Args:
        core: the session's core.
        mode: "exact", "allow" or "fast".
        store: the file of verdicts, or None for the default one.
        device: whose memory the core manages.
        limits: of convolutions' workspaces, with the mode "fast".
        rules: mmCNN's numbers of parts, if those count.
    """

    def __init__(
        self,
        core: Core,
        mode: str,
        store: Path | None,
        device: torch.device = CPU,
        limits: Limits | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.mode = mode
        self.tally = Tally()
        self._core = core
        self.device = device
        self._chunk_bytes = int(core.stats()["chunk_bytes"])
        self._store_path = store if store is not None else default_path()
        self.verifier = Verifier()
        self._too_large: set[tuple[str, str]] = set()  # operators and shapes that do not fit in one piece
        self._not_fast: set[tuple[str, str]] = set()  # those whose micro-batches do not fit
        self._known: dict[tuple[str, str, Share | None], int] = {}  # what one part may take, by operator and shapes
        self._budget = 0  # for which that was found out
        self.fast = Fast(core, self._store, limits or Limits()) if mode == "fast" else None
        self.rules = rules

    def ended(self, recorded: Callable[[], Trace | None]) -> None:
        """An iteration ended; `recorded` gives its sequence, of whole variables, if it had functions."""
        if self.fast is not None and self.fast.ended():
            _ask_again(CONVOLUTIONS)
        trace = None if self.rules is None else recorded()
        if self.rules is not None and trace is not None and self.rules.ended(trace):
            _ask_again(LAYERS)

    @cached_property
    def _store(self) -> Store:
        """The store of verdicts, opened when something is split for the first time."""
        return Store(self._store_path)

    def run(
        self, operator: str, found: Handler, writes: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Runs a handler in parts. Raises CannotSplit, FasterWhole or NotYet."""
        call = Call(operator, arguments, keywords)
        key = (operator, call.shapes)
        if self.fast is not None and operator in CONVOLUTIONS and key not in self._not_fast and self._fits(key):
            try:
                choice = self.fast.choice(call)
                if choice is None:
                    raise FasterWhole
                result = choice[0].run(*arguments, **keywords)
            except torch.OutOfMemoryError:
                self._not_fast.add(key)
            except CannotSplit:  # this weight is not finite
                raise FasterWhole from None
            else:
                self.tally.add(operator, call.shapes, choice[1])
                return result
        if self.rules is not None:
            return self._run_by(self.rules, call, found, writes)
        return self._run_fitting(call, found, writes, None)

    def _fits(self, key: tuple[str, str]) -> bool:
        """Whether a call came here although it fits, as far as is known."""
        if torch.ops.ooc.whole_failed():
            self._too_large.add(key)
        return key not in self._too_large

    def _run_by(self, rules: Rules, call: Call, found: Handler, writes: bool) -> Any:
        """Runs a handler in as many parts as mmCNN's rules say."""
        key = (call.operator, call.shapes)
        first, share = rules.begin(), rules.shares.get(key)
        fits = call.operator in LAYERS and self._fits(key)
        if not fits or (share is not None and share.parts > 1):
            try:
                result = self._run_fitting(call, found, writes, share)
            except CannotSplit:
                if not fits:
                    raise
            else:
                rules.end(call, first, rules.begin())
                return result
        rules.end(call, first, first + 1)
        raise FasterWhole

    def _run_fitting(self, call: Call, found: Handler, writes: bool, share: Share | None) -> Any:
        """Runs a handler in parts that fit."""
        stats = self._core.stats()
        if (budget := int(stats["budget_bytes"])) < self._budget:  # it was lowered: what was known may not fit
            self._known.clear()
        self._budget = budget
        known = (call.operator, call.shapes, share)
        part_bytes = self._known.get(known) or (self._part_bytes(stats) if share is None else share.part_bytes)
        try:
            return self._run(call, part_bytes, found, writes, share)
        except CannotSplit:
            if writes and not found.repeatable:
                raise
            # What parts need is an estimate, and larger ones are exact more often.
            for limit in (part_bytes * 3 // 2, part_bytes * 2):
                with contextlib.suppress(CannotSplit):
                    return self._run(call, limit, found, False, share)
            raise

    def _run(self, call: Call, part_bytes: int, found: Handler, writes: bool, share: Share | None) -> Any:
        """Runs a handler in parts of `part_bytes`, and in smaller ones if those do not fit."""
        for _ in range(_MOST_HALVINGS):
            context = Context(
                call,
                part_bytes,
                least_parts=1 if share is None else share.parts,
                chunk_bytes=self._chunk_bytes,
                mode=self.mode,
                verdicts=self._store,
                tally=self.tally,
                key=key(call.operator, call.shapes, self.device),
                managed=self.device,
                later=self._later(call),
            )
            try:
                result = found.function(context, *call.arguments, **call.keywords)
            except torch.OutOfMemoryError as error:
                if writes and not found.repeatable:
                    raise
                if part_bytes < 4 * self._chunk_bytes:
                    raise CannotSplit(f"a part of it does not fit: {error}") from None
                part_bytes //= 2
                failure = error
                continue
            self._known[call.operator, call.shapes, share] = part_bytes
            context.count()
            return result
        raise CannotSplit(f"a part of it does not fit: {failure}")

    def _later(self, call: Call) -> Callable[[Any, Callable[[], object]], bool] | None:
        """Whether comparing takes long, and the call may run on host memory meanwhile."""
        size = sum(tensor.nbytes for tensor in tensors_in((call.arguments, call.keywords)))
        return None if size <= LARGE_BYTES or torch.ops.ooc.host_failed() else self.verifier.ask

    def _part_bytes(self, stats: dict[str, Any]) -> int:
        """Half of what small variables leave of the budget."""
        budget = int(stats["budget_bytes"])
        step = max(budget // _STEPS, 1)
        free = budget - int(stats["slab_bytes"])
        return max(free // step * step // 2, 2 * self._chunk_bytes)

    def figures(self) -> dict[str, Any]:
        """What the summary says of splitting, by its keys."""
        return {
            "split": self.mode,
            "split_function_count": self.tally.functions,
            "split_part_count": self.tally.parts,
            "split_layers": self.tally.rows(),
        }


# ---- the operators `ooc_split::...` ---------------------------------------------------------------------------------
# They are defined once in a process, whatever sessions come and go.

NAMESPACE = "ooc_split"
_lock = threading.Lock()
_library: Any = None
_defined: dict[str, bool] = {}
_runtime: Runtime | None = None


def _run(operator: str, found: Handler, writes: bool, draws: bool, /, *arguments: Any, **keywords: Any) -> Any:
    runtime = _runtime
    if runtime is None:
        raise RuntimeError("splitting is off")
    try:
        with torch._C.DisableTorchFunction():
            if draws:
                given = (*arguments, *keywords.values())
                found = replace(found, function=_drawing_the_same(found.function, given, runtime.device))
            return runtime.run(operator, found, writes, arguments, keywords)
    except NotYet:
        torch.ops.ooc.run_on_host()
        raise
    except FasterWhole:
        torch.ops.ooc.run_whole()
        raise
    except CannotSplit as error:
        torch.ops.ooc.cannot_split(str(error), error.inexact, error.cause is not None)
        raise (error.cause or error) from None


def _drawing_the_same(function: Function, given: Sequence[Any], device: torch.device) -> Function:
    """The function, which at every call draws from the state that the generator has now: given or the device's."""
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    generator = next((value for value in given if isinstance(value, torch.Generator)), default)
    with plain_memory():
        state = generator.get_state()

    def run(*arguments: Any, **keywords: Any) -> Any:
        generator.set_state(state)
        return function(*arguments, **keywords)

    return run


def _host_backed(operator: str, shapes: str) -> None:
    """Notes for the summary that a function used host memory in place."""
    if _runtime is not None:
        _runtime.tally.add(operator, shapes, Verdict(HOST_BACKED, 1))


def _prepare(name: str) -> bool:
    """Defines the operator that splits `name`, with its schema: `ooc_split::aten__add__Tensor` for `aten::add.Tensor`.

    Returns whether `name` can be split. The adapter (csrc/splitting.cpp) asks when an operator first does not fit.
    """
    with _lock:
        if name not in _defined:
            _defined[name] = _define(name)
        return _defined[name]


def _define(name: str) -> bool:
    found, overload = find(name), overload_of(name)
    if found is None or overload is None:
        return False
    schema = str(overload._schema)
    draws = torch.Tag.nondeterministic_seeded in overload.tags
    run = partial(_run, name, found, overload._schema.is_mutable, draws)
    mangled = name.replace("::", "__").replace(".", "__")  # csrc/splitting.cpp makes the same names
    _library.define(mangled + schema[schema.index("(") :])
    _library.impl(mangled, run, "CompositeExplicitAutograd")
    return True


def install(runtime: Runtime) -> None:
    """From now on operators that do not fit are split."""
    global _runtime, _library
    _runtime = runtime
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        _library.define("prepare(str name) -> bool")
        _library.impl("prepare", _prepare, "CompositeExplicitAutograd")
        _library.define("host_backed(str name, str shapes) -> ()")
        _library.impl("host_backed", _host_backed, "CompositeExplicitAutograd")
    torch.ops.ooc.splitting(True)
    if runtime.fast is not None:
        _ask_again(CONVOLUTIONS)


def _ask_again(operators: Sequence[str]) -> None:
    """From now on the running program asks how each of these operators runs, also where it knows."""
    for name in operators:
        torch.ops.ooc.choose_ways(name)


def uninstall() -> None:
    """From now on operators that do not fit raise again."""
    global _runtime
    torch.ops.ooc.splitting(False)
    if _runtime is not None:
        _runtime.verifier.close()
    _runtime = None
