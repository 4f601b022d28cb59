"""Runs a division and the operator in one piece on the same data, and compares what they give.

On the CPU both run in plain memory. On a GPU the division runs as it will, and the whole uses host memory in place
where it does not fit; arguments and results are made and compared on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import Call, CannotSplit, Given, Sample, Specials, Split
from ooc.pytorch.splitting.memory import CPU, Memory
from ooc.pytorch.splitting.verification import (
    CHANGES_SPECIALS,
    INCOMPARABLE,
    Difference,
    difference,
    duplicate,
    map_tensors,
    put_special,
    random_like,
    tensors_in,
)

_SEED = 20181213
_ENOUGH_ELEMENTS, _MOST_TURNS = 4096, 16  # so many numbers are compared, from at most so many results


class Trial:
    """Compares divisions with the operator in one piece, of which arguments and result are made when first needed.

    A few numbers may agree by luck, so small results are compared for several sets of arguments.
    """

    def __init__(
        self,
        call: Call,
        memory: Memory,
        whole: Callable[..., Any],
        sample: Sample | None,
        specials: Specials,
        copy: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        self._call, self._memory, self._whole, self._sample, self._specials = call, memory, whole, sample, specials
        self._copy = copy or memory.copy_out  # (target, source) of tensors whose numbers count
        self._made: tuple[Given, Any] | None = None  # the first arguments, and the result in one piece

    def compare(self, candidate: Split) -> Difference:
        with self._memory.trial():
            try:
                found = self._compare_once(candidate, 0)
                assert self._made is not None
                turns = _turns(self._made[1][0])
                for turn in range(1, turns):
                    if not found.identical:
                        break
                    found = found.worse(self._compare_once(candidate, turn))
                return found if not found.identical or self._same_specials(candidate, turns) else CHANGES_SPECIALS
            except CannotSplit:
                return INCOMPARABLE
            except (MemoryError, RuntimeError) as error:
                if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
                    raise
                raise CannotSplit(f"no host memory to find out whether parts give the same bits: {error}") from None

    def _same_specials(self, candidate: Split, turns: int) -> bool:
        kinds = self._specials.kinds
        if not kinds or not any(t.is_floating_point() or t.is_complex() for t in tensors_in(self._made)):
            return True
        numbers = range(max(turns, len(kinds)))
        return all(self._compare_once(candidate, n, kinds[n % len(kinds)]).identical for n in numbers)

    def _compare_once(self, candidate: Split, turn: int, special: str | None = None) -> Difference:
        if turn > 0 or special is not None:
            given, expected = self._run_whole(turn, special)
        else:
            self._made = self._made or self._run_whole(0, None)
            given, expected = self._made
        return difference(expected, self._outcome(candidate.run, given))

    def _run_whole(self, turn: int, special: str | None) -> tuple[Given, Any]:
        generator = torch.Generator().manual_seed(_SEED + turn)
        if self._sample is not None:
            given = self._sample(generator)
        else:
            call = (self._call.arguments, self._call.keywords)
            given = map_tensors(call, lambda t: random_like(t, generator, self._copy))
        if special is not None:
            given = self._with_specials(given, special, generator)
        return given, self._outcome(self._undivided, given)

    def _undivided(self, *arguments: Any, **keywords: Any) -> Any:
        with self._memory.undivided():
            return self._whole(*arguments, **keywords)

    def _outcome(self, run: Callable[..., Any], given: Given) -> Any:
        """What a way to run the call returns, and its arguments afterwards, in plain memory."""
        memory = self._memory
        if not memory.on_gpu:
            arguments, keywords = duplicate(given)
            return run(*arguments, **keywords), arguments, keywords
        devices = iter(self._devices(given))
        arguments, keywords = map_tensors(given, lambda t: memory.copied(t, next(devices)))
        left = (run(*arguments, **keywords), arguments, keywords)
        return map_tensors(left, lambda t: memory.copied(t, CPU))

    def _devices(self, given: Given) -> list[torch.device]:
        """Where each argument goes: single numbers of the call may be the CPU's."""
        if self._sample is not None:
            return [self._memory.device for _ in tensors_in(given)]
        return [t.device for t in tensors_in((self._call.arguments, self._call.keywords))]

    def _with_specials(self, given: Given, kind: str, generator: torch.Generator) -> Given:
        overload = registry.overload_of(self._call.operator)
        names = [a.name for a in overload._schema.arguments] if overload is not None else []

        def changed(name: str, value: Any) -> Any:
            return value if name in self._specials.finite else map_tensors(value, put)

        def put(tensor: Tensor) -> Tensor:
            return put_special(tensor, kind, generator)

        arguments = [changed(names[n] if n < len(names) else "", value) for n, value in enumerate(given[0])]
        return tuple(arguments), {name: changed(name, value) for name, value in given[1].items()}


def _turns(result: Any) -> int:
    """How many results have to be compared so that enough numbers are."""
    elements = sum(tensor.numel() for tensor in tensors_in(result))
    return min(max(-(-_ENOUGH_ELEMENTS // max(elements, 1)), 1), _MOST_TURNS)
