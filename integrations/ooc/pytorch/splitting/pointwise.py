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
from ooc.pytorch.splitting.blocks import as_tuple
from ooc.pytorch.splitting.calls import CannotSplit, Split, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import Cut, all_meta, cut_elementwise, meta_results
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.verification import map_tensors, tensors_in

Overload = torch._ops.OpOverload


# The pointwise operators of PyTorch 2.13 that are not tagged.
_MORE = """
    _masked_scale _prelu_kernel _prelu_kernel_backward complex elu_backward floor_divide floor_divide_
    hardshrink_backward hardsigmoid_backward hardswish_ hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_backward log_sigmoid_forward masked_fill masked_fill_ mish_backward polar rsub softplus_backward
    softshrink_backward
""".split()


@registry.finder
def pointwise(overload: Overload) -> registry.Function | None:
    """Finds operators that are tagged as pointwise, write what a tagged one would return, or are known as such."""
    name = overload._schema.name.removeprefix("aten::")
    if not (torch.Tag.pointwise in overload.tags or name in _MORE or _writes_pointwise(overload)):
        return None
    return partial(_elementwise, overload)


def _elementwise(overload: Overload, context: Context, /, *arguments: Any, **keywords: Any) -> Any:
    operands = tensors_in((arguments, keywords))
    if any(t.layout != torch.strided for t in operands):
        raise CannotSplit("its tensors are not strided")
    with context.plain(), its_own_errors():
        expected = meta_results(overload, arguments, keywords)
    written = _written(overload, arguments, keywords)
    results = [all_meta(t) for t in written] or expected
    if not results or any(r.shape != results[0].shape for r in results):
        raise CannotSplit("its results are of unlike sizes")
    if expected[0].shape != results[0].shape:
        raise CannotSplit("the result given has another size")
    read = [t for t in operands if not any(t is w for w in written)]
    cuts = cut_elementwise(results, read, context.part_bytes, context.chunk_bytes, context.threads)
    into = None if written else _out_overload(overload)

    def run(cut: Cut, *given: Any, **named: Any) -> Any:
        targets = _written(overload, given, named)
        if targets:
            for index in cut.indexes:
                overload(*_part(cut, given, index), **_part(cut, named, index))
            return targets[0] if len(targets) == 1 else tuple(targets)
        made = [context.empty(like=r) for r in results]
        for index in cut.indexes:
            part, options, targets = (_part(cut, value, index) for value in (given, named, made))
            if into is not None:
                into[0](*part, **options, **dict(zip(into[1], targets)))
                continue
            for target, result in zip(targets, as_tuple(overload(*part, **options))):
                target.copy_(result)
        return made[0] if len(made) == 1 else tuple(made)

    candidates = [Split(cut.how, len(cut.indexes), partial(run, cut)) for cut in cuts]
    chosen = context.choose("", candidates, overload, may_wait=True)
    return chosen.run(*arguments, **keywords)


def _part(cut: Cut, value: Any, index: Any) -> Any:
    return map_tensors(value, lambda tensor: cut.part(tensor, index))


def _written(overload: Overload, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Tensor]:
    """The arguments that the operator writes, in order."""
    named = bind(overload, arguments, keywords)
    writes = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([named[name] for name in writes])


def _inputs(overload: Overload) -> list[tuple[str, str]]:
    """Names and types of the arguments, without those for results."""
    return [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]


def _writes_pointwise(overload: Overload) -> bool:
    packet: Any = overload._overloadpacket
    wanted = _inputs(overload)
    if len(wanted) == len(overload._schema.arguments):  # it has no `out`, so it writes nothing or its first argument
        name = overload._schema.name.removeprefix("aten::")
        if not (name.endswith("_") and overload._schema.is_mutable and hasattr(torch.ops.aten, name[:-1])):
            return False
        packet = getattr(torch.ops.aten, name[:-1])
    others = (getattr(packet, name) for name in packet.overloads())
    alike = (o for o in others if _inputs(o) == wanted and len(o._schema.arguments) == len(wanted))
    return any(torch.Tag.pointwise in other.tags for other in alike)


def _out_overload(overload: Overload) -> tuple[Overload, list[str]] | None:
    """The variant of an operator that writes into given results, with their names; None if there is none."""
    packet: Any = overload._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        outs = [a.name for a in other._schema.arguments if a.is_out]
        if outs and _inputs(other) == _inputs(overload):
            return other, outs
    return None
