"""Operators that compute each element by itself. They are cut anywhere: in place, into a given result or a new one.

PyTorch itself says which operators those are (`torch.Tag.pointwise`). So are those over lists of tensors (`_foreach_*`,
fused optimizers): for each place of the lists they are called with lists of one element, of which at least one does not
fit. The adapter has cut the lists before, so what is left of their other elements fits.

Random numbers come in parts that get the same numbers as in one piece: PyTorch's generator of the CPU is a sequence,
and operators take from it in the order of memory. `normal_` works in blocks of 16: it draws for all elements, and then
once more for the last 16. So parts end at multiples of 16, and the last one is not shorter than 16. Whether the
numbers, and the generator's state afterwards, are the same is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry, registry
from ooc.pytorch.splitting.axes import Named
from ooc.pytorch.splitting.calls import CannotSplit, Given, Split, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import Cut, all_meta, cut_elementwise, meta_results
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.verification import OF_LINES, Specials, map_tensors, tensors_in

Overload = torch._ops.OpOverload

# The pointwise operators of PyTorch 2.13 that are not tagged.
_MORE = """
    _masked_scale _prelu_kernel _prelu_kernel_backward complex elu_backward floor_divide floor_divide_
    hardshrink_backward hardsigmoid_backward hardswish_ hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_backward log_sigmoid_forward masked_fill masked_fill_ mish_backward polar rsub softplus_backward
    softshrink_backward
""".split()
_NOT_EACH = ("norm", "max", "min", "powsum", "mm")  # operators over lists that do not compute each element by itself
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def pointwise(overload: Overload) -> registry.Function | None:
    """Finds operators that are tagged as pointwise, write what a tagged one would return, or are known as such."""
    name = overload._schema.name.removeprefix("aten::")
    each = name.startswith("_foreach_") and name.removeprefix("_foreach_").rstrip("_") not in _NOT_EACH
    lists = (each or name in _FUSED) and not any(a.is_out for a in overload._schema.arguments)
    if lists or torch.Tag.pointwise in overload.tags or name in _MORE or _writes_pointwise(overload):
        return partial(_elementwise, overload, lists)
    return None


registry.finders.append(pointwise)


def _elementwise(overload: Overload, lists: bool, context: Context, /, *arguments: Any, **keywords: Any) -> Any:
    each = _calls(overload, lists, bind(overload, arguments, keywords))
    results = [call.results(context) for call in each]
    cuts = [cut_elementwise(context, made, call.read) for made, call in zip(results, each)]
    ways = [[found[min(way, len(found) - 1)] for found in cuts] for way in range(max(map(len, cuts)))]

    def run(way: list[Cut], *given: Any, **more: Any) -> Any:
        again = _calls(overload, lists, bind(overload, given, more))
        made = [call.run(context, cut, like) for call, cut, like in zip(again, way, results)]
        if lists:
            return [element for (element,) in made] if overload._schema.returns else None
        return made[0][0] if len(made[0]) == 1 else tuple(made[0])

    candidates = [Split(way[0].how, sum(len(cut.indexes) for cut in way), partial(run, way)) for way in ways]
    sample = _positive if lists else None
    return context.choose("", candidates, overload, sample, OF_LINES, may_wait=not lists).run(*arguments, **keywords)


class _Call:
    """One call of an elementwise operator, which may be over lists of one element."""

    def __init__(self, overload: Overload, named: Named) -> None:
        self.overload, self.named = overload, named
        writes = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written = tensors_in([named[name] for name in writes])
        self.read = [t for t in tensors_in(named) if not any(t is w for w in self.written)]

    def results(self, context: Context) -> list[Tensor]:
        """What the operator writes or returns, all of one shape, without memory."""
        operands, written = tensors_in(self.named), self.written
        if any(t.layout != torch.strided for t in operands):
            raise CannotSplit("its tensors are not strided")
        if self.overload._schema.returns:
            expected = meta_results(context, self.overload, self.named)
            shape = expected[0].shape
        else:  # single numbers, as of steps, may be among what is written, and have another shape
            expected, written = [], [t for t in written if t is written[0] or t.numel() != 1]
            shapes = [t.shape for t in operands if t is written[0] or t.numel() != 1]
            with its_own_errors():
                shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        results = [all_meta(t) for t in written] or expected
        if any(r.shape != shape for r in results):
            raise CannotSplit("its results are of unlike sizes, or not of those of its operands")
        return results

    def run(self, context: Context, cut: Cut, results: list[Tensor]) -> list[Tensor]:
        """Calls the operator for each part. Returns the tensors that it wrote, or new ones."""
        made = self.written or [context.empty(like=r) for r in results]
        into = None if self.written else _out_overload(self.overload)
        for index in cut.indexes:
            part, targets = (map_tensors(value, partial(cut.part, index=index)) for value in (self.named, made))
            if into is not None:
                into[0](**part, **dict(zip(into[1], targets)))
                continue
            found = self.overload(**part)
            for target, result in zip(targets, [] if self.written else tensors_in([found])):
                target.copy_(result)
        return made


def _calls(overload: Overload, over_lists: bool, named: Named) -> list[_Call]:
    """The call; or for each place of the lists the call with their elements, in lists of one."""
    if not over_lists:
        return [_Call(overload, named)]
    if isinstance(named.get("scalars"), Tensor):
        overload, named = overload._overloadpacket.ScalarList, named | {"scalars": named["scalars"].tolist()}
    lists = [value for value in named.values() if isinstance(value, list | tuple) and tensors_in(value)]
    length = len(lists[0])

    def of(value: Any, place: int) -> Any:
        return [value[place]] if isinstance(value, list | tuple) and len(value) == length else value

    return [_Call(overload, {name: of(value, n) for name, value in named.items()}) for n in range(length)]


def _positive(given: Given) -> Given:
    """Lists after the second with positive numbers, as sums of squares and numbers of steps are."""
    for tensor in tensors_in([value for value in given[0][2:] if isinstance(value, list | tuple)]):
        tensor.abs_().add_(1)
    return given


def _variants(overload: Overload, packet: Any) -> list[Overload]:
    """The variants of an operator with the same arguments, beside those for results."""

    def inputs(variant: Overload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in variant._schema.arguments if not a.is_out]

    found = [getattr(packet, name) for name in packet.overloads()]
    return [variant for variant in found if inputs(variant) == inputs(overload)]


def _writes_pointwise(overload: Overload) -> bool:
    """Whether it writes what a tagged one would return, into its first argument or into a given result."""
    name = overload._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name if name.endswith("__") else name.removesuffix("_"), None)
    writes = packet is not None and overload._schema.is_mutable
    return writes and any(torch.Tag.pointwise in other.tags for other in _variants(overload, packet))


def _out_overload(overload: Overload) -> tuple[Overload, list[str]] | None:
    """The variant of an operator that writes into given results, with their names; None if there is none."""
    for other in _variants(overload, overload._overloadpacket):
        if outs := [a.name for a in other._schema.arguments if a.is_out and str(a.type) == "Tensor"]:
            return other, outs
    return None


# ---- random numbers in place ----------------------------------------------------------------------------------------

_UNIT, _SEED = 16, 1


def _drawn(name: str, context: Context, /, target: Tensor, *arguments: Any, **keywords: Any) -> Any:
    overload: Any = registry.overload_of(name)
    if geometry.flat(target) is None:
        raise CannotSplit("its memory has gaps")
    most = (context.part_bytes - 2 * context.chunk_bytes) // (2 * target.element_size())  # with room for a copy
    size = max(most // _UNIT, 4) * _UNIT
    ends = [*range(0, max(target.numel() - _UNIT + 1, 1), size), target.numel()]

    def run(ends: Sequence[int], tensor: Tensor, *given: Any, **named: Any) -> Any:
        if context.verifying:  # so that the program's generator is not touched
            named["generator"] = torch.Generator().manual_seed(_SEED)
        line = geometry.flat(tensor) if ends else None
        for part in [tensor] if line is None else [line[start:end] for start, end in pairwise(ends)]:
            overload(part, *given, **named)
        return (tensor, named["generator"].get_state()) if context.verifying else tensor

    splits = [Split("lines of memory", len(ends) - 1, partial(run, ends))]
    chosen = context.choose("", splits, partial(run, ()), specials=Specials(()))
    return chosen.run(target, *arguments, **keywords)


for _name in """
    normal_ uniform_ random_ random_.from random_.to bernoulli_.float exponential_ geometric_ cauchy_ log_normal_
""".split():
    registry.handler(f"aten::{_name}", repeatable=True)(partial(_drawn, f"aten::{_name}"))
