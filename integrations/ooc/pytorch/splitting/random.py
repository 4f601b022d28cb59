"""Random numbers in place, in parts that get the same numbers as in one piece.

PyTorch's generator of the CPU is a sequence, and these operators take from it in the order of memory. `normal_` works
in blocks of 16: it draws for all elements, and then once more for the last 16. So lines end at multiples of 16, and the
last line is not shorter than 16. Whether the numbers, and the generator's state afterwards, are the same is verified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry, registry
from ooc.pytorch.splitting.calls import CannotSplit, Specials, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import cut_elementwise

_UNIT = 16
_SEED = 1
_OPERATORS = """
    normal_ uniform_ random_ random_.from random_.to bernoulli_.float exponential_ geometric_ cauchy_ log_normal_
"""


def _in_lines(name: str) -> registry.Function:
    def fill(context: Context, target: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        overload = registry.overload_of(name)
        assert overload is not None
        if geometry.flat(target) is None:
            raise CannotSplit("its memory has gaps")
        cut = cut_elementwise([target], [], context.part_bytes, context.chunk_bytes, context.threads, _UNIT)[0]

        def run(tensor: Tensor, *given: Any, **named: Any) -> Any:
            return drawn(tensor, [cut.part(tensor, index) for index in cut.indexes], given, named)

        def whole(tensor: Tensor, *given: Any, **named: Any) -> Any:
            return drawn(tensor, [tensor], given, named)

        def drawn(tensor: Tensor, parts: list[Tensor], given: Any, named: dict[str, Any]) -> Any:
            generator = named.get("generator")
            if context.verifying:  # so that the program's generator is not touched
                generator = torch.Generator().manual_seed(_SEED)
            for part in parts:
                overload(part, *given, **{**named, "generator": generator})
            return (tensor, generator.get_state()) if context.verifying and generator is not None else tensor

        context.choose("", [Split("lines of memory", len(cut.indexes), run)], whole, specials=Specials(()))
        return run(target, *arguments, **keywords)  # type: ignore[no-any-return]

    return fill


for _name in _OPERATORS.split():
    registry.handler(f"aten::{_name}", repeatable=True)(_in_lines(f"aten::{_name}"))
