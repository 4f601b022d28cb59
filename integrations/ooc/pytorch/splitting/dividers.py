"""Handlers of operators that are more than pointwise: a divider finds divisions, the context chooses one, which runs.

A divider is `f(context, op, named) -> divisions`, with all arguments of the call by name. It only looks at sizes and
strides. Where some of an operator's results are divided by themselves, it returns stages in place of divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch._ops import OpOverload

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.calls import CannotSplit, Given, NotYet, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.parts import along, bind
from ooc.pytorch.splitting.verification import ALL_SPECIALS, SPARSE, Specials
from swapd.splitting.store import Verdict

PRODUCTS = Specials((SPARSE,))  # for sums of products: with more special numbers every sum would be NaN
Change = Callable[[Named], Named]


@dataclass(frozen=True)
class Stage:
    """Some of an operator's results, which are divided by themselves.

    Candidates and `whole` are called as the operator is and return all its results; those of other stages are None.
    """

    name: str
    results: tuple[int, ...]
    whole: Callable[..., Any]
    candidates: Sequence[Split]


Divider = Callable[[Context, OpOverload, Named], Sequence[Split] | Sequence[Stage]]
_D = TypeVar("_D", bound=Divider)


@dataclass(frozen=True)
class Divided:
    """The handler that is made of a divider."""

    op: OpOverload
    divide: Divider
    sample: Change | None = None  # makes arguments of the verification of random ones, where those would not do
    moves: bool = False  # only moves or selects data: exact by construction, not verified
    specials: Specials = ALL_SPECIALS

    def stages(self, context: Context, named: Named) -> list[Stage]:
        """The stages of a call; a call that is divided as a whole is a stage without a name."""
        found = self.divide(context, self.op, named)
        stages = [stage for stage in found if isinstance(stage, Stage)]
        pieces = [piece for piece in found if isinstance(piece, Split)]
        return stages or [Stage("", tuple(range(len(self.op._schema.returns))), self.op, pieces)]

    def __call__(self, context: Context, *args: Any, **kwargs: Any) -> Any:
        """The operator's result, in parts."""
        chosen: list[tuple[Stage, Split, Verdict | None]] = []
        late: NotYet | None = None
        for stage in self.stages(context, bind(self.op, args, kwargs)):
            try:  # before any runs: verdicts on all of them are found at once
                chosen.append((stage, self._choose(context, stage), context.ran))
            except NotYet as error:
                late = error
        if late is not None:
            raise late
        if len(chosen) == 1:
            return chosen[0][1].run(*args, **kwargs)
        results: list[Any] = [None] * len(self.op._schema.returns)
        for stage, split, _ in chosen:
            found = split.run(*args, **kwargs)
            for place in stage.results:
                results[place] = found[place]
        each = [ran for *_, ran in chosen if ran is not None]
        context.used(  # the summary has one line, with the largest differences
            "; ".join(f"{stage.name}: {split.how}" for stage, split, _ in chosen),
            sum(split.parts for _, split, _ in chosen),
            all(one.identical for one in each),
            max(one.largest_difference for one in each),
            max(one.largest_relative for one in each),
        )
        return tuple(results)

    def _choose(self, context: Context, stage: Stage) -> Split:
        """One of a stage's candidates; where bits may not change, of those that do not divide sums."""
        of, fit = f" of the {stage.name}" if stage.name else "", f"makes its parts fit {context.part_bytes} bytes"
        if not stage.candidates:
            raise CannotSplit(f"no division{of} {fit}")
        candidates = [piece for piece in stage.candidates if not (context.exact and piece.rounds)]
        if not candidates:
            how = stage.candidates[0].how
            raise CannotSplit(f"only a division{of} of its sums ({how}) {fit}", inexact=True)
        if self.moves:
            context.used(candidates[0].how, candidates[0].parts)
            return candidates[0]
        sample = None if self.sample is None else partial(_changed, self.op, self.sample)
        return context.choose(stage.name, candidates, stage.whole, sample, self.specials, may_wait=True)


def _changed(op: OpOverload, change: Change, given: Given) -> Given:
    return (), change(bind(op, *given))


def with_mask(op: OpOverload, mask: Sequence[bool]) -> Callable[..., Any]:
    """The operator with another `output_mask`; results that the mask does not ask for are None."""

    def run(*args: Any, **kwargs: Any) -> Any:
        results = op(**(bind(op, args, kwargs) | {"output_mask": list(mask)}))
        return tuple(result if wanted else None for result, wanted in zip(results, mask))

    return run


def divides(
    *names: str, sample: Change | None = None, moves: bool = False, specials: Specials = ALL_SPECIALS
) -> Callable[[_D], _D]:
    """Registers a divider of operators. Those that this PyTorch lacks are left out."""

    def register(divide: _D) -> _D:
        for name in names:
            if (op := registry.overload_of(name)) is not None:
                registry.handler(name)(Divided(op, divide, sample, moves, specials))
        return divide

    return register


def divides_along(*names: str, axes: Callable[[Named], list[Axis]], **options: Any) -> None:
    """Registers operators that are cut along the axes that `axes` finds in a call's arguments.

    `options` are those of `divides`, and those of `parts.along`.
    """
    told = {name: options.pop(name) for name in ("sample", "moves", "specials") if name in options}

    def divide(context: Context, op: OpOverload, named: Named) -> list[Split]:
        return along(context, op, named, axes(named), **options)

    divides(*names, **told)(divide)
