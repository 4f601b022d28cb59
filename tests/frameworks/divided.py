"""Runs every division of an operator on plain tensors, and watches what each operator that it calls touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import Call, CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import Divided, Stage
from ooc.pytorch.splitting.geometry import footprint
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.verification import difference, duplicate, tensors_in

registry.find("aten::add.Tensor")  # imports all modules with handlers
DIVIDED = {name: found.function for name, found in registry.named.items() if isinstance(found.function, Divided)}
SMALL_BYTES = 4096  # numbers and vectors that are there anyway


class Touched(TorchDispatchMode):
    """The most bytes that one operator's operands and results took: of views with few gaps (`footprint`) their own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.by, self.calls = 0, "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.name.startswith("aten::empty") or "as_strided" in func._schema.name):
            ranges = {}
            for tensor in tensors_in([args, kwargs or {}, result if isinstance(result, Tensor | tuple | list) else ()]):
                ranges[tensor.data_ptr()] = max(ranges.get(tensor.data_ptr(), 0), footprint(tensor, 1))
            self.calls += 1
            if sum(ranges.values()) > self.largest:
                self.largest, self.by = sum(ranges.values()), str(func)
        return result


def stages(name: str, args: Sequence[Any], part_bytes: int, **kwargs: Any) -> tuple[Context, Sequence[Stage]]:
    """The divisions of a call, and the context that their runs use."""
    context = Context(Call(name, tuple(args), kwargs), part_bytes, mode="allow")
    divided = DIVIDED[name]
    return context, divided.stages(context, bind(divided.op, args, kwargs))


def only(results: Any, places: Sequence[int]) -> list[Any]:
    """The results of one stage."""
    whole = list(results) if isinstance(results, tuple | list) else [results]
    return [whole[place] for place in places]


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def check(
    name: str,
    args: Sequence[Any],
    part_bytes: int,
    *,
    exact: bool,
    relative: float = 0.0,
    slack: int = SMALL_BYTES,
    **kwargs: Any,
) -> int:
    """Every division gives the whole operator's result, stays within its part, and is a division. Returns how many.

    `exact`: every bit, else the difference is at most `relative` of the largest value among arguments and results.
    """
    scale = max((largest(tensor) for tensor in tensors_in([list(args), kwargs])), default=0.0)
    _, found = stages(name, args, part_bytes, **kwargs)
    tried = 0
    for stage in found:
        given = duplicate((list(args), kwargs))
        expected = only(stage.whole(*given[0], **given[1]), stage.results)
        for piece in stage.candidates:
            mine = duplicate((list(args), kwargs))
            with Touched() as touched:
                result = only(piece.run(*mine[0], **mine[1]), stage.results)
            apart = difference([expected, given], [result, mine])
            what = f"{name} {stage.name} in parts ({piece.how}): {apart}"
            allowed = relative * max(scale, 0.0, *(largest(tensor) for tensor in tensors_in(expected)))
            assert apart.identical or (not exact and apart.largest <= allowed), what
            assert touched.largest <= part_bytes + slack, (
                f"{what}: {touched.by} {touched.largest} of {part_bytes} bytes"
            )
            assert piece.parts <= max(touched.calls, 1), what
            tried += 1
    return tried


def whole_and_parts(
    name: str, args: Sequence[Any], part_bytes: int, mode: str, **kwargs: Any
) -> tuple[Any, Any, Split | None]:
    """The result in one piece, in parts as the context chooses (None where it cannot), and the context's choice."""
    handler = registry.find(name)
    assert handler is not None
    context = Context(Call(name, tuple(args), kwargs), part_bytes, mode=mode)
    mine = duplicate((list(args), kwargs))
    try:
        result = handler.function(context, *mine[0], **mine[1])
    except CannotSplit as error:
        return None, None, error
    given = duplicate((list(args), kwargs))
    expected = registry.overload_of(name)(*given[0], **given[1])
    return [expected, given], [result, mine], context.ran
