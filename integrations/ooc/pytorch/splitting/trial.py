"""Runs a division and the operator in one piece on the same data, and compares what they give.

On the CPU both run in plain memory. On a GPU the division runs as it will, and the whole uses host memory in place
where it does not fit; arguments and results are made and compared on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import Call, CannotSplit, Given, Sample, Specials, Split
from ooc.pytorch.splitting.memory import CPU, Memory
from ooc.pytorch.splitting.verification import (
    CHANGES_SPECIALS,
    IDENTICAL,
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


@dataclass
class Trial:
    """Compares divisions with the operator in one piece, of which arguments and result are made when first needed.

    A few numbers may agree by luck, so small results are compared for several sets of arguments.
    """

    call: Call
    memory: Memory
    whole: Callable[..., Any]
    sample: Sample | None
    specials: Specials
    copy: Callable[[Tensor, Tensor], object]  # (target, source) of tensors whose numbers count

    def compare(self, candidate: Split) -> Difference:
        with self.memory.trial():
            try:
                elements = sum(tensor.numel() for tensor in tensors_in(self._first[1][0]))
                turns = min(max(-(-_ENOUGH_ELEMENTS // max(elements, 1)), 1), _MOST_TURNS)
                for turn in range(turns):
                    found = self._compare_once(candidate, turn)
                    if not found.identical:
                        return found
                return IDENTICAL if self._same_specials(candidate, turns) else CHANGES_SPECIALS
            except CannotSplit:
                return INCOMPARABLE
            except (MemoryError, RuntimeError) as error:
                if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
                    raise
                raise CannotSplit(f"no host memory to find out whether parts give the same bits: {error}") from None

    @cached_property
    def _first(self) -> tuple[Given, Any]:
        return self._run_whole(0, None)

    def _same_specials(self, candidate: Split, turns: int) -> bool:
        kinds = self.specials.kinds
        if not kinds or not any(t.is_floating_point() or t.is_complex() for t in tensors_in(self._first)):
            return True
        numbers = range(max(turns, len(kinds)))
        return all(self._compare_once(candidate, n, kinds[n % len(kinds)]).identical for n in numbers)

    def _compare_once(self, candidate: Split, turn: int, special: str | None = None) -> Difference:
        given, expected = self._run_whole(turn, special) if turn > 0 or special is not None else self._first
        return difference(expected, self._outcome(candidate.run, given))

    def _run_whole(self, turn: int, special: str | None) -> tuple[Given, Any]:
        generator = torch.Generator().manual_seed(_SEED + turn)
        call = (self.call.arguments, self.call.keywords)
        given = map_tensors(call, lambda t: random_like(t, generator, self.copy))
        if self.sample is not None:
            given = self.sample(given)
        if special is not None:
            given = self._with_specials(given, special, generator)
        with self.memory.undivided():
            return given, self._outcome(self.whole, given)

    def _outcome(self, run: Callable[..., Any], given: Given) -> Any:
        """What a way to run the call returns, and its arguments afterwards, in plain memory."""
        memory = self.memory
        if not memory.on_gpu:
            arguments, keywords = duplicate(given)
            return run(*arguments, **keywords), arguments, keywords
        call = tensors_in((self.call.arguments, self.call.keywords))
        # Single numbers of the call may be the CPU's.
        devices = iter([t.device for t in call] if self.sample is None else [memory.device] * len(tensors_in(given)))
        arguments, keywords = map_tensors(given, lambda t: memory.copied(t, next(devices)))
        left = (run(*arguments, **keywords), arguments, keywords)
        return map_tensors(left, lambda t: memory.copied(t, CPU))

    def _with_specials(self, given: Given, kind: str, generator: torch.Generator) -> Given:
        overload: Any = registry.overload_of(self.call.operator)

        def changed(name: str, value: Any) -> Any:
            if name in self.specials.finite:
                return value
            return map_tensors(value, lambda tensor: put_special(tensor, kind, generator))

        arguments = tuple(changed(a.name, value) for a, value in zip(overload._schema.arguments, given[0]))
        return arguments, {name: changed(name, value) for name, value in given[1].items()}
