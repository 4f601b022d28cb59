"""Operators over lists of tensors (`_foreach_*`, fused optimizers) with an element that does not fit, cut into lines.

The adapter has cut the lists before, so what is left of their other elements fits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import Cut, cut_elementwise, meta
from ooc.pytorch.splitting.verification import map_tensors, random_like, tensors_in

_REDUCE = ("norm", "max", "min", "powsum")  # these reduce each tensor to one number
_FUSED = ("_fused_adam", "_fused_sgd", "_fused_adagrad")

Overload = torch._ops.OpOverload


@registry.finder
def over_lists(overload: Overload) -> registry.Function | None:
    """Finds elementwise operators over lists."""
    name = overload._schema.name.removeprefix("aten::")
    elementwise = name.startswith("_foreach_") and name.removeprefix("_foreach_").rstrip("_") not in _REDUCE
    if not (elementwise or name.startswith(_FUSED)) or any(a.is_out for a in overload._schema.arguments):
        return None
    return lambda context, *arguments, **keywords: _Lists(context, overload, arguments, keywords).run()


class _Lists:
    def __init__(
        self, context: Context, overload: Overload, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self.context, self.overload = context, overload
        self.arguments, self.keywords = arguments, keywords
        first = next((a for a in arguments if _is_list(a)), None)
        if first is None:
            raise CannotSplit("it has no list of tensors")
        self.length = len(first)
        self.writes = overload._schema.is_mutable
        self.scalars_last = overload._overloadname == "Tensor" and "_foreach_addc" in overload._schema.name

    def run(self) -> Any:
        each = [self._cuts(place) for place in range(self.length)]
        ways = [[cuts[min(way, len(cuts) - 1)] for cuts in each] for way in range(max(map(len, each)))]

        def in_parts(cuts: list[Cut], *arguments: Any, **keywords: Any) -> Any:
            results = [self._element(place, cut, arguments, keywords) for place, cut in enumerate(cuts)]
            return None if self.writes else results

        splits = [Split(cuts[0].how, sum(len(cut.indexes) for cut in cuts), partial(in_parts, cuts)) for cuts in ways]
        chosen = self.context.choose("", splits, self.overload, self._sample)
        return chosen.run(*self.arguments, **self.keywords)

    def _of(self, place: int, value: Any, last: bool = False) -> Any:
        """The value of an argument for one element of the lists."""
        if isinstance(value, list | tuple) and len(value) == self.length:
            return [value[place]]
        if last and self.scalars_last and isinstance(value, Tensor):
            return value.narrow(0, place, 1)
        return value

    def _one(
        self, place: int, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        last = len(arguments) - 1
        return [self._of(place, a, n == last) for n, a in enumerate(arguments)], {
            name: self._of(place, a) for name, a in keywords.items()
        }

    def _results(self, place: int) -> list[Tensor]:
        """The new tensors that the operator returns for an element, without memory."""
        if self.writes:
            return []
        arguments, keywords = self._one(place, self.arguments, self.keywords)
        with self.context.plain():
            without = map_tensors(arguments, meta)
            if self.scalars_last:
                without[-1] = torch.ones(1, dtype=arguments[-1].dtype)  # the operator reads it, so it is on the CPU
            return list(self.overload(*without, **map_tensors(keywords, meta)))

    def _cuts(self, place: int) -> list[Cut]:
        arguments, keywords = self._one(place, self.arguments, self.keywords)
        operands = tensors_in([a for a in (*arguments, *keywords.values()) if _is_list(a)])
        if any(t.layout != torch.strided for t in operands):
            raise CannotSplit("its tensors are not strided")
        alike = [t for t in operands if t.shape == operands[0].shape]
        results = [*self._results(place), *alike]
        context = self.context
        return cut_elementwise(results, [], context.part_bytes, context.chunk_bytes, context.threads)

    def _element(self, place: int, cut: Cut, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        one, named = self._one(place, arguments, keywords)
        shape = next(a for a in one if _is_list(a))[0].shape
        made = [self.context.empty(like=r) for r in self._results(place)]
        for index in cut.indexes:

            def part(tensor: Tensor, index: Any = index) -> Tensor:
                return cut.part(tensor, index) if tensor.shape == shape else tensor

            found = self.overload(*map_tensors(one, part), **map_tensors(named, part))
            for target, new in zip(made, found or ()):
                cut.part(target, index).copy_(new)
        return made[0] if made else None

    def _sample(self, generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Random lists; those after the second are positive, as sums of squares and numbers of steps are."""
        given = []
        for number, argument in enumerate(self.arguments):
            made = map_tensors(argument, lambda t: random_like(t, generator, self.context.copy_out))
            if number >= 2 and _is_list(made):
                for tensor in made:
                    tensor.abs_().add_(1)
            given.append(made)
        named = map_tensors(self.keywords, lambda t: random_like(t, generator, self.context.copy_out))
        return tuple(given), named


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)
