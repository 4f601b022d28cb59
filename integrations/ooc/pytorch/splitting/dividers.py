"""Handlers of operators that are more than pointwise: a divider finds divisions, the context chooses one, which runs.

A divider is `f(context, op, named) -> candidates`, with all arguments of the call by name. It only looks at sizes and
strides, so it also works on the device "meta", where `describe` shows what would be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._ops import OpOverload

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.context import ALL_SPECIALS, Call, CannotSplit, Context, Sample, Specials, Split
from ooc.pytorch.splitting.parts import Named, Piece, bind
from ooc.pytorch.splitting.tally import SplitRecord
from ooc.pytorch.splitting.verification import SPARSE, Difference

Divider = Callable[[Context, OpOverload, Named], Sequence[Piece]]
_D = TypeVar("_D", bound=Divider)
PRODUCTS = Specials((SPARSE,))  # for sums of products: with more special numbers every sum would be NaN
Sampler = Callable[[Named], Sample]


@dataclass(frozen=True)
class Stage:
    """Some of an operator's results, which are divided by themselves.

    Candidates and `whole` are called as the operator is and return all its results; those of other stages are None.
    """

    name: str
    results: tuple[int, ...]
    whole: Callable[..., Any]
    candidates: Sequence[Piece]


Stages = Callable[[Context, OpOverload, Named], Sequence[Stage]]


@dataclass(frozen=True)
class Divided:
    """The handler that is made of a divider, or of one divider for each stage."""

    op: OpOverload
    stages: Stages
    sample: Sampler | None = None  # arguments of the verification, where random ones would not do
    moves: bool = False  # only moves or selects data: exact by construction, not verified
    specials: Specials = ALL_SPECIALS

    def __call__(self, context: Context, *args: Any, **kwargs: Any) -> Any:
        """The operator's result, in parts."""
        named = bind(self.op, args, kwargs)
        stages = self.stages(context, self.op, named)
        if len(stages) == 1:
            return self._run(context, stages[0], named, args, kwargs)
        results: list[Any] = [None] * len(self.op._schema.returns)
        layers: dict[str, SplitRecord] = {}
        for stage in stages:
            found = self._run(context, stage, named, args, kwargs)
            for place in stage.results:
                results[place] = found[place]
            if context.layer is not None:
                layers[stage.name] = context.layer
        _say_together(context, layers)
        return tuple(results)

    def _run(self, context: Context, stage: Stage, named: Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        candidates = fitting(stage, context.part_bytes, context.exact)
        if self.moves:
            chosen: Split = candidates[0]
            context.used(chosen.how, chosen.parts)
        else:
            sample = None if self.sample is None else self.sample(named)
            chosen = context.choose(stage.name, candidates, stage.whole, sample, self.specials)
            if isinstance(chosen, Piece) and chosen.rounds:
                context.inexact()  # even if it was identical on the data of the verification
        return chosen.run(*args, **kwargs)


def _say_together(context: Context, layers: Mapping[str, SplitRecord]) -> None:
    """Notes for the summary the divisions of all stages and their largest differences."""
    if not layers:
        return
    each = layers.values()
    context.used(
        "; ".join(f"{name}: {layer.how}" for name, layer in layers.items()),
        sum(layer.parts for layer in each),
        Difference(
            all(layer.identical for layer in each),
            max(layer.largest_difference for layer in each),
            max(layer.largest_relative for layer in each),
        ),
    )


def fitting(stage: Stage, part_bytes: int, exact: bool = False) -> Sequence[Piece]:
    """The candidates of a stage; if `exact`, those that do not divide sums. Raises CannotSplit if there are none."""
    of = f" of the {stage.name}" if stage.name else ""
    if not stage.candidates:
        raise CannotSplit(f"no division{of} makes its parts fit {part_bytes} bytes")
    found = [piece for piece in stage.candidates if not (exact and piece.rounds)]
    if not found:
        how = stage.candidates[0].how
        raise CannotSplit(
            f"only a division{of} of its sums ({how}) makes its parts fit {part_bytes} bytes", inexact=True
        )
    return found


def with_mask(op: OpOverload, mask: Sequence[bool]) -> Callable[..., Any]:
    """The operator with another `output_mask`; results that the mask does not ask for are None."""

    def run(*args: Any, **kwargs: Any) -> Any:
        results = op(**(bind(op, args, kwargs) | {"output_mask": list(mask)}))
        return tuple(result if wanted else None for result, wanted in zip(results, mask))

    return run


@dataclass(frozen=True)
class Description:
    """What `describe` says of a division."""

    how: str
    parts: int
    part_bytes: int  # of the largest part


DIVIDED: dict[str, Divided] = {}


def divides_stages(
    *names: str, sample: Sampler | None = None, moves: bool = False, specials: Specials = ALL_SPECIALS
) -> Callable[[Stages], Stages]:
    """Registers a function that divides the stages of operators. Operators that this PyTorch lacks are left out."""

    def register(stages: Stages) -> Stages:
        for name in names:
            op = registry.overload_of(name)
            if op is not None:
                DIVIDED[name] = Divided(op, stages, sample, moves, specials)
                registry.handler(name, module=stages.__module__)(DIVIDED[name])
        return stages

    return register


def divides(
    *names: str, sample: Sampler | None = None, moves: bool = False, specials: Specials = ALL_SPECIALS
) -> Callable[[_D], _D]:
    """Registers a divider of whole operators."""

    def register(divide: _D) -> _D:
        def stages(context: Context, op: OpOverload, named: Named) -> Sequence[Stage]:
            return [Stage("", tuple(range(len(op._schema.returns))), op, divide(context, op, named))]

        stages.__module__ = divide.__module__
        divides_stages(*names, sample=sample, moves=moves, specials=specials)(stages)
        return divide

    return register


def describe(
    name: str, args: Sequence[Any], part_bytes: int, *, kwargs: Mapping[str, Any] | None = None, chunk_bytes: int = 1
) -> dict[str, list[Description]]:
    """The divisions of each stage of a call (usually one, called ""), preferred ones first, without running anything.

    Tensors may be on the device "meta".

    Raises:
        CannotSplit: a stage has no division.
        KeyError: nothing here divides this operator.
    """
    divided = DIVIDED[name]
    context = Context(Call(name, tuple(args), dict(kwargs or {})), part_bytes, chunk_bytes=chunk_bytes)
    stages = divided.stages(context, divided.op, bind(divided.op, args, kwargs or {}))
    return {
        stage.name: [Description(piece.how, piece.parts, piece.part_bytes) for piece in fitting(stage, part_bytes)]
        for stage in stages
    }
