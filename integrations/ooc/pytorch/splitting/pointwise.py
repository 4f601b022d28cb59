"""Operators that compute each element by itself. They are cut anywhere: in place, into a given result or a new one.

PyTorch itself says which operators those are (`torch.Tag.pointwise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.context import CannotSplit, Context, Split, its_own_errors
from ooc.pytorch.splitting.cutting import Cut, cut_elementwise, meta_results
from ooc.pytorch.splitting.verification import map_tensors, tensors_in

Overload = torch._ops.OpOverload


# The pointwise operators of PyTorch 2.13 that are not tagged.
_MORE = """
    _masked_scale _prelu_kernel _prelu_kernel_backward complex elu_backward floor_divide floor_divide_
    hardsigmoid_backward hardswish_ hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_forward
    masked_fill masked_fill_ mish_backward polar rsub softplus_backward
""".split()


@registry.finder
def pointwise(overload: Overload) -> registry.Function | None:
    """Finds operators that are tagged as pointwise, write what a tagged one would return, or are known as such."""
    name = overload._schema.name.removeprefix("aten::")
    if not (torch.Tag.pointwise in overload.tags or name in _MORE or _writes_pointwise(overload)):
        return None

    def split(context: Context, *arguments: Any, **keywords: Any) -> Any:
        return elementwise(context, overload, arguments, keywords)

    return split


def elementwise(context: Context, overload: Overload, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Runs an elementwise operator in parts. Raises CannotSplit."""
    operands = tensors_in((arguments, keywords))
    if any(t.layout != torch.strided for t in operands):
        raise CannotSplit("its tensors are not strided")
    written = written_arguments(overload, arguments, keywords)
    results = list(written)
    if not results:
        with context.plain(), its_own_errors():
            results = meta_results(overload, arguments, keywords)
    if not results or any(r.shape != results[0].shape for r in results):
        raise CannotSplit("its results are of unlike sizes")
    read = [t for t in operands if not any(t is w for w in written)]
    if written and _expected_shape(context, overload, arguments, keywords) != results[0].shape:
        raise CannotSplit("the result given has another size")
    cuts = cut_elementwise(results, read, context.part_bytes, context.chunk_bytes, context.threads)
    into = None if written else out_overload(overload)

    def run(cut: Cut, *given: Any, **named: Any) -> Any:
        targets = written_arguments(overload, given, named)
        if targets:
            for index in cut.indexes:
                overload(*_part(cut, given, index), **_part(cut, named, index))
            return targets[0] if len(targets) == 1 else tuple(targets)
        made = [context.empty(like=r) for r in results]
        for index in cut.indexes:
            _compute(
                overload, into, _part(cut, given, index), _part(cut, named, index), [cut.part(m, index) for m in made]
            )
        return made[0] if len(made) == 1 else tuple(made)

    chosen = context.choose("", [Split(cut.how, len(cut.indexes), partial(run, cut)) for cut in cuts], overload)
    return chosen.run(*arguments, **keywords)


def _compute(
    overload: Overload, into: tuple[Overload, list[str]] | None, arguments: Any, keywords: Any, targets: list[Tensor]
) -> None:
    if into is not None:
        into[0](*arguments, **keywords, **dict(zip(into[1], targets)))
        return
    for target, part in zip(targets, as_list(overload(*arguments, **keywords))):
        target.copy_(part)


def _part(cut: Cut, value: Any, index: Any) -> Any:
    return map_tensors(value, lambda tensor: cut.part(tensor, index))


def as_list(result: Any) -> list[Tensor]:
    """The tensors of an operator's result."""
    return [result] if isinstance(result, Tensor) else list(result)


def _expected_shape(context: Context, overload: Overload, arguments: Any, keywords: Any) -> torch.Size:
    with context.plain(), its_own_errors():
        return meta_results(overload, arguments, keywords)[0].shape


def written_arguments(overload: Overload, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operator writes, in order."""
    found = []
    for place, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = (
            keywords.get(argument.name) if argument.name in keywords or place >= len(arguments) else arguments[place]
        )
        found += tensors_in(value)
    return found


def _writes_pointwise(overload: Overload) -> bool:
    arguments = overload._schema.arguments
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    packet: Any = overload._overloadpacket
    if len(wanted) == len(arguments):  # it has no `out`, so it writes nothing or its first argument
        name = overload._schema.name.removeprefix("aten::")
        if not (name.endswith("_") and overload._schema.is_mutable and hasattr(torch.ops.aten, name[:-1])):
            return False
        packet = getattr(torch.ops.aten, name[:-1])
    return any(
        torch.Tag.pointwise in other.tags and [(a.name, str(a.type)) for a in other._schema.arguments] == wanted
        for other in (getattr(packet, name) for name in packet.overloads())
    )


def out_overload(overload: Overload) -> tuple[Overload, list[str]] | None:
    """The variant of an operator that writes into given results, with their names; None if there is none."""
    wanted = [(a.name, str(a.type)) for a in overload._schema.arguments]
    packet: Any = overload._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [a.name for a in other._schema.arguments if a.is_out]
        if outs and [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out] == wanted:
            return other, outs
    return None
